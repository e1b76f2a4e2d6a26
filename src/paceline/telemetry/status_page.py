"""The status page: what one rank is doing, readable from outside at any moment.

A page is 16 KiB of anonymous memory (a memfd), found through `/proc/<pid>/fd`: it has no name that
could be left behind, and only processes of the same user can read it. This module defines the
layout and the owner's side; `paceline.diagnostics.page_reader` reads.

    byte 0      one 8-byte field for each member of `Field`
    byte 320    the script's name, then the job's id, then the text of the current collective
    byte 2048   the time spent in each phase so far, and as much of it as was over before training
    byte 2304   the optimizer to mention, as JSON
    byte 4096   a ring of the latest sync points: group, number, arrival, departure, time by phase
                until then

Whoever starts a rank may make its page beforehand and let the rank inherit it. Then the page can be
read when the rank is gone, however it ended.

Nobody locks. The page has one writer, and its SEQUENCE field is odd while a group of fields that
belong together is being written (a seqlock): the writer makes it odd, writes, makes it even. A
reader copies the whole page and takes the copy only if SEQUENCE was even and the same before and
after. Single fields (counters, the phase) are 8-byte stores that cannot be torn, and are written
without touching SEQUENCE. One update costs a few memory writes and a look at the clock.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import os
import struct
import sys
import threading
import time

from paceline._linux import anonymous_memory
from paceline.telemetry.variables import SCRIPT

__all__ = [
    "CALL_AT",
    "Field",
    "FIRST_PHASE_TIME",
    "JOB_AT",
    "JOB_BYTES",
    "MEMFD_NAME",
    "NO_BUCKET",
    "OPTIMIZER_AT",
    "OPTIMIZER_BYTES",
    "PAGE_BYTES",
    "PAGE_MAGIC",
    "PHASES",
    "PHASE_TIMES",
    "PHASE_TIMES_AT",
    "PHASE_TIMES_BEFORE_AT",
    "PageMemory",
    "Phase",
    "SCRIPT_AT",
    "SCRIPT_BYTES",
    "SYNC_POINT",
    "SYNC_POINTS_KEPT",
    "WaitLabel",
    "new_page",
    "read_and_close",
    "script_name",
    "sync_point_at",
]

MEMFD_NAME = "paceline-status"
PAGE_MAGIC = 0x7061_6365_0002  # changes with the layout
PAGE_BYTES = 16384
SCRIPT_AT = 320
SCRIPT_BYTES = 192
JOB_AT = 512
JOB_BYTES = 64
CALL_AT = 576
_CALL_BYTES = 1472
PHASE_TIMES_AT = 2048
PHASE_TIMES_BEFORE_AT = 2176
OPTIMIZER_AT = 2304
OPTIMIZER_BYTES = 512
_SYNC_POINTS_AT = 4096
_SYNC_POINT_BYTES = 128
SYNC_POINTS_KEPT = 96
NO_BUCKET = -1


class Phase(enum.IntEnum):
    """What a rank is busy with. OTHER is the script's own code between the phases."""

    OTHER = 0
    LOADER = 1
    FORWARD = 2
    BACKWARD = 3
    SYNCHRONISE = 4
    OPTIMIZER = 5
    EVALUATION = 6
    SAVE = 7
    STARTING = 8

    def describe(self) -> str:
        """As a sentence names it: "the data loader"."""
        return _PHASE_DESCRIPTIONS[self]


PHASES = tuple(Phase)
_PHASE_DESCRIPTIONS = {
    Phase.OTHER: "the script's own code",
    Phase.LOADER: "the data loader",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.SYNCHRONISE: "synchronisation",
    Phase.OPTIMIZER: "the optimizer",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "saving",
    Phase.STARTING: "startup",
}


class Field(enum.IntEnum):
    """Where each number of a page is, in units of 8 bytes. Times are CLOCK_MONOTONIC, in ns."""

    MAGIC = 0
    SEQUENCE = 1
    PID = 2
    RANK = 3
    WORLD = 4
    # The main thread, as the kernel numbers it and as faulthandler does.
    MAIN_TID = 5
    MAIN_THREAD = 6
    STARTED = 7
    PHASE = 8
    PHASE_SINCE = 9
    # The collective this rank is in; CALL_SINCE is 0 while it is in none.
    CALL_SINCE = 10
    CALL_GROUP = 11
    CALL_NUMBER = 12
    CALL_BUCKET = 13
    CALL_TEXT_BYTES = 14
    FORWARDS = 15
    BACKWARDS = 16
    # Synchronised backwards that are complete.
    SYNCS = 17
    OPTIMIZER_STEPS = 18
    # Calls on process groups.
    CALLS = 19
    # After which the group gives a call up; 0 if unknown.
    TIMEOUT = 20
    # The descriptor that stacks are dumped to.
    STACKS_FD = 21
    # Sync points recorded so far.
    SYNC_POINTS = 22
    # The value of FORWARDS when this rank last began a phase that follows backward: of these
    # forwards, those without a backward will never have one.
    CONCLUDED_FORWARDS = 23
    # When this rank last looked at its peers; 0 if it does not watch.
    WATCHED_AT = 24
    # Calls of the same kind as the latest one.
    CALLS_OF_KIND = 25
    # Not 0: the rank has left its job, and its page is of interest to its launcher alone.
    HAS_LEFT = 26
    # When the first phase of a step began, and when a backward or an optimizer step last did.
    TRAINING_SINCE = 27
    LAST_STEP = 28
    # Samples that this rank has trained on, as far as its loader knows them.
    SAMPLES = 29
    # Samples of all ranks, as the script or `paceline.Training` reports them.
    REPORTED_SAMPLES = 30
    # The number of the latest step where a training counts them itself, also over restarts.
    REACHED_STEP = 31
    # The number of the step before the first that this process has made of those.
    STEPS_BEFORE = 32


PHASE_TIMES = struct.Struct(f"<{len(PHASES)}q")
FIRST_PHASE_TIME = PHASE_TIMES_AT // 8  # in units of 8 bytes, as `Field`
SYNC_POINT = struct.Struct(f"<{4 + len(PHASES)}q")
_SYNC_POINT_HEAD = struct.Struct("<4q")
_HEAD_BYTES, _SYNC_POINT_ENDS = _SYNC_POINT_HEAD.size, SYNC_POINT.size
_PHASE_TIMES_END = PHASE_TIMES_AT + PHASE_TIMES.size
_SYNC_POINTS, _CALL_TEXT_BYTES = int(Field.SYNC_POINTS), int(Field.CALL_TEXT_BYTES)


@dataclasses.dataclass(frozen=True)
class WaitLabel:
    """A kind of collective on one group: what a rank can be waiting in.

    `number` identifies the group and is the same on all its ranks. No `members` means all ranks.
    `names` lists the parameters in a bucket. `text` is what goes into a page: see `packed`.
    """

    kind: str
    group: str = ""
    number: int = 0
    members: tuple[int, ...] = ()
    names: str = ""
    text: bytes = b""

    def packed(self) -> WaitLabel:
        """This label with its `text`, made once so that a wait only copies it."""
        members = ",".join(map(str, self.members))
        text = f"{self.kind}\t{self.group}\t{members}\t{self.names}"
        return dataclasses.replace(self, text=text.encode(errors="replace")[:_CALL_BYTES])


def new_page() -> int:
    """The descriptor of an empty page, for a rank to inherit."""
    return anonymous_memory(MEMFD_NAME, PAGE_BYTES)


def read_and_close(descriptor: int) -> bytes:
    """A copy of a page that nobody writes to any more."""
    try:
        return os.pread(descriptor, PAGE_BYTES, 0)
    finally:
        os.close(descriptor)


class PageMemory:
    """The owner's side of a page: the memory as bytes and as 8-byte fields.

    Private until `share` is called, so that whoever writes need not ask whether anybody reads.
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self.descriptor = -1
        self._inherited = -1  # a page that the launcher has made
        self._use(memoryview(bytearray(PAGE_BYTES)))

    def _use(self, memory: memoryview) -> None:
        self.memory = memory
        self.fields = memory.cast("q")

    def inherit(self, descriptor: int) -> None:
        """Share this page, which the launcher has made, whenever one is to be shared."""
        self._inherited = descriptor

    @property
    def is_inherited(self) -> bool:
        return self._inherited >= 0

    def share(self) -> None:
        """Make the page visible to other processes of this user, with what it holds already."""
        descriptor = new_page() if self._inherited < 0 else self._inherited
        mapping = mmap.mmap(descriptor, PAGE_BYTES)
        memory = memoryview(mapping)
        memory[:] = self.memory
        self.fields.release()
        self._use(memory)
        self.fields[Field.HAS_LEFT] = 0
        self._mapping, self.descriptor = mapping, descriptor

    def unshare(self) -> None:
        """Make the page private again."""
        if self._mapping is None:
            return
        private = memoryview(bytearray(self.memory))
        self.fields[Field.HAS_LEFT] = 1
        self.fields.release()
        self.memory.release()
        self._use(private)
        self._mapping.close()
        if self.descriptor != self._inherited:
            os.close(self.descriptor)
        self._mapping, self.descriptor = None, -1

    def abandon(self) -> None:
        """In a forked child: start an empty page and leave the parent's untouched."""
        for descriptor in {self.descriptor, self._inherited} - {-1}:
            os.close(descriptor)
        self._mapping, self.descriptor, self._inherited = None, -1, -1
        self._use(memoryview(bytearray(PAGE_BYTES)))

    def identify(self, *, job: str, script: str, rank: int, world: int) -> None:
        """Write whose page this is."""
        fields = self.fields
        fields[Field.SEQUENCE] += 1
        fields[Field.PID] = os.getpid()
        fields[Field.RANK] = rank
        fields[Field.WORLD] = world
        # Not threading.main_thread().native_id: Python keeps the number from before a fork.
        fields[Field.MAIN_TID] = os.getpid()
        ident = threading.main_thread().ident or 0
        fields[Field.MAIN_THREAD] = ident - (1 << 64) if ident >= 1 << 63 else ident
        fields[Field.STARTED] = fields[Field.STARTED] or time.monotonic_ns()
        self._write_text(JOB_AT, JOB_BYTES, job)
        self._write_text(SCRIPT_AT, SCRIPT_BYTES, script)
        fields[Field.MAGIC] = PAGE_MAGIC
        fields[Field.SEQUENCE] += 1

    def _write_text(self, at: int, size: int, text: str) -> None:
        self.memory[at : at + size] = text.encode(errors="replace")[:size].ljust(size, b"\0")

    def write_call(self, text: bytes) -> None:
        """Write the text of the collective this rank is in."""
        size = len(text)
        self.memory[CALL_AT : CALL_AT + size] = text
        self.fields[_CALL_TEXT_BYTES] = size

    def write_optimizer(self, text: bytes) -> None:
        """Write down the optimizer that a summary of the run may want to mention."""
        end = OPTIMIZER_AT + OPTIMIZER_BYTES
        self.memory[OPTIMIZER_AT:end] = text[:OPTIMIZER_BYTES].ljust(OPTIMIZER_BYTES, b"\0")

    def begin_training(self, now_ns: int) -> None:
        """The first phase of a step begins: what was before it is no part of the training."""
        memory = self.memory
        end = PHASE_TIMES_BEFORE_AT + PHASE_TIMES.size
        memory[PHASE_TIMES_BEFORE_AT:end] = memory[PHASE_TIMES_AT:_PHASE_TIMES_END]
        self.fields[Field.TRAINING_SINCE] = now_ns

    def write_sync_point(self, group: int, number: int, arrived_ns: int, left_ns: int) -> None:
        """Record a wait that is over, in place of the oldest one."""
        count, memory = self.fields[_SYNC_POINTS], self.memory
        at = _SYNC_POINTS_AT + (count % SYNC_POINTS_KEPT) * _SYNC_POINT_BYTES
        _SYNC_POINT_HEAD.pack_into(memory, at, group, number, arrived_ns, left_ns)
        memory[at + _HEAD_BYTES : at + _SYNC_POINT_ENDS] = memory[PHASE_TIMES_AT:_PHASE_TIMES_END]
        self.fields[_SYNC_POINTS] = count + 1


def sync_point_at(index: int) -> int:
    """Where in a page the sync point with this index is, counted from the first ever recorded."""
    return _SYNC_POINTS_AT + (index % SYNC_POINTS_KEPT) * _SYNC_POINT_BYTES


def script_name() -> str:
    """The name of what runs in this process. A launcher knows it before the rank does."""
    name = os.environ.get(SCRIPT) or (os.path.basename(sys.argv[0]) if sys.argv else "")
    # A file may have a name that is no text; everybody who shows this one expects text.
    name = os.fsencode(name).decode(errors="replace")
    return name if name not in ("", "-c") else "python"


assert _SYNC_POINTS_AT + SYNC_POINTS_KEPT * _SYNC_POINT_BYTES <= PAGE_BYTES
assert SYNC_POINT.size <= _SYNC_POINT_BYTES
assert CALL_AT + _CALL_BYTES <= PHASE_TIMES_AT
assert _PHASE_TIMES_END <= PHASE_TIMES_BEFORE_AT
assert PHASE_TIMES_BEFORE_AT + PHASE_TIMES.size <= OPTIMIZER_AT
assert OPTIMIZER_AT + OPTIMIZER_BYTES <= _SYNC_POINTS_AT
assert len(Field) * 8 <= SCRIPT_AT
# The recorder writes these neighbours with one call.
assert tuple(range(Field.PHASE, Field.CALL_TEXT_BYTES)) == (
    Field.PHASE,
    Field.PHASE_SINCE,
    Field.CALL_SINCE,
    Field.CALL_GROUP,
    Field.CALL_NUMBER,
    Field.CALL_BUCKET,
)
