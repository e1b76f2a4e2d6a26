"""`Communicator`: the ranks of one host, joined by shared memory.

Methods take addresses and counts; `paceline.backend` turns tensors into those. Every status of the
core other than OK becomes an exception of `paceline.errors`, see `call_errors`.
"""

from __future__ import annotations

import ctypes as C
import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta

from paceline._linux import PidWatch
from paceline.core import abi
from paceline.core.abi import ERROR_TEXT_BYTES, Kind, Message, Request, Status
from paceline.core.call_errors import CallErrors
from paceline.core.rendezvous import shared_descriptor
from paceline.core.store_exchange import Store, exchange
from paceline.errors import ConfigError, GroupError, NativeError, PeerLost
from paceline.failure_channel import (
    error_in_flight,
    register_channel,
    truncate,
    unregister_channel,
)

__all__ = ["Communicator"]

# A slot is a ring of four blocks, which together stay in a second-level cache.
_SLOT_BYTES = 512 * 1024
_SLOT_BYTES_MANY_RANKS = 256 * 1024
_RING_BYTES = 64 * 1024
_RING_BYTES_MANY_RANKS = 16 * 1024
_MANY_RANKS = 16
_SPIN_NS = 100_000
# More ranks than cores: a rank that spins keeps a peer from running.
_SPIN_NS_OVERSUBSCRIBED = 2_000
# Half of the room, so that the error that ends a rank fits beside that of a thread.
_MAX_ERROR_BYTES = ERROR_TEXT_BYTES // 2

_SAME_VERSION = "; check that all ranks run the same version of paceline"

_pid_watch = PidWatch()
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _end_membership_after_fork() -> None:
    """A forked child is no rank: a call of its own would be counted as one of its parent's."""
    for comm in list(_communicators):
        comm._handle = None


os.register_at_fork(after_in_child=_end_membership_after_fork)


class Communicator:
    """One rank's membership in the group of its host.

    `names` are the ranks' numbers for messages: the local ranks of a host have other numbers in the
    whole group.

    Calls are made through the library that keeps the GIL: short ones are over before releasing it
    would pay, and the core itself releases it before it waits.
    """

    def __init__(
        self,
        handle: C.c_void_p,
        rank: int,
        pids: Sequence[int],
        names: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._core = abi.library()
        self._handle: C.c_void_p | None = handle
        self.rank = rank
        self.size = len(pids)
        self._pids = list(pids)
        self.names = list(names)
        self._timeout = timeout
        self._arenas = 0
        self._bucket_names: dict[tuple[int, int], str] = {}
        holding_gil = abi.library_holding_gil()
        holding_gil.plc_comm_set_interpreter(handle, abi.interpreter())
        self._run = holding_gil.plc_run
        self._request_wait = holding_gil.plc_request_wait
        self._message_wait = holding_gil.plc_message_wait
        self._allreduce = holding_gil.plc_allreduce
        self._publish_error = holding_gil.plc_comm_publish_error
        self._errors = CallErrors(self, self._pids, _pid_watch)
        # Freed when no thread can be inside a method any more. Not at exit: that the process ended
        # is the more useful fact for the peers.
        weakref.finalize(self, self._core.plc_comm_free, handle).atexit = False
        _communicators.add(self)
        register_channel(self)

    # --- buckets ----------------------------------------------------------------------------------
    def count_arena(self) -> int:
        """The number of an arena that was just opened, the same on every rank."""
        number, self._arenas = self._arenas, self._arenas + 1
        return number

    def name_bucket(self, arena: int, index: int, name: str) -> None:
        """What a bucket is called in messages about ranks that wait in it."""
        self._bucket_names[arena, index] = name

    def bucket_name(self, arena: int, index: int) -> str:
        return self._bucket_names.get((arena, index), f"bucket {index} of arena {arena}")

    # --- life -------------------------------------------------------------------------------------
    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        *,
        slot_bytes: int | None = None,
        spin_ns: int | None = None,
        allow_direct: bool = True,
        pids: Mapping[int, int] | None = None,
    ) -> Communicator:
        """Join the other ranks of this host through the store. `ranks` are all their numbers,
        ascending; ours is `rank`.

        `pids`: their processes, if they are known already.
        """
        core = abi.library()
        size = len(ranks)
        if size > abi.MAX_RANKS:
            raise ConfigError(
                f"{size} ranks on this host, but the paceline backend supports at most "
                f"{abi.MAX_RANKS}; use fewer ranks or backend='gloo'"
            )
        if pids is None:
            answers = exchange(
                store, "pids", rank, ranks, str(os.getpid()), timeout, pid_in=int, prompt=True
            )
            pids = {other: int(pid) for other, pid in answers.items()}
        config = _config(size, slot_bytes, timeout, spin_ns)

        def prepare(descriptor: int, nonce: tuple[int, int]) -> None:
            _check(
                core.plc_segment_format(descriptor, size, config, (C.c_uint64 * 2)(*nonce)),
                "format the shared-memory segment",
            )

        handle = C.c_void_p()
        local = list(ranks).index(rank)
        watched = [pids[other] for other in ranks]
        comm: Communicator | None = None
        try:
            with shared_descriptor(store, "core", rank, ranks, prepare, timeout, pids) as (
                descriptor,
                nonce,
            ):
                descriptors = _watch(watched, local, ranks)
                status = core.plc_comm_join(
                    descriptor,
                    None,
                    local,
                    size,
                    (C.c_uint64 * 2)(*nonce),
                    config,
                    (C.c_int * size)(*descriptors),
                    C.byref(handle),
                )
                if status != Status.OK:
                    _unwatch(watched, local)
                _check(status, "join the shared-memory segment")
                comm = cls(handle, local, watched, ranks, timeout)
            status = core.plc_comm_probe_direct_reads(handle, allow_direct)
            if status:
                raise comm.error(status, Kind.BARRIER)
        except BaseException:
            if comm is not None:
                comm.leave()  # a peer could not join: nothing of ours stays mapped
            raise
        return comm

    def leave(self) -> None:
        """End the membership. Peers that still wait for this rank see it, with the error that is
        being raised here, if any.
        """
        if self._handle is not None and (error_text := error_in_flight()):
            self.publish(error_text, leaving=False)
        handle, self._handle = self._handle, None
        if handle is not None:
            unregister_channel(self)
            self._core.plc_comm_leave(handle)
            _unwatch(self._pids, self.rank)

    # --- a failure channel: what `paceline.failure_channel` calls when this process fails ---------
    def publish(self, text: str, *, leaving: bool) -> None:
        """Publish an error, which peers can read whatever becomes of this process."""
        if self._handle is not None:
            data = truncate(text, _MAX_ERROR_BYTES)
            self._publish_error(self._handle, data, len(data), leaving)

    def lost_peer(self) -> PeerLost | None:
        """None: the error a peer published is part of every error raised here."""
        return None

    def wait_for_readers(self) -> None:
        """The memory is the peers' as well: it needs nobody to stay."""

    def error_text_of(self, local: int) -> str:
        """The error that a rank of this host published; "" if it published none."""
        return self._errors.error_text_of(local)

    @property
    def timeout(self) -> timedelta:
        """The time limit of calls that are given none."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit that messages name; callers give theirs with each call."""
        self._timeout = timeout

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank, by the name of the rank."""
        return dict(zip(self.names, self._pids, strict=True))

    def abort(self) -> None:
        """End every wait in this group, on all ranks, with `GroupAborted`. May be called from any
        thread.
        """
        if self._handle is not None:
            self._core.plc_comm_abort(self._handle)

    def is_gone(self, local: int) -> bool:
        """Whether a rank of this host has ended, with all its threads, or has left the group."""
        return bool(self._core.plc_comm_is_gone(self.handle, local))

    @property
    def reads_directly(self) -> bool:
        """Whether the ranks may read each other's own memory."""
        return bool(self._core.plc_comm_reads_directly(self.handle))

    @property
    def is_open(self) -> bool:
        """Whether this process is still a member."""
        return self._handle is not None

    @property
    def handle(self) -> C.c_void_p:
        """The core's handle; raises once the group is gone."""
        if self._handle is None:
            raise GroupError(
                "this process group was destroyed, or belongs to the process this one was forked "
                "from; call init_process_group here to use one"
            )
        return self._handle

    # --- collectives ------------------------------------------------------------------------------
    def allreduce(
        self, address: int, count: int, dtype: int, op: int, timeout_ns: int = -1
    ) -> None:
        """Reduce `count` elements in place."""
        status = self._allreduce(self._handle or self.handle, address, count, dtype, op, timeout_ns)
        if status:
            raise self.error(status, Kind.ALLREDUCE, timeout_ns, (dtype, op))

    def run(self, request: Request) -> None:
        """Run one collective to its end."""
        status = self._run(self.handle, request)
        if status:
            raise self._request_error(status, request)

    def submit(self, request: Request) -> None:
        """Start one collective; it runs after those submitted before. Keep `request` alive until it
        finished.
        """
        status = self._core.plc_submit(self.handle, request)
        if status:
            raise self._request_error(status, request)

    def wait(self, request: Request, timeout_ns: int = -1) -> bool:
        """Wait for a submitted collective; False if `timeout_ns` passed first."""
        status = self._request_wait(self.handle, request, timeout_ns)
        if status == Status.PENDING:
            return False
        if status:
            raise self._request_error(status, request)
        return True

    # --- messages ---------------------------------------------------------------------------------
    def post(self, message: Message, *, is_send: bool) -> None:
        """Start to send or receive. Keep `message` alive until it finished."""
        status = (self._core.plc_send if is_send else self._core.plc_receive)(self.handle, message)
        if status:
            raise self._errors.of_message(status, message, is_send=is_send)

    def wait_message(self, message: Message, timeout_ns: int = -1) -> bool:
        """Wait for a message; False if `timeout_ns` passed first."""
        status = self._message_wait(self.handle, message, timeout_ns)
        if status == Status.PENDING:
            return False
        if status:
            raise self._errors.of_message(status, message, is_send=bool(message.is_send))
        return True

    def error(
        self,
        status: int,
        kind: int,
        timeout_ns: int = -1,
        reduction: tuple[int, int] | None = None,
    ) -> Exception:
        """The exception for a status of the core, about a call of this kind; `reduction` is its
        dtype and op, if it reduces.
        """
        return self._errors.of_call(status, kind, timeout_ns, reduction)

    def _request_error(self, status: int, request: Request) -> Exception:
        reduces = request.kind in (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
        if request.kind == Kind.REDUCE and not 0 <= request.root < self.size:
            reduces = False  # it is the root that is wrong
        reduction = (request.dtype, request.op) if reduces else None
        return self.error(status, request.kind, request.timeout_ns, reduction)


def _config(
    size: int, slot_bytes: int | None, timeout: timedelta, spin_ns: int | None
) -> abi.Config:
    oversubscribed = size > len(os.sched_getaffinity(0))
    many = size > _MANY_RANKS
    if spin_ns is None:
        spin_ns = _SPIN_NS_OVERSUBSCRIBED if oversubscribed else _SPIN_NS
    return abi.Config(
        slot_bytes=slot_bytes or (_SLOT_BYTES_MANY_RANKS if many else _SLOT_BYTES),
        ring_bytes=_RING_BYTES_MANY_RANKS if many else _RING_BYTES,
        timeout_ns=int(timeout.total_seconds() * 1e9),
        spin_ns=spin_ns,
    )


def _check(status: int, step: str) -> None:
    if status == Status.OK:
        return
    reason, cure = f"status {Status.NAMES[status]}", _SAME_VERSION
    if status == Status.SYSTEM:
        code = C.get_errno()
        reason = os.strerror(code)
        if code == errno.EPROTO:  # plc_comm_join: a segment of another layout
            reason = "it has a different layout than this rank expects"
        else:
            cure = ""
    raise NativeError(f"could not {step}: {reason}{cure}")


def _watch(pids: Sequence[int], mine: int, names: Sequence[int]) -> list[int]:
    """A descriptor per peer, to notice its end. A peer that has ended already is an error now."""
    descriptors: list[int] = []
    for index, pid in enumerate(pids):
        try:
            descriptors.append(-1 if index == mine else _pid_watch.acquire(pid))
        except ProcessLookupError as error:
            _unwatch(pids[:index], mine)
            raise PeerLost(
                f"rank {names[index]} (pid {pid}) exited while the group was being created; see "
                "its output",
                rank=names[index],
                pid=pid,
            ) from error
    return descriptors


def _unwatch(pids: Sequence[int], mine: int) -> None:
    for index, pid in enumerate(pids):
        if index != mine:
            _pid_watch.release(pid)
