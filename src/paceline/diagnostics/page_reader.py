"""Reads status pages of other processes: see `paceline.telemetry.status_page` for the layout.

The owner of a page never waits for its readers. A reader therefore copies the page until it has a
copy during which SEQUENCE was even and did not change: then nothing was written meanwhile. If the
owner was stopped while it was writing, no such copy will ever come; after many attempts any copy is
taken, for a stopped rank is just what a reader wants to know about.

Nothing that a page may hold is an error here. A process that has only begun to make its page, or
whose page is another version's, has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import time
from collections.abc import Iterator, Sequence

from paceline._linux import lock_byte, open_memory_of, own_processes
from paceline.telemetry.status_page import (
    CALL_AT,
    JOB_AT,
    JOB_BYTES,
    MEMFD_NAME,
    NO_BUCKET,
    OPTIMIZER_AT,
    OPTIMIZER_BYTES,
    PAGE_BYTES,
    PAGE_MAGIC,
    PHASE_TIMES,
    PHASE_TIMES_AT,
    PHASE_TIMES_BEFORE_AT,
    PHASES,
    SCRIPT_AT,
    SCRIPT_BYTES,
    SYNC_POINT,
    SYNC_POINTS_KEPT,
    Field,
    Phase,
    sync_point_at,
)

__all__ = [
    "Call",
    "StatusPage",
    "SyncPoint",
    "find_pages",
    "lock_report",
    "parse_page",
    "read_page",
]

_READ_ATTEMPTS = 200
_PHASES = frozenset(Phase)


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective that a rank is in.

    `number` counts the calls on the group: the same call has the same number on every rank. No
    `members` means all ranks.
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
        """Equal for ranks that are in the same call."""
        return (self.group_number, self.number, self.kind)

    def describe(self) -> str:
        """ "all_reduce of bucket 3 (head.weight)", "barrier (call 12 of the default group)"."""
        if self.bucket != NO_BUCKET:
            return f"{self.kind} of bucket {self.bucket} ({self.names})"
        if not self.group:
            return self.kind
        return f"{self.kind} (call {self.number} of {self.group})"


@dataclasses.dataclass(frozen=True)
class SyncPoint:
    """A wait that is over: when this rank arrived and left, and how long it had been in each phase
    since the sync point before.
    """

    group: int
    number: int
    arrived_ns: int
    left_ns: int
    spent_ns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StatusPage:
    """A consistent copy of one rank's page.

    Times are CLOCK_MONOTONIC, which all processes of a host share. The counters are explained where
    `Field` defines them.
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
    concluded_forwards: int = 0
    watched_at_ns: int = 0
    calls_of_kind: int = 0
    has_left: bool = False
    training_since_ns: int = 0
    last_step_ns: int = 0
    samples: int = 0
    reported_samples: int = 0
    reached_step: int = 0
    steps_before: int = 0
    spent_ns: tuple[int, ...] = (0,) * len(PHASES)  # by phase, since training began
    optimizer: str = ""
    sync_points: tuple[SyncPoint, ...] = ()

    @property
    def step(self) -> int:
        """Steps that are complete, as far as can be seen."""
        return max(self.syncs, self.optimizer_steps)

    @property
    def since_ns(self) -> int:
        """Since when this rank has been in its call, or else in its phase."""
        return self.call.since_ns if self.call is not None else self.phase_since_ns


def read_page(pid: int) -> StatusPage | None:
    """The page of a process; None if it has none yet, is gone, or belongs to another user."""
    with _opened_page(pid) as (_, page):
        return page


def lock_report(pid: int, since_ns: int) -> int | None:
    """Take the report lock of a wait: whoever has it reports that this rank has waited since then.

    It is a lock on one byte of the rank's page, far behind its end: the one whose place is the
    time. The kernel gives it to one process only, however much they are delayed.

    Returns:
        A descriptor; closing it gives the lock up. None if somebody else has it, or the rank has no
        page any more.
    """
    with _opened_page(pid, os.O_RDWR) as (descriptor, page):
        if page is None:
            return None
        try:
            lock_byte(descriptor, since_ns)
        except BlockingIOError:
            return None
        return os.dup(descriptor)


@contextlib.contextmanager
def _opened_page(pid: int, mode: int = os.O_RDONLY) -> Iterator[tuple[int, StatusPage | None]]:
    for descriptor in open_memory_of(pid, MEMFD_NAME, mode):
        try:
            page = parse_page(_consistent_copy(descriptor))
            # A child that was forked from a rank may still hold its parent's page.
            if page is not None and page.pid == pid and not page.has_left:
                yield descriptor, page
                return
        finally:
            os.close(descriptor)
    yield -1, None


def find_pages(job: str | None = None) -> list[StatusPage]:
    """The pages of all ranks of this user on this host, or of one job's."""
    pages = [
        page
        for pid in own_processes()
        if (page := read_page(pid)) is not None and job in (None, page.job)
    ]
    return sorted(pages, key=lambda page: (page.started_ns // 10**10, page.job, page.rank))


def _consistent_copy(descriptor: int) -> bytes:
    """A copy taken while the owner was not writing; after many attempts, any copy. Shorter than a
    page if the owner has only begun to make it.
    """
    copy = b""
    for _ in range(_READ_ATTEMPTS):
        before = os.pread(descriptor, 16, 0)
        copy = os.pread(descriptor, PAGE_BYTES, 0)
        if len(copy) < PAGE_BYTES:
            break
        unchanged = before == copy[:16] == os.pread(descriptor, 16, 0)
        if unchanged and _field(copy, Field.SEQUENCE) % 2 == 0:
            break
        time.sleep(0)
    return copy


def _field(copy: bytes, field: Field) -> int:
    (value,) = struct.unpack_from("<q", copy, field * 8)
    return int(value)


def parse_page(copy: bytes) -> StatusPage | None:
    """What a copy of a page says; None if it is no page, or not a complete one."""
    if len(copy) < PAGE_BYTES or _field(copy, Field.MAGIC) != PAGE_MAGIC:
        return None
    values = {field: _field(copy, field) for field in Field}
    if not 0 <= values[Field.RANK] < values[Field.WORLD] or values[Field.PHASE] not in _PHASES:
        return None
    return StatusPage(
        pid=values[Field.PID],
        rank=values[Field.RANK],
        world=values[Field.WORLD],
        job=_text(copy, JOB_AT, JOB_BYTES),
        script=_text(copy, SCRIPT_AT, SCRIPT_BYTES),
        main_tid=values[Field.MAIN_TID],
        main_thread=values[Field.MAIN_THREAD] % (1 << 64),
        started_ns=values[Field.STARTED],
        phase=Phase(values[Field.PHASE]),
        phase_since_ns=values[Field.PHASE_SINCE],
        call=_call(copy, values),
        forwards=values[Field.FORWARDS],
        backwards=values[Field.BACKWARDS],
        syncs=values[Field.SYNCS],
        optimizer_steps=values[Field.OPTIMIZER_STEPS],
        calls=values[Field.CALLS],
        timeout_ns=values[Field.TIMEOUT],
        stacks_fd=values[Field.STACKS_FD],
        concluded_forwards=values[Field.CONCLUDED_FORWARDS],
        watched_at_ns=values[Field.WATCHED_AT],
        calls_of_kind=values[Field.CALLS_OF_KIND],
        has_left=values[Field.HAS_LEFT] != 0,
        training_since_ns=values[Field.TRAINING_SINCE],
        last_step_ns=values[Field.LAST_STEP],
        samples=values[Field.SAMPLES],
        reported_samples=values[Field.REPORTED_SAMPLES],
        reached_step=values[Field.REACHED_STEP],
        steps_before=values[Field.STEPS_BEFORE],
        spent_ns=_difference(
            PHASE_TIMES.unpack_from(copy, PHASE_TIMES_AT),
            PHASE_TIMES.unpack_from(copy, PHASE_TIMES_BEFORE_AT),
        ),
        optimizer=_text(copy, OPTIMIZER_AT, OPTIMIZER_BYTES),
        sync_points=tuple(_sync_points(copy, values[Field.SYNC_POINTS])),
    )


def _text(copy: bytes, at: int, size: int) -> str:
    return copy[at : at + size].rstrip(b"\0").decode(errors="replace")


def _call(copy: bytes, values: dict[Field, int]) -> Call | None:
    if values[Field.CALL_SINCE] == 0:
        return None
    text = copy[CALL_AT : CALL_AT + values[Field.CALL_TEXT_BYTES]].decode(errors="replace")
    # A long text was cut off at the end of its room; one of a stopped rank may be half written.
    kind, group, members, names = (text.split("\t", 3) + [""] * 4)[:4]
    return Call(
        kind=kind,
        group=group,
        group_number=values[Field.CALL_GROUP],
        number=values[Field.CALL_NUMBER],
        members=tuple(int(rank) for rank in members.split(",") if rank.isdecimal()),
        since_ns=values[Field.CALL_SINCE],
        bucket=values[Field.CALL_BUCKET],
        names=names,
    )


def _sync_points(copy: bytes, count: int) -> Iterator[SyncPoint]:
    """Times are on the page until each sync point; what is wanted is since the one before."""
    first = max(0, count - SYNC_POINTS_KEPT)
    before = [0] * len(PHASES)
    for index in range(first, count):
        group, number, arrived, left, *until = SYNC_POINT.unpack_from(copy, sync_point_at(index))
        if index > first or first == 0:
            yield SyncPoint(group, number, arrived, left, _difference(until, before))
        before = until


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(later - earlier for later, earlier in zip(after, before, strict=True))
