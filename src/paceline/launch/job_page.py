"""The job page of an elastic job: memory in which its fork server tells who belongs to the job.

A page is anonymous memory (a memfd) that the fork server makes before it starts ranks. Ranks and
their replacements inherit it, `paceline ps` and `paceline scale` find it in `/proc`. On several
hosts each has a page, and all tell the same: what the first host's fork server decides.

    byte 0      an 8-byte word for each member of `Word`
    byte 256    the id of the job
    byte 512    for each slot three words: member, pid, step
    after that  the latest generations, a ring of records: checksum, length, JSON

There is one writer for each word: the rank in a slot writes the slot's step (on the page of its own
host alone), the fork server everything else. A generation is written before LATEST is raised to its
number. A reader takes a record only if checksum and number are right; otherwise it was overtaken,
and looks again.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import mmap
import os
import struct
import time
import zlib

from paceline._linux import anonymous_memory, open_memory_of, own_processes, read_stat
from paceline.errors import NativeError
from paceline.launch.generation import Generation, Member

__all__ = ["JobPage", "PublishedGeneration", "Word", "find_job_page_below", "find_job_pages"]

_MEMFD_NAME = "paceline-job"
_MAGIC = 0x7061_6365_0E03  # changes with the layout
_JOB_AT, _JOB_BYTES = 256, 64
_SLOTS_AT = 512
_SLOT_WORDS = 3
_RECORDS_KEPT = 16
_RECORD_HEADER = struct.Struct("<II")
_LONGEST_REASON = 200
_NOBODY = -1


class Word(enum.IntEnum):
    """Where each number of the page is, in units of 8 bytes."""

    MAGIC = 0
    LATEST = 1  # the number of the newest generation; -1 before the first
    IS_ENDING = 2  # 1: the whole job was asked to end
    MIN_RANKS = 3
    MAX_RANKS = 4
    TARGET = 5  # how many ranks the job is meant to have
    SERVER_PID = 6
    REQUESTS_FD = 7  # the write end of the requests pipe, in the fork server
    SLOTS = 8  # how many there are: on several hosts more than ranks
    LEASE_ENDS = 9  # until when ranks of this host may train (CLOCK_MONOTONIC, ns); 0: always


@dataclasses.dataclass(frozen=True)
class PublishedGeneration:
    """A generation, and when it began (CLOCK_MONOTONIC)."""

    generation: Generation
    began_ns: int


class JobPage:
    """A mapped page. The process that made it writes, others read, a rank writes its own step."""

    def __init__(self, descriptor: int, *, access: int = mmap.ACCESS_WRITE) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=access)
        self.words = memoryview(self._memory).cast("q")
        if self.words[Word.MAGIC] != _MAGIC:
            raise NativeError(
                "the job page is that of another version of Paceline: use the same version for the "
                "launcher and the ranks"
            )
        self._record_bytes = _record_bytes(self.slots)

    @classmethod
    def create(
        cls, job: str, *, min_ranks: int, max_ranks: int, slots: int | None = None
    ) -> JobPage:
        """A page of a job without members, with a slot for each rank if nothing else is said. Its
        descriptor is open in the caller.
        """
        slots = max_ranks if slots is None else slots
        nbytes = _records_at(slots) + _RECORDS_KEPT * _record_bytes(slots)
        descriptor = anonymous_memory(_MEMFD_NAME, nbytes)
        words = {
            Word.MAGIC: _MAGIC,
            Word.LATEST: -1,
            Word.MIN_RANKS: min_ranks,
            Word.MAX_RANKS: max_ranks,
            Word.SERVER_PID: os.getpid(),
            Word.REQUESTS_FD: -1,
            Word.SLOTS: slots,
        }
        header = struct.pack(f"<{len(Word)}q", *(words.get(word, 0) for word in Word))
        os.pwrite(descriptor, header, 0)
        os.pwrite(descriptor, job.encode()[:_JOB_BYTES], _JOB_AT)
        nobody = struct.pack(f"<{_SLOT_WORDS}q", *[_NOBODY] * _SLOT_WORDS)
        os.pwrite(descriptor, nobody * slots, _SLOTS_AT)
        return cls(descriptor)

    def close(self) -> None:
        """Unmap the page and close its descriptor."""
        self.words.release()
        self._memory.close()
        os.close(self.descriptor)

    # -- read --------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The id of the job, as `paceline ps` shows it."""
        text = self._memory[_JOB_AT : _JOB_AT + _JOB_BYTES]
        return text.rstrip(b"\0").decode(errors="replace")

    @property
    def max_ranks(self) -> int:
        return int(self.words[Word.MAX_RANKS])

    @property
    def slots(self) -> int:
        return int(self.words[Word.SLOTS])

    def newest(self) -> PublishedGeneration | None:
        """The newest generation; None before the first."""
        while (number := int(self.words[Word.LATEST])) >= 0:
            if (published := self.published(number)) is not None:
                return published
        return None

    def published(self, number: int) -> PublishedGeneration | None:
        """One of the latest generations; None if a newer one has taken its place."""
        at = self._record_at(number)
        record = self._memory[at : at + self._record_bytes]
        checksum, length = _RECORD_HEADER.unpack_from(record)
        data = record[_RECORD_HEADER.size :][:length]
        if zlib.crc32(data) != checksum or not data:
            return None
        content = json.loads(data)
        if content["number"] != number:
            return None
        members = tuple(Member(*facts) for facts in content["members"])
        generation = Generation(number, members, content["reason"])
        return PublishedGeneration(generation, content["began_ns"])

    def latest_published(self) -> list[PublishedGeneration]:
        """As many of the newest generations as the page has, the oldest first."""
        latest = int(self.words[Word.LATEST])
        numbers = range(max(0, latest - _RECORDS_KEPT + 1), latest + 1)
        return [found for number in numbers if (found := self.published(number)) is not None]

    def member_in(self, slot: int) -> int | None:
        """The id of the member that lives in a slot."""
        member = int(self.words[_slot_at(slot)])
        return None if member == _NOBODY else member

    def pid_in(self, slot: int) -> int | None:
        """The process that lives in a slot."""
        pid = int(self.words[_slot_at(slot) + 1])
        return None if pid == _NOBODY else pid

    def step_in(self, slot: int) -> int | None:
        """The step that the member in a slot has reached; None if it has not begun to train."""
        step = int(self.words[_slot_at(slot) + 2])
        return None if step == _NOBODY else step

    # -- write -------------------------------------------------------------------------------------

    def seat(self, slot: int, member: int, pid: int) -> None:
        """A new process lives in a slot."""
        at = _slot_at(slot)
        self.words[at + 2] = _NOBODY
        self.words[at + 1] = pid
        self.words[at] = member

    def vacate(self, slot: int) -> None:
        """The process in a slot has ended. The step it reached stays."""
        at = _slot_at(slot)
        self.words[at] = self.words[at + 1] = _NOBODY

    def set_step(self, slot: int, step: int) -> None:
        """Called by the member in the slot, between two batches."""
        self.words[_slot_at(slot) + 2] = step

    def publish(self, generation: Generation) -> None:
        """Make a generation the newest one."""
        content = {
            "number": generation.number,
            "members": [[each.slot, each.id, each.host] for each in generation.members],
            "reason": generation.reason[:_LONGEST_REASON],
            "began_ns": time.monotonic_ns(),
        }
        data = json.dumps(content, ensure_ascii=False).encode(errors="replace")
        record = _RECORD_HEADER.pack(zlib.crc32(data), len(data)) + data
        assert len(record) <= self._record_bytes
        at = self._record_at(generation.number)
        self._memory[at : at + len(record)] = record
        self.words[Word.LATEST] = generation.number

    def _record_at(self, number: int) -> int:
        return _records_at(self.slots) + number % _RECORDS_KEPT * self._record_bytes


def find_job_pages(job: str = "") -> list[JobPage]:
    """The pages of this user's elastic jobs on this host, or of those whose id begins with `job`,
    to be read. The caller closes them.
    """
    pages = []
    for pid in own_processes():
        if (page := _open_page_of(pid)) is None:
            continue
        if page.job.startswith(job):
            pages.append(page)
        else:
            page.close()
    return sorted(pages, key=lambda page: page.job)


def find_job_page_below(launcher_pid: int) -> JobPage | None:
    """The page of the elastic job that a process has started, to be read; None if there is none
    yet. The caller closes it.
    """
    found = None
    for page in find_job_pages():
        if found is None and _is_below(int(page.words[Word.SERVER_PID]), launcher_pid):
            found = page
        else:
            page.close()
    return found


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and (process := read_stat(pid)) is not None:
        if process.parent == ancestor:
            return True
        pid = process.parent
    return False


def _open_page_of(pid: int) -> JobPage | None:
    """The page that a process has made; None if it only uses one, or has just begun to make it."""
    for descriptor in open_memory_of(pid, _MEMFD_NAME):
        try:
            page = JobPage(descriptor, access=mmap.ACCESS_READ)
        except (ValueError, NativeError):
            os.close(descriptor)
            continue
        if page.words[Word.SERVER_PID] == pid:
            return page
        page.close()
    return None


def _slot_at(slot: int) -> int:
    return _SLOTS_AT // 8 + slot * _SLOT_WORDS


def _records_at(slots: int) -> int:
    return _SLOTS_AT + 8 * _SLOT_WORDS * slots


def _record_bytes(slots: int) -> int:
    """Room for a record with a long reason, and three numbers for each member."""
    return (1024 + 32 * slots + 7) // 8 * 8
