"""What Linux offers about processes and memory, and Python does not: the only reader of `/proc`.

Everything here is a fact of this host at this moment. A process that is gone is no error: readers
return None, because whoever asks about another process races with its end.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import mmap
import os
import pathlib
import platform
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator

__all__ = [
    "PidWatch",
    "ProcessStat",
    "adopt_orphans",
    "anonymous_memory",
    "boot_id",
    "can_find_written_pages",
    "catches_signal",
    "descendants",
    "die_with_parent",
    "end_descendants",
    "exit_code_of",
    "give_up_when_silent",
    "host_identity",
    "is_running",
    "lock_byte",
    "open_descriptor_of",
    "open_memory_of",
    "open_sockets",
    "outlive_parent",
    "own_processes",
    "process_ids",
    "processor_name",
    "read_stat",
    "signal_when_parent_ends",
    "unacknowledged_bytes",
    "written_pages",
]

# _IOWR(0xFF, 11, struct pidfd_info): since Linux 6.13; the exit code since 6.15 (linux/pidfd.h).
_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO_BYTES << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60

# _IOWR('f', 16, struct pm_scan_arg): since Linux 6.7 (linux/fs.h).
_PAGEMAP_SCAN = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
_PAGE_IS_FILE, _PAGE_IS_PRESENT, _PAGE_IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS_AT_ONCE = 256
_REGION_WORDS = 3  # begin, end, categories
# An entry of /proc/self/pagemap: present, swapped, neither of a file nor shared.
_ENTRY_PRESENT, _ENTRY_SWAPPED, _ENTRY_OF_FILE = 1 << 63, 1 << 62, 1 << 61

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

_KILL_TIMEOUT_S = 5.0


# ------------------------------------------------------------------- this host


def boot_id() -> str:
    """A name for the time since this machine was started."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_identity() -> str:
    """Equal for two processes that can share memory: the same boot, the same IPC, pid and user
    namespaces, the same user.

    Not the host name: containers share one, and one machine may have several.
    """
    namespaces = "-".join(
        str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("ipc", "pid", "user")
    )
    return f"{boot_id()}-{namespaces}-{os.geteuid()}"


def anonymous_memory(name: str, nbytes: int = 0) -> int:
    """A descriptor of memory without a name in any file system: nothing is left behind by a kill.

    `name` is what `/proc/<pid>/maps` and `/proc/<pid>/fd` show.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    if nbytes:
        os.truncate(descriptor, nbytes)
    return descriptor


def open_descriptor_of(pid: int, number: int) -> int:
    """Open what another process of the same user has open under a descriptor number."""
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def lock_byte(descriptor: int, at: int) -> None:
    """Lock one byte of a file, also behind its end, until this descriptor and all copies of it are
    closed.

    Raises:
        BlockingIOError: it is locked through another opening of the file.
    """
    # struct flock: the kind, where `at` counts from, `at`, how many bytes, no process.
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)


def written_pages(begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of a private mapping of a file that this process has written to, as addresses of
    whole pages: there it has copies of its own, elsewhere it sees the file.

    Costs about 40 ns for each page that was ever looked at.
    """
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _scan_page_tables(pagemap, begin, end)
    except OSError:
        return _read_page_tables(pagemap, begin, end)
    finally:
        os.close(pagemap)


def _scan_page_tables(pagemap: int, begin: int, end: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    regions = array.array("Q", bytes(8 * _REGION_WORDS * _REGIONS_AT_ONCE))
    there = _PAGE_IS_PRESENT | _PAGE_IS_SWAPPED
    while begin < end:
        scan = array.array(
            "Q",
            [
                *(96, 0, begin, end, 0),  # size, flags, the range, where the walk ended
                *(regions.buffer_info()[0], _REGIONS_AT_ONCE, 0),
                # Not of the file, and there at all.
                *(_PAGE_IS_FILE, _PAGE_IS_FILE, there, there),
            ],
        )
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, scan)
        found += [(regions[i], regions[i + 1]) for i in range(0, count * _REGION_WORDS, 3)]
        begin = scan[4]
    return found


def _read_page_tables(pagemap: int, begin: int, end: int) -> list[tuple[int, int]]:
    page = mmap.PAGESIZE
    entries = array.array("Q", os.pread(pagemap, (end - begin) // page * 8, begin // page * 8))
    if len(entries) != (end - begin) // page:
        raise OSError("/proc/self/pagemap ends early")
    return [
        (begin + index * page, begin + (index + 1) * page)
        for index, entry in enumerate(entries)
        if entry & (_ENTRY_PRESENT | _ENTRY_SWAPPED) and not entry & _ENTRY_OF_FILE
    ]


@functools.cache
def can_find_written_pages() -> bool:
    """Whether `written_pages` works here: tried once. Some sandboxes have no page tables to show,
    or show something else.
    """
    page = mmap.PAGESIZE
    try:
        descriptor = anonymous_memory("paceline", 3 * page)
        try:
            mapping = mmap.mmap(
                descriptor,
                3 * page,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        finally:
            os.close(descriptor)
        with mapping:
            address = ctypes.addressof(anchor := ctypes.c_char.from_buffer(mapping))
            del anchor  # a mapping with exports cannot be closed
            mapping[0], mapping[page] = mapping[2 * page], 1
            return written_pages(address, address + 3 * page) in (
                [(address, address + 2 * page)],
                [(address, address + page), (address + page, address + 2 * page)],
            )
    except OSError:
        return False


def open_memory_of(pid: int, name: str, mode: int = os.O_RDONLY) -> Iterator[int]:
    """Everything that a process has open and that `anonymous_memory` gave this name. The caller
    closes the descriptors.
    """
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{name}"):
                    yield os.open(entry.path, mode | os.O_CLOEXEC)


def open_sockets() -> dict[str, int]:
    """The descriptors of all sockets of this process, by names that are never used again."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found[name] = int(entry)
    return found


def unacknowledged_bytes(descriptor: int) -> int:
    """How much of what was sent the other side's kernel does not have yet. 0 if that is unknown:
    the socket is closed or has none.
    """
    try:
        answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return 0
    return int(struct.unpack("i", answer)[0])


def give_up_when_silent(descriptor: int, limit_s: int) -> None:
    """Let the kernel end a TCP connection whose other end acknowledges nothing for so long, also
    while there is nothing to send. By default it tries for a quarter of an hour.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_tcp = connection.type == socket.SOCK_STREAM
        if not is_tcp or connection.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, limit_s // 3))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, limit_s // 6))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * limit_s)


# ------------------------------------------------------------- other processes


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of `/proc/<pid>/stat` that anybody here asks for."""

    command: str
    state: str  # R running, S sleeping, D in the kernel, T stopped, t traced, Z ended, X gone
    parent: int
    start_ticks: int  # since boot; with the pid, a name that is never used again
    exit_status: int  # as waitpid() gives it; meaningful in state Z only

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def processor_name() -> str:
    """The processor as the kernel names it; the architecture where it has no name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_stat(pid: int, tid: int | None = None) -> ProcessStat | None:
    """What the kernel says of a process, or of one of its threads; None if there is none."""
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    try:
        with open(path, "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The command is the one field that may hold spaces and parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    try:
        return ProcessStat(
            command=head.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            start_ticks=int(fields[19]),
            exit_status=int(fields[-1]),
        )
    except (IndexError, ValueError):  # it ended while we read
        return None


def process_ids() -> Iterator[int]:
    """Every process of this host that can be seen."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def own_processes() -> Iterator[int]:
    """The processes of this user."""
    user = os.geteuid()
    for pid in process_ids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                yield pid


def is_running(pid: int) -> bool:
    """Whether a process of this host still runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = read_stat(pid)
    return stat is None or not stat.has_ended


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def exit_code_of(pid: int, pidfd: int) -> int | None:
    """How a process that is not our child ended, as `subprocess` counts: negative for a signal.

    None if unknown.
    """
    stat = read_stat(pid)
    status = stat.exit_status if stat is not None and stat.has_ended else None
    if status is None and pidfd >= 0:
        status = _pidfd_status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _pidfd_status(pidfd: int) -> int | None:
    """Ask the descriptor itself: works after the process was waited for, where kernels keep it."""
    info = array.array("B", struct.pack("<Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        (mask,) = struct.unpack_from("<Q", info)
        if mask & _PIDFD_INFO_EXIT:
            (status,) = struct.unpack_from("<i", info, _EXIT_CODE_AT)
            return int(status)
    return None


class PidWatch:
    """One descriptor per watched process, however many groups watch it.

    So 255 peers in ten groups cost 255 descriptors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, int]] = {}  # pid -> (descriptor, users)

    def acquire(self, pid: int) -> int:
        """A descriptor that becomes readable when the process ends; -1 where there are none."""
        with self._lock:
            descriptor, users = self._open.get(pid, (-1, 0))
            if users == 0:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    raise
                except OSError:
                    return -1
            self._open[pid] = (descriptor, users + 1)
            return descriptor

    def peek(self, pid: int) -> int:
        """The descriptor of a watched process, -1 if it is not watched."""
        with self._lock:
            return self._open.get(pid, (-1, 0))[0]

    def release(self, pid: int) -> None:
        """Undo one `acquire`."""
        with self._lock:
            descriptor, users = self._open.get(pid, (-1, 0))
            if users > 1:
                self._open[pid] = (descriptor, users - 1)
            elif users == 1:
                del self._open[pid]
                os.close(descriptor)


# -------------------------------------------------------- parents and children


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    At once, if `parent` is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_when_parent_ends(number: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def outlive_parent() -> None:
    """Take back `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    if _libc.prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children. Zombies do not count."""
    children: dict[int, list[int]] = {}
    ended = set()
    for pid in process_ids():
        stat = read_stat(pid)
        if stat is None:
            continue
        children.setdefault(stat.parent, []).append(pid)
        if stat.state == "Z":
            ended.add(pid)
    below: list[int] = []
    generation = list(children.get(root, []))
    while generation:
        below += generation
        generation = [child for parent in generation for child in children.get(parent, [])]
    return [pid for pid in below if pid not in ended]


def end_descendants(root: int, *, wait_s: float, term_s: float) -> None:
    """End every descendant: wait for those that end by themselves, then SIGTERM, then SIGKILL.

    The first wait is for helpers that clean up when their parent is gone, such as multiprocessing's
    resource tracker: killing those at once would leave shared memory behind.
    """
    if _gone_within(root, wait_s):
        return
    _signal_all(root, signal.SIGTERM)
    if _gone_within(root, term_s):
        return
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while descendants(root) and time.monotonic() < deadline:
        _signal_all(root, signal.SIGKILL)
        _gone_within(root, 0.1)


def _signal_all(root: int, number: int) -> None:
    for pid in descendants(root):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _gone_within(root: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while descendants(root):
        _reap()
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    _reap()
    return True


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
