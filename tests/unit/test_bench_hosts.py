"""What is said of simulated hosts on the command line, without making any."""

from __future__ import annotations

import pytest

from paceline.bench.simulated_hosts import delay_ns, hosts_and_ranks, simulated_hosts
from paceline.cli.main import main
from paceline.errors import ConfigError


def test_hosts_and_ranks_of_each():
    assert hosts_and_ranks("2x4") == (2, 4)
    assert hosts_and_ranks(None) == (0, 0)


@pytest.mark.parametrize("text", ["2", "1x4", "2x0", "ax2", "2x2x2"])
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="hosts x ranks per host"):
        hosts_and_ranks(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2ms", 2_000_000), ("500us", 500_000), ("0.5ms", 500_000), ("1s", 10**9), ("0ms", 0)],
)
def test_a_delay_in_nanoseconds(text, expected):
    assert delay_ns(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2", "ms", "2 ms", "2min", "-2ms", ".5ms", "1e3us", "2ms,3ms"]
)
def test_any_other_delay_is_refused(text):
    with pytest.raises(ConfigError, match=rf"--delay {text}: .*for example 2ms"):
        delay_ns(text)


def test_a_bad_delay_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ConfigError, match="--delay soon"), simulated_hosts(2, delay="soon"):
        pass


@pytest.mark.parametrize("name", ["collectives", "ddp"])
def test_a_bad_delay_is_refused_by_benchmarks(name, capsys):
    assert main(["bench", name, "--hosts", "2x2", "--delay", "soon"]) == 2
    assert "--delay soon: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--link", "1gbit"], ["--delay", "2ms"], ["--calls", "scatter"]]
)
def test_collectives_between_hosts_need_hosts(arguments, capsys):
    assert main(["bench", "collectives", *arguments]) == 2
    assert "add --hosts 2x2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "1gbit"], "add --hosts 2x2"),
        (["--delay", "2ms"], "add --hosts 2x2"),
        (["--hosts", "2x2", "--plot", "steps.svg"], "for one host only"),
        (["--hosts", "2"], "hosts x ranks per host"),
    ],
)
def test_steps_between_hosts_need_hosts(arguments, message, capsys):
    assert main(["bench", "ddp", *arguments]) == 2
    assert message in capsys.readouterr().err
