"""The checker checked: right programs are silent, each wait taken out of them is found, and a slow
model agrees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sim
from tests.devices.machine import Machine

Keep = Callable[[str], bool]


# Programs as a careful user writes them. `keep(line)` is true unless this run leaves that line out.


def side_stream(keep: Keep) -> None:
    """Compute on a second stream with the first one's tensors, and the reverse."""
    main, side = torch.accelerator.current_stream(0), torch.Stream("sim:0")
    given = torch.ones(100, device="sim:0")
    if keep("side waits for main"):
        side.wait_stream(main)
    with side:
        doubled = given * 2
    if keep("input recorded on side"):
        given.record_stream(side)
    del given
    if keep("main waits for side"):
        main.wait_stream(side)
    result = doubled + 1
    if keep("result recorded on main"):
        doubled.record_stream(main)
    del doubled
    assert result.sum().item() == 300


def overwrite(keep: Keep) -> None:
    """A buffer that one stream reads and another fills anew."""
    reader, writer = torch.Stream("sim:0"), torch.Stream("sim:0")
    with writer:
        buffer = torch.zeros(10, device="sim:0")
        filled = writer.record_event()
    if keep("reader waits until it is filled"):
        reader.wait_event(filled)
    with reader:
        total = buffer.sum()
        read = reader.record_event()
    if keep("writer waits until it is read"):
        writer.wait_event(read)
    with writer:
        buffer.fill_(1)
    torch.accelerator.synchronize(0)
    assert total.item() == 0


def prefetch(keep: Keep) -> None:
    """Batches copied ahead on their own stream, from one pinned buffer that the host refills."""
    copies, main = torch.Stream("sim:1"), torch.accelerator.current_stream(1)
    staging = torch.empty(8, pin_memory=True)
    total = torch.zeros((), device="sim:1")
    copied = None
    for step in range(3):
        if copied is not None and keep("host waits before it refills"):
            copied.synchronize()
        staging.fill_(step)
        with copies:
            batch = staging.to("sim:1", non_blocking=True)
            copied = copies.record_event()
        if keep("main waits for the copy"):
            main.wait_event(copied)
        if keep("batch recorded on main"):
            batch.record_stream(main)
        total += batch.sum()
        del batch
    assert total.item() == 24


def read_back(keep: Keep) -> None:
    """A result brought to the host without blocking."""
    result = torch.ones(10, device="sim:2").to("cpu", non_blocking=True)
    if keep("host waits for the result"):
        torch.accelerator.synchronize(2)
    assert result.sum() == 10


def read_as_list(keep: Keep) -> None:
    """The same, by a method that reads memory without an operator."""
    result = torch.ones(3, device="sim:2").to("cpu", non_blocking=True)
    if keep("host waits for the list"):
        torch.accelerator.synchronize(2)
    assert result.tolist() == [1, 1, 1]
    assert result.numpy().sum() == 3


def poll(keep: Keep) -> None:
    """The same, by asking until it is there."""
    result = torch.ones(10, device="sim:2").to("cpu", non_blocking=True)
    there = torch.accelerator.current_stream(2).record_event()
    if keep("host asks until it is there"):
        while not there.query():
            pass
    assert (result == 1).all()


def look_at_device_memory(keep: Keep) -> None:
    """Device memory read through a pointer, as a host library would."""
    value = torch.ones(10, device="sim:0")
    if keep("host waits for the device"):
        torch.accelerator.current_stream(0).synchronize()
    assert sim.host_view(value).sum() == 10


def pass_on(keep: Keep) -> None:
    """From a side stream of one device to a side stream of the next. The copy itself orders the
    current streams.
    """
    first, second = torch.Stream("sim:0"), torch.Stream("sim:1")
    with first:
        value = torch.ones(10, device="sim:0")
    if keep("main waits for the first device"):
        torch.accelerator.current_stream(0).wait_stream(first)
    moved = value.to("sim:1")
    if keep("value recorded on main"):
        value.record_stream(torch.accelerator.current_stream(0))
    del value
    if keep("second device waits for the copy"):
        second.wait_stream(torch.accelerator.current_stream(1))
    with second:
        total = moved.sum()
    if keep("copy recorded on the second stream"):
        moved.record_stream(second)
    del moved
    second.synchronize()
    assert total.item() == 10


def backward_on_a_side_stream(keep: Keep) -> None:
    """Autograd runs backward on the streams of forward; the caller still has to order its own
    reads.
    """
    weight = torch.ones(10, device="sim:0", requires_grad=True)
    main, side = torch.accelerator.current_stream(0), torch.Stream("sim:0")
    if keep("side waits for the weights"):
        side.wait_stream(main)
    with side:
        (weight * 2).sum().backward()
    if keep("main waits for the gradient"):
        main.wait_stream(side)
    assert weight.grad.sum().item() == 20
    main.synchronize()
    side.synchronize()


PROGRAMS = {
    side_stream: {
        "side waits for main": "unordered read after write",
        "input recorded on side": "freed in use",
        "main waits for side": "unordered read after write",
        "result recorded on main": "freed in use",
    },
    overwrite: {
        "reader waits until it is filled": "unordered read after write",
        "writer waits until it is read": "unordered write after read",
    },
    prefetch: {
        "host waits before it refills": "unordered write after read: aten::fill_ on the host",
        "main waits for the copy": "unordered read after write",
        "batch recorded on main": "freed in use",
    },
    read_back: {"host waits for the result": "unordered read after write: aten::sum on the host"},
    read_as_list: {
        "host waits for the list": "unordered read after write: sim::host_reads on the host"
    },
    poll: {"host asks until it is there": "unordered read after write: aten::eq on the host"},
    look_at_device_memory: {
        "host waits for the device": "unordered read after write: aten::sum on the host"
    },
    pass_on: {
        "main waits for the first device": "unordered read after write: copy to device",
        "value recorded on main": "freed in use",
        "second device waits for the copy": "unordered read after write",
        "copy recorded on the second stream": "freed in use",
    },
    backward_on_a_side_stream: {
        "side waits for the weights": "unordered read after write",
        "main waits for the gradient": "unordered read after write",
    },
}


def hazards_of(program: Callable[[Keep], None], without: str | None) -> list[str]:
    """The hazards of a program with one line left out. Values are right either way: that is the
    point.
    """
    torch.accelerator.synchronize(0)
    sim.hazards()
    left_out = []

    def keep(line: str) -> bool:
        if line == without:
            left_out.append(line)
        return line != without

    program(keep)
    assert without is None or left_out, f"{program.__name__} has no line {without!r}"
    return sim.hazards()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_wait_left_out_is_found_and_nothing_else_is(sim_machine, program):
    def body(machine: Machine, program: Callable[[Keep], None], mutations: dict[str, str]) -> None:
        assert hazards_of(program, without=None) == []
        for line, kind in mutations.items():
            found = hazards_of(program, without=line)
            assert any(hazard.startswith(kind) for hazard in found), f"without {line!r}: {found}"

    sim_machine.on_devices(body, program, PROGRAMS[program])


def test_a_hazard_names_both_sides(sim_machine):
    def body(machine: Machine) -> None:
        value = torch.ones(100, device="sim:1")
        side = torch.Stream("sim:1")
        with side:
            value[10:20].mul_(2)
        found = sim.hazards()
        assert found[-1] == (
            f"unordered write after write: aten::mul.out on sim:1 stream {side.stream_id} against "
            "aten::fill_.Scalar on sim:1 stream 0, bytes 40 to 80 of a block of 400 bytes"
        )
        torch.accelerator.synchronize(1)

    sim_machine.on_devices(body)


def test_disjoint_parts_of_one_tensor_do_not_conflict(sim_machine):
    def body(machine: Machine) -> None:
        buffer = torch.zeros(100, device="sim:0")
        streams = [torch.Stream("sim:0") for _ in range(4)]
        for index, stream in enumerate(streams):
            stream.wait_stream(torch.accelerator.current_stream(0))
            with stream:
                buffer[25 * index : 25 * (index + 1)].add_(1)
        torch.accelerator.synchronize(0)
        assert buffer.sum().item() == 100

    sim_machine.on_devices(body)


def test_a_hazard_can_be_raised_where_it_happens(sim_machine):
    def body(machine: Machine) -> None:
        sim.raise_at_hazard()
        value = torch.ones(3, device="sim:0")
        with torch.Stream("sim:0"), pytest.raises(RuntimeError, match="unordered read after write"):
            value.sum()
        sim.raise_at_hazard(False)
        assert len(sim.hazards()) == 1
        torch.accelerator.synchronize(0)

    sim_machine.on_devices(body)


# ---- against a model: happens-before as a graph, every pair of accesses compared

STREAMS, EVENTS, CELLS = 3, 3, 4


@dataclasses.dataclass(frozen=True)
class Step:
    kind: str  # use, host, record, wait, synchronize
    stream: int = 0
    event: int = 0
    low: int = 0
    high: int = 1
    write: bool = False


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(
        st.sampled_from(["use", "use", "use", "host", "record", "wait", "wait", "synchronize"])
    )
    low = draw(st.integers(0, CELLS - 1))
    return Step(
        kind,
        draw(st.integers(0, STREAMS - 1)),
        draw(st.integers(0, EVENTS - 1)),
        low,
        draw(st.integers(low + 1, CELLS)),
        draw(st.booleans()),
    )


def conflicts_by_model(program: list[Step]) -> list[bool]:
    """For each step: does it conflict with an earlier one that is not ordered before it?"""
    before: list[
        set[int]
    ] = []  # of each step, all steps that are certainly complete when it starts
    streams: list[set[int]] = [set() for _ in range(STREAMS)]
    host: set[int] = set()
    events: dict[int, set[int]] = {}
    found = []
    for number, step in enumerate(program):
        if step.kind == "use":
            seen = streams[step.stream] | host
        elif step.kind == "host":
            seen = set(host)
        else:
            seen = set()
        before.append(seen)
        found.append(
            step.kind in ("use", "host")
            and any(
                other.kind in ("use", "host")
                and (other.write or step.write)
                and other.low < step.high
                and step.low < other.high
                and index not in seen
                for index, other in enumerate(program[:number])
            )
        )
        if step.kind == "use":
            streams[step.stream] = seen | {number}
        elif step.kind == "host":
            host.add(number)
        elif step.kind == "record":
            events[step.event] = streams[step.stream] | host
        elif step.kind == "wait":
            streams[step.stream] |= events.get(step.event, set())
        else:
            host |= streams[step.stream]
    return found


def conflicts_by_checker(program: list[Step]) -> list[bool]:
    torch.accelerator.synchronize(0)
    buffer = torch.zeros(CELLS, device="sim:0")
    torch.accelerator.synchronize(0)
    streams = [torch.Stream("sim:0") for _ in range(STREAMS)]
    events: dict[int, torch.Event] = {}
    found = []
    for step in program:
        part = buffer[step.low : step.high]
        if step.kind == "use":
            with (
                streams[step.stream],
                sim.kernel("use", *([], [part]) if step.write else ([part], [])),
            ):
                pass
        elif step.kind == "host":
            view = sim.host_view(part)
            view.fill_(1) if step.write else view.sum()
        elif step.kind == "record":
            events[step.event] = streams[step.stream].record_event()
        elif step.kind == "wait" and step.event in events:
            streams[step.stream].wait_event(events[step.event])
        elif step.kind == "synchronize":
            streams[step.stream].synchronize()
        found.append(bool(sim.hazards()))
    torch.accelerator.synchronize(0)
    return found


def test_random_programs_are_judged_as_by_the_model(sim_machine):
    def body(machine: Machine) -> None:
        verdicts = set()

        @settings(max_examples=300, deadline=None, database=None)
        @given(st.lists(steps(), min_size=1, max_size=14))
        def agree(program: list[Step]) -> None:
            expected = conflicts_by_model(program)
            verdicts.add(any(expected))
            assert conflicts_by_checker(program) == expected

        agree()
        assert verdicts == {True, False}

    sim_machine.on_devices(body)
