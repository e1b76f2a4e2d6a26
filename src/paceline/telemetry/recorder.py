"""What this process is doing, noted as it goes: on its status page, and in its trace if there is
one.

There is one recorder in a process, as there is one default group. It always notes - into private
memory until `open_page` shares it - so that the places that call it need not ask whether anybody
looks.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from paceline.telemetry import stack_dump
from paceline.telemetry.status_page import (
    NO_BUCKET,
    PHASES,
    Field,
    PageMemory,
    Phase,
    WaitLabel,
    script_name,
)
from paceline.telemetry.trace_file import Kind, TraceWriter

__all__ = ["Recorder", "group_number", "recorder"]

# Plain numbers: looking a name up in an enumeration costs more than the write itself.
_SEQUENCE, _PHASE, _PHASE_SINCE = int(Field.SEQUENCE), int(Field.PHASE), int(Field.PHASE_SINCE)
_CALL_BUCKET, _SYNCS = int(Field.CALL_BUCKET), int(Field.SYNCS)
_FORWARDS, _MOVED_ON = int(Field.FORWARDS), int(Field.MOVED_ON)
_SYNCHRONISE = int(Phase.SYNCHRONISE)
_SYNC_POINT, _FILL, _FLIGHT = int(Kind.MEETING), int(Kind.BUCKET_FILL), int(Kind.BUCKET_FLIGHT)
_SHORTEST_SPAN_NS = 1000
_FOLLOWS_BACKWARD = [phase in (Phase.LOADER, Phase.FORWARD, Phase.OPTIMIZER) for phase in PHASES]
_COUNTS = {Phase.BACKWARD: int(Field.BACKWARDS), Phase.OPTIMIZER: int(Field.OPTIMIZER_STEPS)}
_COUNTED = [_COUNTS.get(phase, 0) for phase in PHASES]
_NOTHING_SPENT = [0] * len(PHASES)
# Neighbours on the page, written at once: PHASE, PHASE_SINCE, CALL_SINCE, CALL_GROUP, CALL_NUMBER,
# CALL_BUCKET.
_AT_PHASE = _PHASE * 8
_write_call = struct.Struct("<6q").pack_into
_write_no_call = struct.Struct("<3q").pack_into
_clock = time.monotonic_ns


def group_number(name: str) -> int:
    """A number for a group that is the same on every rank."""
    return zlib.crc32(name.encode())


class Recorder:
    """Notes phases, waits and counts. Not locked: under the GIL a torn note is at worst a wrong
    line for a moment.
    """

    def __init__(self) -> None:
        self.page = PageMemory()
        self._words = self.page.words  # the page's own: one look-up less in every note
        self.trace: TraceWriter | None = None
        # somebody may see the page, or there is a trace; no property, it is asked in every step
        self.watched = False
        self.job = ""
        self._phase = int(Phase.STARTING)
        self._since = _clock()
        self._spent = _NOTHING_SPENT.copy()
        self._depth = 0
        self._sequence = 0  # on the page: odd while it is being written
        self._arrived = 0
        self._group = self._number = 0
        self._words[_PHASE], self._words[_PHASE_SINCE] = self._phase, self._since

    # -- phases ----------------------------------------------------------------------------------------------------

    def phase(self, phase: int, *, again: bool = False) -> None:
        """From now on this rank is in another phase; `again` if it goes back to one it had begun
        before.
        """
        now = _clock()
        words = self._words
        if not again:
            if _FOLLOWS_BACKWARD[phase]:
                # Forwards that have no backward by now have been skipped.
                words[_MOVED_ON] = words[_FORWARDS]
            if counter := _COUNTED[phase]:
                words[counter] += 1
        # _close_span, written out: this runs a dozen times in a step.
        self._spent[self._phase] += now - self._since
        if self.trace is not None:
            self._trace_span(now)
        self._phase = phase
        self._since = now
        # Without the sequence number: who reads between the two sees a phase that has just begun.
        words[_PHASE_SINCE] = now
        words[_PHASE] = phase

    def _close_span(self, now: int) -> None:
        self._spent[self._phase] += now - self._since
        if self.trace is not None:
            self._trace_span(now)

    def _trace_span(self, now: int) -> None:
        if self.trace is not None and now - self._since > _SHORTEST_SPAN_NS:
            self.trace.add(self._phase, self._since, now, self._words[_SYNCS])

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A phase that ends with a block; then the one before goes on."""
        before = self._phase
        self.phase(phase)
        try:
            yield
        finally:
            self.phase(before, again=True)

    def count(self, word: int) -> None:
        """One more of something."""
        self._words[word] += 1

    @property
    def current(self) -> int:
        return self._phase

    # -- waits -----------------------------------------------------------------------------------------------------

    def enter(self, place: WaitLabel, number: int, bucket: int = NO_BUCKET) -> None:
        """This rank arrives at a collective and may have to wait in it. Waits inside a wait are
        part of it.
        """
        self._depth += 1
        if self._depth > 1:
            return
        now = _clock()
        self._close_span(now)
        self._arrived = self._since = now
        self._group = group = place.number
        self._number = number
        page, words = self.page, self._words
        self._sequence = sequence = self._sequence + 2
        words[_SEQUENCE] = sequence - 1
        page.put_call(place.text)
        _write_call(page.memory, _AT_PHASE, _SYNCHRONISE, now, now, group, number, bucket)
        words[_SEQUENCE] = sequence

    def at_bucket(self, place: WaitLabel, bucket: int) -> None:
        """Inside a wait: it is this bucket's now."""
        words = self._words
        self._sequence = sequence = self._sequence + 2
        words[_SEQUENCE] = sequence - 1
        self.page.put_call(place.text)
        words[_CALL_BUCKET] = bucket
        words[_SEQUENCE] = sequence

    def leave(self, *, met: bool = True, then: int | None = None) -> None:
        """The wait is over and the phase before goes on, or another begins.

        `met=False`: this was no wait for others, only the start of one.
        """
        self._depth -= 1
        if self._depth > 0:
            return
        now = _clock()
        page, words = self.page, self._words
        if then is not None:
            self._phase = then
        self._sequence = sequence = self._sequence + 2
        words[_SEQUENCE] = sequence - 1
        _write_no_call(page.memory, _AT_PHASE, self._phase, now, 0)
        if met:
            spent, self._spent = self._spent, _NOTHING_SPENT.copy()
            spent[_SYNCHRONISE] += now - self._arrived
            page.put_sync_point(self._group, self._number, self._arrived, now, spent)
        words[_SEQUENCE] = sequence
        if met and self.trace is not None:
            self.trace.add(
                _SYNC_POINT, self._arrived, now, words[_SYNCS], self._group, self._number
            )
        self._since = now

    @contextlib.contextmanager
    def waiting(self, place: WaitLabel, number: int) -> Iterator[None]:
        """`enter` and `leave` around a block."""
        self.enter(place, number)
        try:
            yield
        finally:
            self.leave()

    # -- buckets, for the trace only -------------------------------------------------------------------------------

    def bucket_filled(self, bucket: int, reducer: int, start_ns: int, end_ns: int) -> None:
        if self.trace is not None:
            self.trace.add(_FILL, start_ns, end_ns, self._words[_SYNCS], bucket, reducer)

    def bucket_averaged(self, bucket: int, reducer: int, start_ns: int, end_ns: int) -> None:
        if self.trace is not None:
            self.trace.add(_FLIGHT, start_ns, end_ns, self._words[_SYNCS], bucket, reducer)

    def buckets_planned(self, reducer: int, names: Sequence[str], sizes: Sequence[int]) -> None:
        """How the buckets of a model are called from now on."""
        if self.trace is not None:
            planned = [
                {"names": one, "bytes": size} for one, size in zip(names, sizes, strict=True)
            ]
            self.trace.name(buckets={str(reducer): planned})

    def scalars(self, loss: float, samples: int) -> None:
        """What the script knows about the step it has just made."""
        if self.trace is not None:
            self.trace.scalars(self._words[_SYNCS], loss, samples)

    # -- the page --------------------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether others can see the page."""
        return self.page.descriptor >= 0

    def open_page(self, *, job: str, rank: int, world: int) -> None:
        """Let others of this user see what this process does, and ask for its stacks."""
        if not self.shared:
            self.page.share()
            self._words = self.page.words
            self._words[Field.STACKS_FD] = stack_dump.register()
            self.watched = True
        self.job = job
        self.page.identify(job=job, script=script_name(), rank=rank, world=world)
        self._sequence = self._words[_SEQUENCE]

    def close_page(self) -> None:
        """Nobody sees it any more. Notes go on in private."""
        if self.shared:
            self.page.unshare()
            self._words = self.page.words
            stack_dump.unregister()
            self.watched = self.trace is not None

    # -- the trace -------------------------------------------------------------------------------------------------

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
        """A child is not the rank: it must neither write its page nor its trace."""
        if self.shared:
            descriptor = self.page.descriptor
            self.page.forget()
            self._words = self.page.words
            os.close(descriptor)
        self.trace = None
        self.watched = False
        self._depth = 0
        self._since = _clock()
        self._spent = _NOTHING_SPENT.copy()
        self._sequence = self._words[_SEQUENCE]

    @property
    def thread(self) -> int:
        """The thread whose doings are noted."""
        return threading.main_thread().ident or 0


recorder = Recorder()
os.register_at_fork(after_in_child=recorder.after_fork)
