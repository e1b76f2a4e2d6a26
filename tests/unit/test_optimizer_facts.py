"""Whose code steps an optimizer is found out in a traced run, and said where people look."""

from __future__ import annotations

import json

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.diagnostics import session
from paceline.diagnostics.optimizer_facts import OptimizerFacts, StepCode, facts_of
from paceline.diagnostics.report_page import render_page
from paceline.diagnostics.timeline import Timeline
from paceline.diagnostics.trace_reader import read_traces
from paceline.telemetry.recorder import recorder
from paceline.telemetry.status_page import Phase
from paceline.telemetry.trace_writer import TraceWriter

MS = 10**6


def parameters(*sizes, device="cpu"):
    return [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]


class Renamed(torch.optim.Adam):
    pass


class Foreign(torch.optim.Adam):
    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    ("make", "code", "name"),
    [
        (torch.optim.AdamW, StepCode.LOOP, "AdamW"),
        (Renamed, StepCode.LOOP, "Adam"),
        (lambda p: torch.optim.SGD(p, foreach=True), StepCode.FOREACH, "SGD"),
        (lambda p: torch.optim.Adagrad(p, fused=True), StepCode.FUSED, "Adagrad"),
        (torch.optim.RMSprop, StepCode.OTHER, "RMSprop"),
        (Foreign, StepCode.OTHER, "Foreign"),
        (paceline.optim.SGD, StepCode.PACELINE, "SGD"),
    ],
)
def test_whose_code(make, code, name):
    facts = facts_of(make(parameters(3, 4)))
    assert (facts.code, facts.name, facts.tensors, facts.elements) == (code, name, 2, 7)
    assert OptimizerFacts.load(json.loads(json.dumps(facts.dump()))) == facts


def test_only_parameters_on_the_cpu_count_and_of_different_groups_the_slow_ones():
    assert facts_of(torch.optim.Adam(parameters(3, device="meta"))) is None
    groups = [{"params": parameters(8), "fused": True}, {"params": parameters(5, 6)}]
    facts = facts_of(torch.optim.SGD(groups, momentum=0.9))
    assert (facts.code, facts.elements, facts.options) == (
        StepCode.LOOP,
        11,
        (("momentum", 0.9),),
    )


def test_a_traced_run_describes_its_optimizers_once(tmp_path):
    hooks = session._hook_optimizers()
    try:
        optimizers = [torch.optim.AdamW(parameters(10)), paceline.optim.SGD(parameters(3))]
        for optimizer in optimizers:
            optimizer.step()
        recorder.start_trace(str(tmp_path), 0, 1)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
    finally:
        recorder.stop_trace()
        for hook in hooks:
            hook.remove()
    (trace,) = read_traces(tmp_path)
    assert [(facts.name, facts.code) for facts in trace.optimizers] == [
        ("AdamW", StepCode.LOOP),
        ("SGD", StepCode.PACELINE),
    ]


def write_run(folder, *optimizers, step_ns=4 * MS):
    writer = TraceWriter(folder, 0, 1)
    for optimizer in optimizers:
        writer.add_optimizer(facts_of(optimizer).dump())
    now = 10**12
    for step in range(10):
        writer.add(Phase.BACKWARD, now, now + 6 * MS, step)
        writer.add(Phase.OPTIMIZER, now + 6 * MS, now + 6 * MS + step_ns, step)
        now += 6 * MS + step_ns
    writer.close()
    return Timeline(read_traces(folder))


def test_the_timeline_says_what_a_loop_costs(tmp_path):
    timeline = write_run(tmp_path, torch.optim.AdamW(parameters(500, 500)))
    summary = timeline.summary()
    assert "AdamW (2 tensors, 1,000 numbers) is stepped by torch's default code" in summary
    assert "40% of the ranks' time, 4.00 ms a step" in summary
    assert "stepped by torch" in render_page(timeline)


@pytest.mark.parametrize("make", [paceline.optim.AdamW, torch.optim.RMSprop])
def test_it_says_nothing_of_others(tmp_path, make):
    timeline = write_run(tmp_path, make(parameters(500)))
    assert timeline.slow_optimizer() is None
    assert "torch's default code" not in timeline.summary()


def test_it_says_nothing_of_steps_that_take_no_time(tmp_path):
    timeline = write_run(tmp_path, torch.optim.SGD(parameters(500)), step_ns=MS // 10)
    assert timeline.slow_optimizer().share < 0.03
    assert "torch's default code" not in timeline.summary()


def test_doctor_measures_what_another_optimizer_would_save(tmp_path, capsys):
    write_run(
        tmp_path,
        torch.optim.SGD(parameters(*[1000] * 50), momentum=0.9),
        paceline.optim.AdamW(parameters(5)),
    )
    assert main(["doctor", "--no-smoke-test", "--json", str(tmp_path)]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [each for each in findings if each["topic"] == f"optimizers of {tmp_path}"]
    assert "SGD (50 tensors, 50,000 numbers) is stepped by torch's default code" in found["value"]
    assert "at most 40%" in found["value"]
    assert found["facts"]["paceline.optim"] > 0


def test_doctor_finds_nothing_wrong_with_fused_code(tmp_path, capsys):
    write_run(tmp_path, torch.optim.SGD(parameters(5), fused=True))
    assert main(["doctor", "--no-smoke-test", "--json", str(tmp_path)]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [each for each in findings if each["topic"].startswith("optimizers of")]
    assert found["state"] == "ok"
    assert "SGD (1 tensor, 5 numbers)" in found["value"]


def test_doctor_refuses_a_directory_without_traces(tmp_path, capsys):
    assert main(["doctor", "--no-smoke-test", str(tmp_path / "nothing")]) == 1
    assert "no trace in" in capsys.readouterr().out
