"""The calls of a step in their order, and every wrong order refused before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline._torch_internals import Work
from paceline.ddp.group_transport import GroupTransport
from paceline.ddp.signals import Call, Signal
from paceline.ddp.transport import Transport, TransportMisuse, TransportState

SIGNAL = Signal(Call.BACKWARD)
CLOSING = Signal(Call.CLOSE)
BUCKET = object()


class Pair(dist.ProcessGroup):
    """A group of two, without a peer."""

    def __init__(self):
        super().__init__(0, 2)


class Recorded(Transport):
    """Remembers what would have been sent."""

    def __init__(self, needs_signals_first=False):
        super().__init__(Pair())
        self.needs_signals_first = needs_signals_first
        self.sent = []

    def _post(self, signal, single_bucket):
        self.sent.append("post")

    def _signals(self):
        return [SIGNAL] * 2

    def _set_weights(self, weights):
        self.sent.append("weights")

    def _launch(self, bucket):
        self.sent.append("launch")

    def _close(self, signal, carrier):
        self.sent.append("close")

    def _complete(self, telemetry):
        return [SIGNAL] * 2

    def _abandon(self):
        self.sent.append("abandon")

    def all_reduce_small(self, numbers):
        return numbers


CALLS = {
    "post": lambda transport: transport.post(SIGNAL),
    "signals": lambda transport: transport.signals(),
    "weights": lambda transport: transport.set_weights([0.5, 0.5]),
    "launch": lambda transport: transport.launch(BUCKET),
    "close": lambda transport: transport.close(CLOSING),
    "complete": lambda transport: transport.complete(),
}

RIGHT = [
    "post complete",
    "post signals complete",
    "post signals weights launch complete",
    "post signals weights launch close launch complete",
    "post signals weights close complete",
    "post complete post complete",
]
RIGHT_AT_END = ["post launch close launch signals weights complete", "post launch weights complete"]


def call_all(transport, names):
    for name in names.split():
        CALLS[name](transport)


@pytest.mark.parametrize("needs_signals_first", [True, False])
@pytest.mark.parametrize("names", RIGHT)
def test_a_step_in_order(names, needs_signals_first):
    transport = Recorded(needs_signals_first)
    call_all(transport, names)
    assert transport.state is TransportState.IDLE


@pytest.mark.parametrize("names", RIGHT_AT_END)
def test_weights_may_come_last_where_sums_are_taken_at_the_end(names):
    transport = Recorded()
    call_all(transport, names)
    assert transport.state is TransportState.IDLE


@pytest.mark.parametrize("call", ["signals", "weights", "launch", "close", "complete"])
def test_nothing_goes_before_a_post(call):
    transport = Recorded()
    with pytest.raises(TransportMisuse, match=r"internal error: .* in state idle: noth"):
        CALLS[call](transport)
    assert transport.sent == []


@pytest.mark.parametrize(
    ("before", "wrong", "why"),
    [
        ("post", "post", "neither completed nor abandoned"),
        ("post signals", "launch", "the weights are not set"),
        ("post weights close", "close", "nothing is open"),
        ("post weights close launch", "launch", "last bucket was launched already"),
        ("post weights close launch", "close", "nothing is open"),
    ],
)
def test_wrong_order_is_refused_before_anything_is_sent(before, wrong, why):
    transport = Recorded(needs_signals_first=True)
    call_all(transport, before)
    sent = list(transport.sent)
    with pytest.raises(TransportMisuse, match=why):
        CALLS[wrong](transport)
    assert transport.sent == sent


def test_launched_buckets_are_not_summed_without_weights():
    transport = Recorded()
    call_all(transport, "post launch signals")
    with pytest.raises(TransportMisuse, match="weights are not set"):
        transport.complete()


def test_who_knows_how_to_weigh_needs_no_weights():
    transport = Recorded(needs_signals_first=True)
    transport.post(SIGNAL, weigh=lambda signals: None)
    call_all(transport, "launch close launch complete")
    transport.post(SIGNAL)  # each operation says so anew
    with pytest.raises(TransportMisuse, match="weights are not set"):
        transport.launch(BUCKET)


def test_weights_are_one_per_rank():
    transport = Recorded()
    transport.post(SIGNAL)
    with pytest.raises(TransportMisuse, match="3 weights for 2 ranks"):
        transport.set_weights([1.0, 1.0, 1.0])


def test_an_operation_that_failed_is_forgotten():
    transport = Recorded()
    call_all(transport, "post launch")
    transport.abandon()
    transport.abandon()
    assert transport.sent.count("abandon") == 1
    call_all(transport, "post complete")


@pytest.mark.parametrize("call", ["signals", "complete"])
def test_a_wait_that_raises_ends_the_operation(monkeypatch, call):
    transport = Recorded()
    transport.post(SIGNAL)
    monkeypatch.setattr(transport, f"_{call}", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CALLS[call](transport)
    assert transport.state is TransportState.IDLE
    assert transport.sent.count("abandon") == 1


class CompletesAsTheSliceEnds(Work):
    """The first wait runs out; the call is complete before anybody can ask."""

    def __init__(self, error=None):
        super().__init__()
        self.waits, self.error = 0, error

    def wait(self, timeout=None):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self):
        return True


def test_a_call_that_completes_as_its_slice_ends_is_no_timeout():
    work = CompletesAsTheSliceEnds()
    GroupTransport(Pair(), torch.device("cpu"))._wait(work)
    assert work.waits == 2


def test_a_call_that_fails_as_its_slice_ends_raises_its_own_error():
    work = CompletesAsTheSliceEnds(RuntimeError("the needle"))
    with pytest.raises(RuntimeError, match="the needle"):
        GroupTransport(Pair(), torch.device("cpu"))._wait(work)
