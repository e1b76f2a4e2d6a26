"""The status page: what one rank is doing, readable from outside at any moment.

A page is anonymous memory (a memfd), found through `/proc/<pid>/fd`: it has no name that could be
left behind, and only its own user can read it. Its owner writes plain words behind a sequence
number that is odd while it writes; readers copy and look again. One update costs some memory writes
and a look at the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator

from paceline.telemetry.variables import SCRIPT

__all__ = [
    "NO_BUCKET",
    "PHASES",
    "Call",
    "SyncPoint",
    "PageMemory",
    "Phase",
    "WaitLabel",
    "StatusPage",
    "Field",
    "find_pages",
    "read_page",
    "script_name",
]

_MEMFD_NAME = "paceline-status"
_MAGIC = 0x7061_6365_0001  # changes with the layout
_BYTES = 16384
_SCRIPT_AT, _SCRIPT_BYTES = 320, 192
_JOB_AT, _JOB_BYTES = 512, 64
_CALL_AT, _CALL_BYTES = 576, 1472
_MEETINGS_AT, _MEETINGS = 4096, 96
_SYNC_POINT_WORDS = 16
_READ_ATTEMPTS = 200
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

    @property
    def words(self) -> str:
        """As a sentence says it."""
        return _PHASE_WORDS[self]


PHASES = tuple(Phase)
_PHASE_WORDS = {
    Phase.OTHER: "the script's own code",
    Phase.LOADER: "the data loader",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.SYNCHRONISE: "synchronise",
    Phase.OPTIMIZER: "the optimizer",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "save",
    Phase.STARTING: "its start",
}


class Field(enum.IntEnum):
    """Where each number of a page is, in 8-byte words."""

    MAGIC = 0
    SEQUENCE = 1
    PID = 2
    RANK = 3
    WORLD = 4
    MAIN_TID = 5  # of the kernel
    MAIN_THREAD = 6  # of faulthandler
    STARTED = 7
    PHASE = 8
    PHASE_SINCE = 9
    CALL_SINCE = 10  # 0: in no collective
    CALL_GROUP = 11
    CALL_NUMBER = 12
    CALL_BUCKET = 13
    CALL_TEXT = 14  # length of
    FORWARDS = 15
    BACKWARDS = 16
    SYNCS = 17  # synchronised backwards that are complete
    OPTIMIZER_STEPS = 18
    CALLS = 19  # on process groups
    TIMEOUT = 20  # of the group, 0: unknown
    STACKS_FD = 21
    MEETINGS = 22  # recorded so far
    MOVED_ON = 23  # forwards made when this rank last went on to something that follows a backward
    WATCHED_AT = 24  # when this rank last looked after the others, 0: it does not
    SAME_KIND = 25  # calls of the latest one's kind so far
    TOLD = 26  # since when a wait lasted that this rank told of


_SYNC_POINT = struct.Struct(f"<{4 + len(PHASES)}q")
_MEETINGS_WORD, _CALL_TEXT_WORD = int(Field.MEETINGS), int(Field.CALL_TEXT)


@dataclasses.dataclass(frozen=True)
class WaitLabel:
    """A kind of collective on one group: what a rank can be waiting in. `number` tells groups apart
    on all ranks.
    """

    kind: str
    group: str = ""
    number: int = 0
    members: tuple[int, ...] = ()  # empty: all ranks
    names: str = ""  # of the parameters in a bucket
    text: bytes = b""

    def packed(self) -> WaitLabel:
        """With the text that goes into a page."""
        members = ",".join(map(str, self.members))
        head = f"{self.kind}\t{self.group}\t{members}\t".encode()
        return dataclasses.replace(self, text=(head + self.names.encode())[:_CALL_BYTES])


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective a rank is in. `number` counts the calls on its group; the same call has the same
    on every rank.
    """

    kind: str
    group: str
    group_number: int
    number: int
    members: tuple[int, ...]
    since_ns: int
    bucket: int = NO_BUCKET
    names: str = ""

    @property
    def key(self) -> tuple[int, int, str]:
        return (self.group_number, self.number, self.kind)

    @property
    def words(self) -> str:
        """ "all_reduce of bucket 3 (head.weight, head.bias)", "barrier (call 12 of group default)"."""
        if self.bucket != NO_BUCKET:
            return f"{self.kind} of bucket {self.bucket} ({self.names})"
        if not self.group:
            return self.kind
        return f"{self.kind} (call {self.number} of {self.group})"


@dataclasses.dataclass(frozen=True)
class SyncPoint:
    """One wait that is over: when this rank came and left, and how it had spent the time since the
    one before.
    """

    group: int
    number: int
    arrived_ns: int
    left_ns: int
    spent_ns: tuple[int, ...]  # by phase


@dataclasses.dataclass(frozen=True)
class StatusPage:
    """A consistent copy of one rank's page. Times are CLOCK_MONOTONIC, the same for all processes
    of a host.
    """

    pid: int
    rank: int
    world: int
    job: str
    script: str
    main_tid: int
    main_thread: int
    started_ns: int
    phase: Phase
    phase_since_ns: int
    call: Call | None
    forwards: int
    backwards: int
    syncs: int
    optimizer_steps: int
    calls: int
    timeout_ns: int
    stacks_fd: int
    moved_on: int = 0
    watched_at_ns: int = 0
    same_kind: int = 0
    told_ns: int = 0
    sync_points: tuple[SyncPoint, ...] = ()

    @property
    def step(self) -> int:
        """Steps this rank has begun to make, as far as they can be seen."""
        return max(self.syncs, self.optimizer_steps)

    @property
    def since_ns(self) -> int:
        return self.call.since_ns if self.call is not None else self.phase_since_ns


class PageMemory:
    """The owner's side: the memory itself, as words and as bytes. Private until `share` is called."""

    def __init__(self) -> None:
        self._keep: mmap.mmap | None = None
        self.descriptor = -1
        self._view(memoryview(bytearray(_BYTES)))

    def _view(self, memory: memoryview) -> None:
        self.memory = memory
        self.words = memory.cast("q")

    def share(self) -> None:
        """Make the page visible to other processes of this user; what it says stays."""
        descriptor = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        mapped = mmap.mmap(descriptor, _BYTES)
        view = memoryview(mapped)
        view[:] = self.memory
        self.words.release()
        self._view(view)
        self._keep, self.descriptor = mapped, descriptor

    def unshare(self) -> None:
        """Take the page back: nobody outside sees it any more."""
        if self._keep is None:
            return
        private = memoryview(bytearray(self.memory))
        self.words.release()
        self.memory.release()
        self._view(private)
        self._keep.close()
        os.close(self.descriptor)
        self._keep, self.descriptor = None, -1

    def forget(self) -> None:
        """In a forked child: let go of the parent's page without touching it."""
        self._keep, self.descriptor = None, -1
        self._view(memoryview(bytearray(_BYTES)))

    def identify(self, *, job: str, script: str, rank: int, world: int) -> None:
        """Say whose page this is."""
        words = self.words
        words[Field.SEQUENCE] += 1
        words[Field.PID] = os.getpid()
        words[Field.RANK] = rank
        words[Field.WORLD] = world
        words[Field.MAIN_TID] = os.getpid()  # Python remembers the number from before a fork
        ident = threading.main_thread().ident or 0
        words[Field.MAIN_THREAD] = ident - (1 << 64) if ident >= 1 << 63 else ident
        words[Field.STARTED] = words[Field.STARTED] or time.monotonic_ns()
        self._put(_JOB_AT, _JOB_BYTES, job)
        self._put(_SCRIPT_AT, _SCRIPT_BYTES, script)
        words[Field.MAGIC] = _MAGIC
        words[Field.SEQUENCE] += 1

    def _put(self, at: int, room: int, text: str) -> None:
        data = text.encode()[:room]
        self.memory[at : at + room] = data.ljust(room, b"\0")

    def put_call(self, text: bytes) -> None:
        """The text of the call this rank is in."""
        size = len(text)
        self.memory[_CALL_AT : _CALL_AT + size] = text
        self.words[_CALL_TEXT_WORD] = size

    def put_sync_point(
        self, group: int, number: int, arrived_ns: int, left_ns: int, spent_ns: list[int]
    ) -> None:
        """Note a wait that is over, over the oldest one."""
        count = self.words[_MEETINGS_WORD]
        at = _MEETINGS_AT + (count % _MEETINGS) * _SYNC_POINT_WORDS * 8
        _SYNC_POINT.pack_into(self.memory, at, group, number, arrived_ns, left_ns, *spent_ns)
        self.words[_MEETINGS_WORD] = count + 1


def script_name() -> str:
    """What runs in this process, in a word. A launcher knows it before the rank does."""
    name = os.environ.get(SCRIPT) or (os.path.basename(sys.argv[0]) if sys.argv else "")
    return name if name not in ("", "-c") else "python"


# ---------------------------------------------------------------------------------------------- reading


def read_page(pid: int) -> StatusPage | None:
    """The page of a process, None if it has none (or is gone, or another user's)."""
    descriptor = _descriptor_of(pid)
    if descriptor is None:
        return None
    try:
        page = _parse(_stable_copy(descriptor))
    finally:
        os.close(descriptor)
    # A child that was forked from a rank holds its page, too.
    return page if page is not None and page.pid == pid else None


def find_pages(job: str | None = None) -> list[StatusPage]:
    """The pages of all ranks of this user on this host, or of one job's."""
    found = (read_page(pid) for pid in _own_processes())
    pages = [page for page in found if page is not None and job in (None, page.job)]
    return sorted(pages, key=lambda page: (page.started_ns // 10**10, page.job, page.rank))


def _own_processes() -> Iterator[int]:
    user = os.geteuid()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == user:
                        yield int(entry.name)


def _descriptor_of(pid: int) -> int | None:
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{_MEMFD_NAME}"):
                    return os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _stable_copy(descriptor: int) -> bytes:
    """A copy taken while the owner was not writing; after many attempts (it was stopped while
    writing), any.
    """
    copy = b""
    for _ in range(_READ_ATTEMPTS):
        before = os.pread(descriptor, 16, 0)
        copy = os.pread(descriptor, _BYTES, 0)
        if (
            before == copy[:16] == os.pread(descriptor, 16, 0)
            and _word(copy, Field.SEQUENCE) % 2 == 0
        ):
            break
        time.sleep(0)
    return copy


def _word(copy: bytes, word: Field) -> int:
    (value,) = struct.unpack_from("<q", copy, word * 8)
    return int(value)


def _parse(copy: bytes) -> StatusPage | None:
    if len(copy) < _BYTES or _word(copy, Field.MAGIC) != _MAGIC:
        return None
    word = {name: _word(copy, name) for name in Field}
    return StatusPage(
        pid=word[Field.PID],
        rank=word[Field.RANK],
        world=word[Field.WORLD],
        job=_text(copy, _JOB_AT, _JOB_BYTES),
        script=_text(copy, _SCRIPT_AT, _SCRIPT_BYTES),
        main_tid=word[Field.MAIN_TID],
        main_thread=word[Field.MAIN_THREAD] % (1 << 64),
        started_ns=word[Field.STARTED],
        phase=Phase(word[Field.PHASE]),
        phase_since_ns=word[Field.PHASE_SINCE],
        call=_call(copy, word),
        forwards=word[Field.FORWARDS],
        backwards=word[Field.BACKWARDS],
        syncs=word[Field.SYNCS],
        optimizer_steps=word[Field.OPTIMIZER_STEPS],
        calls=word[Field.CALLS],
        timeout_ns=word[Field.TIMEOUT],
        stacks_fd=word[Field.STACKS_FD],
        moved_on=word[Field.MOVED_ON],
        watched_at_ns=word[Field.WATCHED_AT],
        same_kind=word[Field.SAME_KIND],
        told_ns=word[Field.TOLD],
        sync_points=tuple(_sync_points(copy, word[Field.MEETINGS])),
    )


def _text(copy: bytes, at: int, room: int) -> str:
    return copy[at : at + room].rstrip(b"\0").decode(errors="replace")


def _call(copy: bytes, word: dict[Field, int]) -> Call | None:
    if word[Field.CALL_SINCE] == 0:
        return None
    text = copy[_CALL_AT : _CALL_AT + word[Field.CALL_TEXT]].decode(errors="replace")
    kind, group, members, names = (text.split("\t", 3) + [""] * 4)[:4]
    return Call(
        kind=kind,
        group=group,
        group_number=word[Field.CALL_GROUP],
        number=word[Field.CALL_NUMBER],
        members=tuple(int(rank) for rank in members.split(",") if rank),
        since_ns=word[Field.CALL_SINCE],
        bucket=word[Field.CALL_BUCKET],
        names=names,
    )


def _sync_points(copy: bytes, count: int) -> Iterator[SyncPoint]:
    for index in range(max(0, count - _MEETINGS), count):
        at = _MEETINGS_AT + (index % _MEETINGS) * _SYNC_POINT_WORDS * 8
        group, number, arrived, left, *spent = _SYNC_POINT.unpack_from(copy, at)
        yield SyncPoint(group, number, arrived, left, tuple(spent))


assert _MEETINGS_AT + _MEETINGS * _SYNC_POINT_WORDS * 8 <= _BYTES
assert 4 + len(PHASES) <= _SYNC_POINT_WORDS
# The recorder writes these at once.
assert tuple(range(Field.PHASE, Field.CALL_TEXT)) == (
    Field.PHASE,
    Field.PHASE_SINCE,
    Field.CALL_SINCE,
    Field.CALL_GROUP,
    Field.CALL_NUMBER,
    Field.CALL_BUCKET,
)
