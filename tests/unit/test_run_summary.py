"""A run in a few figures: from status pages and timelines to a card, to JSON, to a comparison."""

from __future__ import annotations

import json

import pytest

from paceline.cli.main import main
from paceline.cli.summary_card import render_card
from paceline.diagnostics.job_pace import JobPace
from paceline.diagnostics.page_reader import StatusPage
from paceline.diagnostics.run_comparison import RunComparison
from paceline.diagnostics.run_summary import ElasticFigures, RankLife, RunSummary, read_summary
from paceline.diagnostics.stragglers import find_late_rank
from paceline.errors import ConfigError
from paceline.telemetry.recorder import Recorder
from paceline.telemetry.status_page import PHASES, Phase

S = 10**9
OPTIMIZER = {
    "is_only_one": True,
    "facts": {
        "name": "AdamW",
        "code": "loop",
        "tensors": 12,
        "elements": 17_000_000,
        "threads": 1,
        "options": [["weight_decay", 0.01]],
    },
}


def page(rank=0, *, world=2, steps=100, since=1, last=11, described="", pid=1, **figures):
    """A page whose owner trained from `since` to `last`, in seconds; phases in seconds too."""
    spent = [0] * len(PHASES)
    for name in list(figures):
        if name.upper() in Phase.__members__:
            spent[Phase[name.upper()]] = int(figures.pop(name) * S)
    return StatusPage(
        pid=pid,
        rank=rank,
        world=world,
        job="job",
        script="train.py",
        main_tid=1,
        main_thread=1,
        started_ns=0,
        phase=Phase.OTHER,
        phase_since_ns=0,
        call=None,
        forwards=steps,
        backwards=steps,
        syncs=steps,
        optimizer_steps=steps,
        calls=0,
        timeout_ns=0,
        stacks_fd=-1,
        training_since_ns=since * S,
        last_step_ns=last * S,
        spent_ns=tuple(spent),
        optimizer=described,
        **figures,
    )


def summary(*pages, **options):
    lives = [RankLife(each.rank, each) for each in pages]
    return RunSummary.of_pages(lives, **{"script": "train.py", "outcome": "finished", **options})


def two_ranks(**options):
    """Rank 1 is slow in its loader, and rank 0 waits."""
    return summary(
        page(0, loader=1, forward=3, synchronise=4),
        page(1, loader=5, forward=3, synchronise=0),
        **options,
    )


# -- figures ---------------------------------------------------------------------------------------


def test_steps_and_speed_come_from_the_first_to_the_last_step():
    run = summary(page(0, since=3, last=9), page(1, since=1, last=11))
    assert (run.ranks, run.world, run.steps, run.seconds) == (2, 2, 100, 10.0)
    assert (run.steps_per_second, run.samples_per_second) == (10.0, None)


def test_every_host_has_a_clock_of_its_own():
    lives = [
        RankLife(0, page(0, world=3, since=3, last=9)),
        RankLife(1, page(1, world=3, since=1003, last=1013), host=1),
        RankLife(2, page(2, world=3, since=1002, last=1010), host=1),
    ]
    run = RunSummary.of_pages(lives, script="train.py", outcome="finished")
    assert (run.ranks, run.seconds) == (3, 11.0)


def test_the_card_of_another_host_than_the_first_says_whose_ranks_it_counts():
    part = ElasticFigures(3, 1, 2, of_this_host=True)
    assert "after 100 steps on 2 ranks of this host\n" in render_card(two_ranks(elastic=part))
    assert RunSummary.load(two_ranks(elastic=part).dump()).elastic == part


def test_samples_are_those_reported_or_else_those_of_all_loaders():
    counted = summary(page(0, samples=300), page(1, samples=200))
    assert counted.samples == 500
    reported = summary(page(0, samples=300, reported_samples=700), page(1, samples=200))
    assert (reported.samples, reported.samples_per_second) == (700, 70.0)


def test_a_training_counts_its_steps_over_all_processes_of_a_job():
    lives = [
        page(0, steps=30, steps_before=100, reached_step=130, reported_samples=300),  # was killed
        page(0, steps=60, steps_before=140, reached_step=200, reported_samples=600),
        page(1, steps=100, steps_before=100, reached_step=200, reported_samples=1000),
    ]
    assert (summary(*lives).steps, summary(*lives).samples) == (100, 1000)
    # Nobody was there from the beginning to the end.
    assert (summary(*lives[:2]).steps, summary(*lives[:2]).samples) == (100, 1000)


def test_a_job_that_never_trained_has_no_speed():
    run = summary(page(0, steps=0), page(1, steps=0))
    assert (run.steps, run.ranks, run.samples, run.steps_per_second) == (0, 0, None, None)
    assert summary().dump()["steps"] == 0


def test_the_rank_that_waits_least_is_the_late_one():
    run = two_ranks()
    assert run.waiting == pytest.approx(0.25)
    assert (run.late_rank.rank, run.late_rank.phase) == (1, Phase.LOADER)
    assert run.late_rank.share == pytest.approx(0.5)
    even = {rank: {Phase.FORWARD: 3.0, Phase.SYNCHRONISE: 1.0} for rank in (0, 1)}
    assert find_late_rank(even) is None
    assert find_late_rank({0: {Phase.FORWARD: 3.0}}) is None
    assert find_late_rank({}) is None


def test_a_rank_that_was_there_for_a_moment_is_not_the_late_one():
    spent = {rank: {Phase.FORWARD: 30.0, Phase.SYNCHRONISE: 10.0} for rank in (0, 1)}
    assert find_late_rank({**spent, 2: {Phase.FORWARD: 1.0}}) is None


def test_an_optimizer_that_takes_little_is_not_mentioned():
    facts = json.dumps(OPTIMIZER)
    quick = summary(page(0, forward=9.9, optimizer=0.1, described=facts))
    assert (quick.optimizer.share, quick.optimizer_hint) == (pytest.approx(0.01), None)
    slow = summary(page(0, forward=7, optimizer=3, described=facts))
    assert slow.optimizer_hint == (
        "AdamW (12 tensors, 17.0 million numbers) takes 30% of the time, stepped by torch's loop: "
        "paceline.optim.AdamW, or fused=True, passes over memory once"
    )
    assert f"  optimizer  {slow.optimizer_hint}" in render_card(slow)
    half_written = summary(page(0, forward=9, optimizer=1, described='{"is_only'))
    assert half_written.optimizer is None


def test_pages_and_traces_of_one_run_tell_the_same(tmp_path):
    recorder = Recorder()
    recorder.start_trace(str(tmp_path), 0, 1)
    for _ in range(5):
        for phase in (Phase.LOADER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            recorder.phase(phase)
            sum(range(20_000))
        recorder.scalars(0.5, 8)
    recorder.stop_trace()
    fields = recorder.page.fields
    from_trace = read_summary(tmp_path)
    assert (from_trace.steps, from_trace.samples) == (5, 40)
    for phase in (Phase.LOADER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        on_page = fields[256 + phase] / 1e9
        assert from_trace.spent_s[0][phase] == pytest.approx(on_page)
    assert Phase.STARTING not in from_trace.spent_s[0]


# -- JSON ------------------------------------------------------------------------------------------


def test_json_gives_the_same_summary_back(tmp_path):
    elastic = ElasticFigures(3, 1, 1)
    run = two_ranks(elastic=elastic, timeline="runs/timeline.html")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run.dump()))
    again = read_summary(path)
    assert again == run
    assert again.dump() == run.dump()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1}', "42"])
def test_another_file_is_refused_with_what_was_expected(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json' should be a file that `paceline run"):
        read_summary(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_summary(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="no trace in"):
        read_summary(tmp_path)


# -- the card --------------------------------------------------------------------------------------


def test_the_card_is_plain_text():
    elastic = ElasticFigures(3, 1, 2)
    text = render_card(two_ranks(elastic=elastic, timeline="runs/timeline.html"))
    assert text == "\n".join(
        [
            "paceline: train.py finished after 100 steps on 2 ranks",
            "  speed     10.0 s, 100.00 ms a step, 10.0 steps per second",
            "  time      loader 38%, forward 38%, waiting 25%",
            "  waiting   25% of the ranks' time; rank 1 is slower in the data loader: "
            "the others wait 50% of the time",
            "  elastic   3 generations; 1 rank lost, 2 joined",
            "  timeline  runs/timeline.html",
        ]
    )
    assert text.isascii()


@pytest.mark.parametrize(("outcome", "words"), [("failed", "failed"), ("stopped", "was stopped")])
def test_the_card_says_how_far_a_run_came(outcome, words):
    assert f"train.py {words} after 1 step on 1 rank\n" in render_card(
        summary(page(0, world=1, steps=1, forward=1), outcome=outcome)
    )
    assert "on 1 of 4 ranks\n" in render_card(summary(page(2, world=4, forward=1), outcome=outcome))


def test_a_run_that_is_stopped_in_its_first_step_has_a_card_too():
    text = render_card(summary(page(0, world=1, steps=1, last=1), outcome="stopped"), width=80)
    assert text == "paceline: train.py was stopped after 1 step on 1 rank\n  speed  0.0 s"


def test_a_narrow_terminal_has_narrow_lines_and_a_colourful_one_the_same_words():
    run = two_ranks(timeline="runs/timeline.html")
    wide = render_card(run)
    for width in (200, 80, 40, 30):
        lines = render_card(run, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == " ".join(wide.split())
    assert max(map(len, render_card(run, width=1).splitlines())) < 40
    long = render_card(two_ranks(timeline="/very" * 20 + ".html"), width=30)
    assert "/very" * 20 + ".html" in long  # can be copied
    coloured = render_card(run, colour=True)
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == wide


# -- two runs --------------------------------------------------------------------------------------


def test_a_comparison_says_which_run_is_faster_and_where():
    slow = two_ranks()
    fast = summary(
        page(0, last=6, loader=1, forward=3, synchronise=0), page(1, last=6, loader=1, forward=3)
    )
    both = RunComparison("slow.json", slow, "fast.json", fast)
    assert both.speed_ratio == pytest.approx(2.0)
    assert both.sentence() == (
        "fast.json is 2.00 times as fast, in steps per second; it saves most in the data loader, "
        "20.00 ms a step."
    )
    back = RunComparison("fast.json", fast, "slow.json", slow)
    assert back.sentence() == both.sentence()
    assert RunComparison("a", slow, "b", slow).sentence().startswith("Both are as fast")
    rows = [line.split() for line in both.table().splitlines()]
    assert ["loader,", "ms", "a", "step", "30.00", "10.00", "0.33"] in rows
    assert ["waiting", "25%", "0%"] in rows
    assert "cannot be told" in RunComparison("a", slow, "b", summary()).sentence()


def test_samples_decide_where_both_runs_know_them():
    few, many = (summary(page(0, samples=count)) for count in (100, 400))
    assert RunComparison("few", few, "many", many).speed_ratio == 4.0


def test_the_command_compares_two_files(tmp_path, capsys):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(two_ranks().dump()))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["compare", *files]) == 0
    assert "Both are as fast as one another" in capsys.readouterr().out
    assert main(["compare", "--json", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["speed_ratio"], found["first"]["steps"]) == (1.0, 100)
    assert main(["compare", files[0], str(tmp_path / "c.json")]) == 2
    assert "c.json' cannot be read: No such file" in capsys.readouterr().err


# -- a running job ---------------------------------------------------------------------------------


def test_the_pace_is_that_between_two_looks():
    pace = JobPace()
    first = [page(0, steps=10, forward=3, synchronise=1, pid=1), page(1, steps=10, pid=2)]
    assert pace.update(first, 3 * S) == "5.0 steps/s, waiting 25%"
    second = [
        page(0, steps=30, forward=4, synchronise=2, samples=640, pid=1),
        page(1, steps=30, pid=2),
    ]
    assert pace.update(second, 4 * S) == "20.0 steps/s, 640 samples/s, waiting 50%"
    assert pace.update(second, 5 * S) == ""  # nothing has happened since
    assert JobPace().update([page(0, since=0, steps=0)], S) == ""
