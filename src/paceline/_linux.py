"""Facts about processes on this host: which host it is, who a peer is, and how it ended."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pathlib
import struct
import threading

__all__ = ["PidWatch", "exit_code_of", "host_identity", "is_running"]

# _IOWR(0xFF, 11, struct pidfd_info): since Linux 6.13; the exit code since 6.15 (linux/pidfd.h).
_PIDFD_INFO_BYTES = 64
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO_BYTES << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60


def host_identity() -> str:
    """Equal for two processes that can share memory: same boot, same IPC, pid and user namespaces,
    same user.

    Not the host name: containers share one, and one machine may have several.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = "-".join(
        str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("ipc", "pid", "user")
    )
    return f"{boot}-{namespaces}-{os.geteuid()}"


class PidWatch:
    """One descriptor per watched process, however many groups watch it: 255 peers in ten groups
    stay 255.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, int]] = {}  # pid -> (descriptor, users)

    def acquire(self, pid: int) -> int:
        """A descriptor that becomes readable when the process ends; -1 where the kernel offers
        none.
        """
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


def is_running(pid: int) -> bool:
    """Whether a process of this host still runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _zombie_status(pid) is None


def exit_code_of(pid: int, pidfd: int) -> int | None:
    """How a process that is not our child ended, as `subprocess` counts: negative for a signal;
    None if unknown.
    """
    status = _zombie_status(pid)
    if status is None and pidfd >= 0:
        status = _pidfd_status(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _zombie_status(pid: int) -> int | None:
    """The last field of /proc/pid/stat, for a process that has ended and was not waited for yet."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return int(fields[-1])
    return None


def _pidfd_status(pidfd: int) -> int | None:
    """Ask the descriptor itself: works after the process was waited for, on kernels that keep the
    answer.
    """
    info = array.array("B", struct.pack("<Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        (mask,) = struct.unpack_from("<Q", info)
        if mask & _PIDFD_INFO_EXIT:
            (status,) = struct.unpack_from("<i", info, _EXIT_CODE_AT)
            return int(status)
    return None
