"""Traces: a bounded file, complete however its rank ends; the page and the JSON made of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from paceline.cli.main import main
from paceline.diagnostics.chrome_trace import chrome_trace
from paceline.diagnostics.report_page import render_page, write_report
from paceline.diagnostics.timeline import Timeline, read_timeline
from paceline.diagnostics.trace_reader import read_traces
from paceline.errors import ConfigError
from paceline.telemetry.generation_log import append_generation
from paceline.telemetry.status_page import Phase
from paceline.telemetry.trace_writer import Kind, TraceWriter

MS = 10**6


def write_run(folder, *, steps=30, slow_ms=20, samples=64):
    """Two ranks, two buckets; rank 1 takes longer in the loader."""
    for rank in (0, 1):
        writer = TraceWriter(folder, rank, 2)
        writer.set_buckets(0, ["head.weight", "body.weight"], [4096, 65536])
        now = 10**12
        for step in range(steps):
            load = (2 + (slow_ms if rank == 1 else 0)) * MS
            end = now + (2 + slow_ms + 3 + 6) * MS
            marks = [now, now + load, now + load + 3 * MS, now + load + 9 * MS]
            for phase, a, b in zip(
                (Phase.LOADER, Phase.FORWARD, Phase.BACKWARD), marks, marks[1:], strict=False
            ):
                writer.add(phase, a, b, step)
            first = marks[2] + 2 * MS
            writer.add(Kind.BUCKET_FILL, marks[2], first, step, 0, 0)
            writer.add(Kind.BUCKET_FILL, first, marks[3], step, 1, 0)
            writer.add(Kind.BUCKET_FLIGHT, first, end + MS // 2, step, 0, 0)
            writer.add(Kind.BUCKET_FLIGHT, marks[3], end + MS, step, 1, 0)
            writer.add(Kind.SYNC_POINT, marks[3], end + MS, step, 77, step)
            if rank == 0 and samples:
                writer.add_scalars(step, 2.0 / (step + 1), samples)
            now = end + MS
        writer.close()


def test_a_trace_is_read_as_it_was_written(tmp_path):
    writer = TraceWriter(tmp_path, 1, 2, capacity=4)
    for step in range(7):
        writer.add(Phase.FORWARD, step * 10, step * 10 + 5, step)
    writer.close()
    (trace,) = read_traces(tmp_path)
    assert (trace.rank, trace.world, trace.dropped, trace.pid) == (1, 2, 3, os.getpid())
    assert [span.step for span in trace.spans] == [3, 4, 5, 6]


def test_a_trace_survives_the_death_of_its_rank(tmp_path):
    code = (
        "import os, signal, time\n"
        "from paceline.telemetry.recorder import recorder\n"
        "from paceline.telemetry.status_page import Phase\n"
        f"recorder.start_trace({str(tmp_path)!r}, 0, 1)\n"
        "for _ in range(5):\n"
        "    recorder.phase(Phase.FORWARD); time.sleep(0.001); recorder.phase(Phase.OTHER)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (trace,) = read_traces(tmp_path)
    assert sum(span.kind == Phase.FORWARD for span in trace.spans) == 5


def test_ranks_of_an_earlier_larger_run_are_left_out(tmp_path):
    for world in (3, 2):
        for rank in range(world):
            TraceWriter(tmp_path, rank, world, capacity=4).close()
    assert [(trace.rank, trace.world) for trace in read_traces(tmp_path)] == [(0, 2), (1, 2)]


def test_a_rank_that_was_replaced_has_the_spans_of_both_processes(tmp_path, monkeypatch):
    """And none of those that had its number in an earlier job."""
    for job, lives in (("before", 3), ("now", 2)):
        monkeypatch.setenv("PACELINE_RUN_ID", job)
        for life in range(lives):
            monkeypatch.setattr("os.getpid", lambda life=life: 1000 + life)
            writer = TraceWriter(tmp_path, 1, 2, capacity=4)
            writer.add(Phase.FORWARD, 10 * life, 10 * life + 5, life)
            writer.close()
    (trace,) = read_traces(tmp_path)
    assert (trace.job, [span.start_ns for span in trace.spans]) == ("now", [0, 10])


def test_changes_of_ranks_are_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN_ID", "now")
    write_run(tmp_path)
    facts = {"ranks": [0, 2], "reason": "rank 1 (pid 7) was killed by SIGKILL at step 3"}
    append_generation(tmp_path, job="before", number=1, still_ns=0, **facts)
    append_generation(tmp_path, job="now", number=0, still_ns=0, **facts)
    append_generation(tmp_path, job="now", number=1, still_ns=2_000_000, **facts)
    (change,) = read_timeline(tmp_path).changes
    assert (change.generation, change.still_ns) == (1, 2_000_000)
    assert "rank 1 (pid 7) was killed by SIGKILL" in write_report(tmp_path).read_text()


def test_what_is_not_a_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--trace"):
        read_traces(tmp_path)
    (tmp_path / "rank-00000.trace").write_bytes(b"something else" * 1000)
    with pytest.raises(ConfigError, match="not a trace"):
        read_traces(tmp_path)


def test_the_timeline_knows_who_is_slow_and_what_was_hidden(tmp_path):
    write_run(tmp_path)
    timeline = Timeline(read_traces(tmp_path))
    assert timeline.waits().share(1, Phase.LOADER) > 0.99
    assert (timeline.straggler().rank, timeline.straggler().phase) == (1, Phase.LOADER)
    last, first = timeline.buckets()  # the later bucket has nothing to hide behind
    assert (last.bucket, last.names, last.late_rank) == (1, "body.weight", 1)
    assert last.hidden_ns == 0
    assert first.hidden_ns == pytest.approx(4 * MS)
    assert last.waited_ns == pytest.approx(10 * MS)  # 20 on rank 0, none on rank 1
    assert last.reduced_ns == pytest.approx(1 * MS)
    hidden, exposed = timeline.communication()
    assert hidden == pytest.approx(30 * 2 * 4 * MS)
    assert exposed > hidden
    assert "Rank 1 is the one the others wait for" in timeline.summary()
    assert "num_workers" in timeline.summary()
    assert [point.loss for point in timeline.scalars()][:2] == [2.0, 1.0]


def test_the_json_is_what_chrome_and_perfetto_read(tmp_path):
    write_run(tmp_path, steps=3)
    path = write_report(tmp_path, tmp_path / "out" / "page.html")
    events = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    assert events == list(chrome_trace(Timeline(read_traces(tmp_path))))
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in complete} >= {
        "loader",
        "forward",
        "backward",
        "synchronise",
        "bucket 1",
    }
    assert all(event["dur"] >= 0 and {"ts", "pid", "tid"} <= event.keys() for event in complete)


@pytest.mark.parametrize(("samples", "unit"), [(64, "samples per second"), (0, "steps per second")])
def test_the_page_says_what_it_counts_per_second(tmp_path, samples, unit):
    write_run(tmp_path, samples=samples)
    page = write_report(tmp_path).read_text()
    assert unit in page
    assert ({"samples per second", "steps per second"} - {unit}).pop() not in page


def test_a_loss_that_is_not_finite_spoils_neither_json_nor_page(tmp_path):
    writer = TraceWriter(tmp_path, 0, 1)
    for step, loss in enumerate((1.0, float("nan"), float("inf"), 0.5)):
        writer.add(Phase.FORWARD, step * MS, (step + 1) * MS, step)
        writer.add_scalars(step, loss, 8)
    writer.close()
    path = write_report(tmp_path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    events = json.loads(path.with_suffix(".json").read_text(), parse_constant=refuse)["traceEvents"]
    assert [event["args"]["loss"] for event in events if event["ph"] == "C"] == [1.0, 0.5]


def test_the_page_is_self_contained(tmp_path):
    write_run(tmp_path, steps=3)
    text = render_page(Timeline(read_traces(tmp_path)))
    assert "__DATA__" not in text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest", text)


def test_names_cannot_break_out_of_the_page(tmp_path):
    writer = TraceWriter(tmp_path, 0, 1, script="</script><script>alert(1)</script>")
    writer.add(Phase.FORWARD, 10, 20, 0)
    writer.close()
    assert "</script><script>alert" not in render_page(Timeline(read_traces(tmp_path)))


def test_the_command_writes_a_page_and_prints_what_limits_the_run(tmp_path, capsys):
    write_run(tmp_path)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    output = capsys.readouterr().out
    assert str(tmp_path / "page.html") in output
    assert "Rank 1" in output


def test_a_timeline_begins_where_the_records_of_all_ranks_do(tmp_path):
    for rank, capacity in ((0, 4), (1, 16)):
        writer = TraceWriter(tmp_path, rank, 2, capacity=capacity)
        for step in range(10):
            writer.add(Phase.FORWARD, step * 10, step * 10 + 5, step)
        writer.close()
    timeline = Timeline(read_traces(tmp_path))
    assert (
        [span.step for span in timeline.spans[0]]
        == [span.step for span in timeline.spans[1]]
        == [6, 7, 8, 9]
    )
    assert (timeline.spans[1][0].start_ns, timeline.duration_ns) == (0, 35)
    assert "The oldest 6 spans were overwritten" in timeline.summary()


def test_a_single_rank_has_the_steps_of_its_optimizer(tmp_path):
    writer = TraceWriter(tmp_path, 0, 1)
    for step in range(5):
        writer.add(Phase.FORWARD, step * 10 * MS, (step * 10 + 6) * MS, 0)
        writer.add(Phase.OPTIMIZER, (step * 10 + 6) * MS, (step * 10 + 10) * MS, 0)
    writer.close()
    summary = Timeline(read_traces(tmp_path)).summary()
    assert summary.startswith("One rank made 5 steps in 0.1 s. 60% of its time went into forward.")
    assert "waiting for one another" not in summary


def test_an_empty_trace_is_reported_as_such(tmp_path):
    TraceWriter(tmp_path, 0, 1).close()
    assert write_report(tmp_path).exists()
    assert Timeline(read_traces(tmp_path)).summary().startswith("Nothing was recorded")


def test_buckets_in_flight_together_count_once(tmp_path):
    writer = TraceWriter(tmp_path, 0, 1)
    writer.add(Phase.BACKWARD, 0, 100, 0)
    writer.add(Kind.BUCKET_FLIGHT, 20, 110, 0, 0, 0)
    writer.add(Kind.BUCKET_FLIGHT, 50, 120, 0, 1, 0)
    writer.add(Kind.SYNC_POINT, 100, 120, 0, 7, 0)
    writer.close()
    assert Timeline(read_traces(tmp_path)).communication() == (80, 20)
