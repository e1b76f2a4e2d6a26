"""What is said of simulated hosts on the command line, without making any."""

from __future__ import annotations

import pytest

from paceline.bench.simulated_hosts import hosts_and_ranks
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
