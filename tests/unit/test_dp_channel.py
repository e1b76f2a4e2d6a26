"""Messages of DataParallel: written and read in one process, which is both ends."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from paceline.core.wakeup import FLAG_BYTES, Flag, HandOver
from paceline.dp.channel import CHANNEL_BYTES, Channel, Inbox, Outbox
from paceline.dp.protocol import meta_of, source_of
from paceline.dp.worker_pool import WorkerHandle

VALUES = (1, (), (True, False), ())


class Ends:
    """The two ends of the direction from main process to worker."""

    def __init__(self) -> None:
        self.channel = Channel(mmap.mmap(-1, CHANNEL_BYTES), 0, spin_ns=0)
        self.outbox = Outbox(self.channel.orders, self.channel.order_notice)
        self.inbox = Inbox(os.getpid(), self.channel.order_notice)
        self.calls = 0

    def transfer(self, *tensors: torch.Tensor, values=VALUES, objects=(), is_repeatable=True):
        """Send a message, read it, and compare."""
        self.calls += 1
        layout = self.outbox.layout(("spec",), tuple(map(meta_of, tensors)))
        sources = [source_of(tensor) for tensor in tensors]
        self.outbox.send(values, self.calls, layout, sources, objects, is_repeatable)
        assert self.channel.orders.wait(-1, 0, 1.0)
        message = self.inbox.read()
        assert (message.values, message.call) == (values, self.calls)
        assert message.objects == list(objects)
        received = self.inbox.tensors(message.layout)
        assert all(map(torch.equal, received, tensors))
        return message

    @property
    def repeats_a_header(self) -> bool:
        return self.channel.order_notice[0] != 0

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


def test_a_repeated_message_has_no_header(ends):
    first = ends.transfer(torch.randn(3, 2), torch.randn(5))
    assert not ends.repeats_a_header
    for _ in range(3):
        again = ends.transfer(torch.randn(3, 2), torch.randn(5))
        assert ends.repeats_a_header
        assert again.layout is first.layout


def test_other_shapes_values_and_objects_do_not_disturb_repetition(ends):
    ends.transfer(torch.randn(3))
    ends.transfer(torch.randn(4))
    ends.transfer(torch.randn(3), values=(2, (), (), ()))
    for size, values in ((3, VALUES), (4, VALUES), (3, (2, (), (), ())), (3, VALUES)):
        ends.transfer(torch.randn(size), values=values)
        assert ends.repeats_a_header
    ends.transfer(torch.randn(3), objects=["text"])
    assert not ends.repeats_a_header
    ends.transfer(torch.randn(3))
    assert ends.repeats_a_header


def test_a_tensor_that_is_not_plain_is_sent_with_a_header(ends):
    for _ in range(2):
        ends.transfer(torch.randn(4))
    ends.transfer(torch.randn(8)[::2])
    assert not ends.repeats_a_header
    ends.transfer(torch.ones(4))
    assert ends.repeats_a_header


def test_a_larger_message_replaces_the_memory_and_what_was_known_of_it(ends):
    for _ in range(2):
        ends.transfer(torch.randn(10))
    for _ in range(2):
        ends.transfer(torch.randn(100_000))
    ends.transfer(torch.randn(10))
    assert not ends.repeats_a_header
    ends.transfer(torch.randn(10))
    assert ends.repeats_a_header


def test_numbers_of_headers_are_used_again(ends):
    for round_ in range(2):
        for index in range(400):
            ends.transfer(torch.full((2,), float(index)), values=(index, (), round_))
    for _ in range(2):
        ends.transfer(torch.randn(2), values=(399, (), 1))
        assert ends.repeats_a_header


def test_empty_tensors_and_messages_without_any(ends):
    for _ in range(2):
        ends.transfer()
        ends.transfer(torch.empty(0, 3), torch.ones(1))


def test_seeds_are_told_from_messages(ends):
    ends.transfer(torch.ones(1))
    ends.outbox.send_seed(1 << 62)
    assert ends.channel.orders.wait(-1, 0, 1.0)
    assert ends.inbox.seed(ends.channel.orders.seen) == 1 << 62
    ends.transfer(torch.ones(1))
    assert ends.inbox.seed(ends.channel.orders.seen) is None


def test_hand_over_refuses_what_is_no_address():
    memory = mmap.mmap(-1, 4 * FLAG_BYTES)
    flag, notice = Flag(memory, 0), memoryview(memory)[128:192].cast("Q")
    target = torch.zeros(2)
    hand_over = HandOver(flag, notice, 7, [target.data_ptr()], [target.nbytes])
    assert not hand_over(1, [torch.ones(1, dtype=torch.int64)])
    assert list(notice[:2]) == [0, 0]
    source = torch.ones(2)
    assert hand_over(1, [source.data_ptr()])
    assert list(notice[:2]) == [7, 1]
    assert torch.equal(target, source)
    assert flag.wait(-1, 0, 1.0)


def test_a_flag_is_due_when_it_was_raised():
    flag = Flag(mmap.mmap(-1, FLAG_BYTES), 0)
    assert not flag.is_due(-1)
    flag.raise_()
    assert flag.is_due(-1)


def test_orders_and_answers_take_turns():
    channel = Channel(mmap.mmap(-1, CHANNEL_BYTES), 0, spin_ns=0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    worker = WorkerHandle(1, channel, pid, timeout_s=1.0)
    try:
        with pytest.raises(RuntimeError, match="without a pending request"):
            worker.receive()
        worker.send(VALUES, 1, worker.layout((), ()))
        with pytest.raises(RuntimeError, match="before the answer"):
            worker.send(VALUES, 2, worker.layout((), ()))
        with pytest.raises(RuntimeError, match="before the answer"):
            worker.seed(1)
    finally:
        worker.end()
