"""Records what this process is doing: on its status page, and in its trace if there is one.

There is one recorder in a process, as there is one default group. It always records - into private
memory until `open_page` shares it - so that its callers need not ask whether anybody reads.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from paceline.telemetry.stack_dump import StackDump
from paceline.telemetry.status_page import (
    FIRST_PHASE_TIME,
    NO_BUCKET,
    PHASES,
    Field,
    PageMemory,
    Phase,
    WaitLabel,
    script_name,
)
from paceline.telemetry.trace_writer import Kind, TraceWriter

__all__ = ["Recorder", "group_number", "recorder"]

# Plain numbers: looking a name up in an enumeration costs more than the write itself.
_SEQUENCE, _PHASE, _PHASE_SINCE = int(Field.SEQUENCE), int(Field.PHASE), int(Field.PHASE_SINCE)
_CALL_BUCKET, _SYNCS = int(Field.CALL_BUCKET), int(Field.SYNCS)
_FORWARDS, _CONCLUDED_FORWARDS = int(Field.FORWARDS), int(Field.CONCLUDED_FORWARDS)
_TRAINING_SINCE, _LAST_STEP = int(Field.TRAINING_SINCE), int(Field.LAST_STEP)
_SAMPLES, _REPORTED_SAMPLES = int(Field.SAMPLES), int(Field.REPORTED_SAMPLES)
_REACHED_STEP, _STEPS_BEFORE = int(Field.REACHED_STEP), int(Field.STEPS_BEFORE)
_SYNCHRONISE = int(Phase.SYNCHRONISE)
_TIME_WAITED = FIRST_PHASE_TIME + _SYNCHRONISE
_SYNC_POINT, _FILL, _FLIGHT = int(Kind.SYNC_POINT), int(Kind.BUCKET_FILL), int(Kind.BUCKET_FLIGHT)
_SHORTEST_SPAN_NS = 1000
_FOLLOWS_BACKWARD = [phase in (Phase.LOADER, Phase.FORWARD, Phase.OPTIMIZER) for phase in PHASES]
# The counter that a phase's beginning raises; 0 for none.
_COUNTS = {Phase.BACKWARD: int(Field.BACKWARDS), Phase.OPTIMIZER: int(Field.OPTIMIZER_STEPS)}
_IS_OF_STEP = [
    phase in (Phase.LOADER, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER) for phase in PHASES
]
_COUNTER_OF_PHASE = [_COUNTS.get(phase, 0) for phase in PHASES]
# Neighbours on the page, written at once: PHASE, PHASE_SINCE, CALL_SINCE, CALL_GROUP, CALL_NUMBER,
# CALL_BUCKET.
_AT_PHASE = _PHASE * 8
_write_call = struct.Struct("<6q").pack_into
_write_no_call = struct.Struct("<3q").pack_into
_clock = time.monotonic_ns


def group_number(name: str) -> int:
    """A number for a group that is the same on every rank."""
    return zlib.crc32(name.encode(errors="replace"))


class Recorder:
    """Records phases, waits and counts of the main thread.

    Time is divided into spans: each belongs to the phase this rank was in, and ends where the next
    phase or a wait begins. A wait is everything between the outermost `enter` and its `leave`; when
    it is over, it becomes a sync point, which carries the time spent in each phase until then.
    Nothing is locked: with the GIL, an update that a second thread tears is at worst
    a wrong line for a moment.

    `phase`, `enter`, `leave` and `count` run many times in a step. They are plain stores with local
    bindings; keep them so.
    """

    def __init__(self) -> None:
        self.page = PageMemory()
        # The page's own fields: one look-up less in every update.
        self._fields = self.page.fields
        self._stack_dump: StackDump | None = None
        self.trace: TraceWriter | None = None
        # Whether the page is shared or there is a trace. No property: every step asks.
        self.watched = False
        self.job = ""
        self._phase = int(Phase.STARTING)
        self._since = _clock()
        self._depth = 0
        self._sequence = 0
        self._arrived = 0
        self._group = self._number = 0
        self._fields[_PHASE], self._fields[_PHASE_SINCE] = self._phase, self._since

    # -- phases ------------------------------------------------------------------------------------

    def phase(self, phase: int, *, again: bool = False) -> None:
        """Begin a phase; `again` if this goes back to one that had begun before."""
        now = _clock()
        fields = self._fields
        if not again:
            if _FOLLOWS_BACKWARD[phase]:
                # Forwards that have no backward by now have skipped it.
                fields[_CONCLUDED_FORWARDS] = fields[_FORWARDS]
            if counter := _COUNTER_OF_PHASE[phase]:
                fields[counter] += 1
                fields[_LAST_STEP] = now
        # _close_span, inlined: this runs a dozen times in a step.
        fields[FIRST_PHASE_TIME + self._phase] += now - self._since
        if self.trace is not None:
            self._trace_span(now)
        if not fields[_TRAINING_SINCE] and _IS_OF_STEP[phase]:
            self.page.begin_training(now)
        self._phase = phase
        self._since = now
        # Without SEQUENCE: a reader between the two sees a phase that has just begun.
        fields[_PHASE_SINCE] = now
        fields[_PHASE] = phase

    def _close_span(self, now: int) -> None:
        self._fields[FIRST_PHASE_TIME + self._phase] += now - self._since
        if self.trace is not None:
            self._trace_span(now)

    def _trace_span(self, now: int) -> None:
        if self.trace is not None and now - self._since > _SHORTEST_SPAN_NS:
            self.trace.add(self._phase, self._since, now, self._fields[_SYNCS])

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in a phase for the length of a block, then go back to the one before."""
        before = self._phase
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before, again=True)

    def count(self, field: int) -> None:
        """Add one to a counter of the page."""
        self._fields[field] += 1

    @property
    def current(self) -> int:
        """The phase this rank is in."""
        return self._phase

    # -- waits -------------------------------------------------------------------------------------

    def enter(self, label: WaitLabel, number: int, bucket: int = NO_BUCKET) -> None:
        """Arrive at a collective, where this rank may have to wait. Waits inside a wait are part
        of it.
        """
        self._depth += 1
        if self._depth > 1:
            return
        now = _clock()
        self._close_span(now)
        self._arrived = self._since = now
        self._group = group = label.number
        self._number = number
        page, fields = self.page, self._fields
        self._sequence = sequence = self._sequence + 2
        fields[_SEQUENCE] = sequence - 1
        page.write_call(label.text)
        _write_call(page.memory, _AT_PHASE, _SYNCHRONISE, now, now, group, number, bucket)
        fields[_SEQUENCE] = sequence

    def at_bucket(self, label: WaitLabel, bucket: int) -> None:
        """Inside a wait: from now on it is for this bucket."""
        fields = self._fields
        self._sequence = sequence = self._sequence + 2
        fields[_SEQUENCE] = sequence - 1
        self.page.write_call(label.text)
        fields[_CALL_BUCKET] = bucket
        fields[_SEQUENCE] = sequence

    def leave(self, *, sync_point: bool = True, then: int | None = None) -> None:
        """End the wait; the phase before goes on, or `then` begins.

        Without `sync_point` nothing is recorded of it: this rank has not waited for the others
        here, or how long it waited says nothing about who is slow.
        """
        self._depth -= 1
        if self._depth > 0:
            return
        now = _clock()
        page, fields = self.page, self._fields
        if then is not None:
            self._phase = then
        self._sequence = sequence = self._sequence + 2
        fields[_SEQUENCE] = sequence - 1
        _write_no_call(page.memory, _AT_PHASE, self._phase, now, 0)
        if sync_point:
            fields[_TIME_WAITED] += now - self._arrived
            page.write_sync_point(self._group, self._number, self._arrived, now)
        fields[_SEQUENCE] = sequence
        if sync_point and self.trace is not None:
            self.trace.add(
                _SYNC_POINT, self._arrived, now, fields[_SYNCS], self._group, self._number
            )
        self._since = now

    @contextlib.contextmanager
    def waiting(self, label: WaitLabel, number: int) -> Iterator[None]:
        """`enter` and `leave` around a block."""
        self.enter(label, number)
        try:
            yield
        finally:
            self.leave()

    # -- buckets, for the trace only ---------------------------------------------------------------

    def bucket_filled(self, bucket: int, reducer: int, start_ns: int, end_ns: int) -> None:
        """Record the time from a bucket's first gradient to its hand-over."""
        if self.trace is not None:
            self.trace.add(_FILL, start_ns, end_ns, self._fields[_SYNCS], bucket, reducer)

    def bucket_averaged(self, bucket: int, reducer: int, start_ns: int, end_ns: int) -> None:
        """Record the time from a bucket's hand-over to its average."""
        if self.trace is not None:
            self.trace.add(_FLIGHT, start_ns, end_ns, self._fields[_SYNCS], bucket, reducer)

    def buckets_planned(self, reducer: int, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Record which parameters the buckets of a model hold from now on, and their bytes."""
        if self.trace is not None:
            self.trace.set_buckets(reducer, names, sizes)

    def scalars(self, loss: float, samples: int) -> None:
        """Record what the script knows about the step it has just made."""
        if not self._fields[_REACHED_STEP]:  # else `reach_step` has counted them
            self._fields[_REPORTED_SAMPLES] += int(samples)
        if self.trace is not None:
            self.trace.add_scalars(self._fields[_SYNCS], loss, samples)

    def add_samples(self, samples: int) -> None:
        """This rank trains on so many samples that its loader has handed out."""
        self._fields[_SAMPLES] += samples

    def reach_step(self, step: int, samples: int) -> None:
        """A training that counts its steps itself has made this one, of so many samples."""
        fields = self._fields
        if not fields[_REACHED_STEP]:
            fields[_STEPS_BEFORE] = step - 1
        fields[_REACHED_STEP] = step
        fields[_REPORTED_SAMPLES] += samples

    # -- the page ----------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether others can see the page."""
        return self.page.descriptor >= 0

    def inherit_page(self, descriptor: int) -> None:
        """Use the page that a launcher has made for this rank, and reads when the rank is gone."""
        self.page.inherit(descriptor)

    def open_page(self, *, job: str, rank: int, world: int) -> None:
        """Let other processes of this user see what this one does, and ask for its stacks."""
        if not self.shared:
            self.page.share()
            self._fields = self.page.fields
            self._stack_dump = StackDump()
            self._fields[Field.STACKS_FD] = self._stack_dump.descriptor
            self.watched = True
        self.job = job
        self.page.identify(job=job, script=script_name(), rank=rank, world=world)
        self._sequence = self._fields[_SEQUENCE]

    def close_page(self) -> None:
        """Make the page private again and go on recording there."""
        if self.shared:
            self.page.unshare()
            self._fields = self.page.fields
            self._close_stack_dump()
            self.watched = self.trace is not None

    def _close_stack_dump(self) -> None:
        if self._stack_dump is not None:
            self._stack_dump.close()
            self._stack_dump = None

    # -- the trace ---------------------------------------------------------------------------------

    def start_trace(self, directory: str, rank: int, world: int) -> None:
        """Record spans from now on."""
        self.stop_trace()
        self.trace = TraceWriter(directory, rank, world)
        self.watched = True
        self._since = _clock()

    def stop_trace(self) -> None:
        if self.trace is not None:
            self._close_span(_clock())
            trace, self.trace = self.trace, None
            self.watched = self.shared
            trace.close()

    def after_fork(self) -> None:
        """In a forked child, which is not the rank: drop the page, the stacks and the trace."""
        if self.shared or self.page.is_inherited:
            self.page.abandon()
            self._fields = self.page.fields
            self._close_stack_dump()
        self.trace = None
        self.watched = False
        self._depth = 0
        self._since = _clock()
        self._sequence = self._fields[_SEQUENCE]

    @property
    def thread(self) -> int:
        """The thread that is recorded."""
        return threading.main_thread().ident or 0


recorder = Recorder()
os.register_at_fork(after_in_child=recorder.after_fork)
