"""`Communicator`: the ranks of one host, joined by shared memory.

Methods take addresses and counts; `paceline.backend` turns tensors into those. Every failure of the
core becomes one of the exceptions of `paceline.errors`, in words.
"""

from __future__ import annotations

import ctypes as C
import os
import select
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta

from paceline._linux import PidWatch, exit_code_of, is_running
from paceline.core import abi
from paceline.core.abi import ANY_SOURCE, ERROR_TEXT_BYTES, Kind, Message, Request, Status
from paceline.core.rendezvous import Store, exchange, shared_descriptor
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    GroupError,
    MismatchError,
    NativeError,
    PeerLost,
    describe_exit,
)
from paceline.failure_channel import (
    error_in_flight,
    peer_failed,
    register_channel,
    truncate,
    unregister_channel,
)

__all__ = ["DTYPE_NAMES", "OP_NAMES", "Communicator", "describe_call"]

DTYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *(
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "bool",
        "bytes",
    ),
)
OP_NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]

_SLOT_BYTES = 512 * 1024  # a ring of four blocks, which together stay in a second-level cache
_SLOT_BYTES_MANY_RANKS = 256 * 1024
_RING_BYTES = 64 * 1024
_RING_BYTES_MANY_RANKS = 16 * 1024
_MANY_RANKS = 16
_SPIN_NS = 100_000
_ENDING_MS = 300
_LONGEST_TEXT = (
    ERROR_TEXT_BYTES // 2
)  # so that the error that ends a rank fits beside that of a thread
_SPIN_NS_CROWDED = 2_000  # more ranks than cores: whoever spins keeps a peer from running

_pid_watch = PidWatch()
_seats: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _give_up_seats_after_fork() -> None:
    """A forked child is no rank: a call of its own would be counted as one of its parent's."""
    for comm in list(_seats):
        comm._handle = None


os.register_at_fork(after_in_child=_give_up_seats_after_fork)


class Communicator:
    """One rank's seat at the shared memory of its host.

    `names` says what to call each rank in messages: local ranks of a host have other numbers in the
    whole group.
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
        self.timeout = timeout
        quick = abi.library_holding_gil()
        quick.plc_comm_set_interpreter(handle, abi.interpreter())
        self._run, self._request_wait, self._message_wait = (
            quick.plc_run,
            quick.plc_request_wait,
            quick.plc_message_wait,
        )
        self._allreduce = quick.plc_allreduce
        self._say = quick.plc_comm_publish_error
        # Freed when no thread can be inside a method any more. Not at exit: the process's end tells
        # the peers more.
        weakref.finalize(self, self._core.plc_comm_free, handle).atexit = False
        _seats.add(self)
        register_channel(self)

    # --- life --------------------------------------------------------------------------------------
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
        """Meet the other ranks of this host through the store. `ranks` are their numbers,
        ascending; ours is `rank`.

        `pids`: their processes, if they are known already.
        """
        core = abi.library()
        size = len(ranks)
        if size > abi.MAX_RANKS:
            raise ConfigError(
                f"{size} ranks on one host; shared memory serves at most {abi.MAX_RANKS}"
            )
        if pids is None:
            told = exchange(store, "pids", rank, ranks, str(os.getpid()), timeout, pid_in=int)
            pids = {other: int(pid) for other, pid in told.items()}
        config = _config(size, slot_bytes, timeout, spin_ns)

        def prepare(descriptor: int, nonce: tuple[int, int]) -> None:
            _check(
                core.plc_segment_format(descriptor, size, config, (C.c_uint64 * 2)(*nonce)),
                "format the segment",
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
                descriptors = _watch(watched, local)
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
                _check(status, "join the segment")
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
        """Give up the seat. Peers that still wait for this rank are told, and told of the error
        that passes here.
        """
        if self._handle is not None and (passing := error_in_flight()):
            self.publish(passing, leaving=False)
        handle, self._handle = self._handle, None
        if handle is not None:
            unregister_channel(self)
            self._core.plc_comm_leave(handle)
            _unwatch(self._pids, self.rank)

    # --- last words --------------------------------------------------------------------------------
    def publish(self, text: str, *, leaving: bool) -> None:
        """Leave a text that peers can read whatever becomes of this process."""
        if self._handle is not None:
            data = truncate(text, _LONGEST_TEXT)
            self._say(self._handle, data, len(data), leaving)

    def lost_peer(self) -> PeerLost | None:
        """What a peer said is part of every error raised here."""
        return None

    def wait_for_readers(self) -> None:
        """The memory is the peers' as well: it needs nobody to stay."""

    def words_of(self, local: int) -> str:
        """What a rank of this host has said."""
        room = C.create_string_buffer(ERROR_TEXT_BYTES)
        length = self._core.plc_comm_error_text(self.handle, local, room, ERROR_TEXT_BYTES)
        return room.raw[:length].decode(errors="replace")

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

    @property
    def is_open(self) -> bool:
        """Whether the seat is still taken."""
        return self._handle is not None

    @property
    def handle(self) -> C.c_void_p:
        """The core's handle; raises once the group is gone."""
        if self._handle is None:
            raise GroupError(
                "this process group was destroyed, or belongs to the process this one was forked from; "
                "call init_process_group here to use one"
            )
        return self._handle

    # --- collectives -------------------------------------------------------------------------------
    def allreduce(
        self, address: int, count: int, dtype: int, op: int, timeout_ns: int = -1
    ) -> None:
        """Reduce `count` elements in place."""
        status = self._allreduce(self._handle or self.handle, address, count, dtype, op, timeout_ns)
        if status:
            raise self.error(status, Kind.ALLREDUCE)

    def run(self, request: Request) -> None:
        """Run one collective to its end."""
        status = self._run(self.handle, request)
        if status:
            raise self.error(status, request.kind)

    def submit(self, request: Request) -> None:
        """Start one collective; it runs after those submitted before. Keep `request` alive until it
        finished.
        """
        status = self._core.plc_submit(self.handle, request)
        if status:
            raise self.error(status, request.kind)

    def wait(self, request: Request, timeout_ns: int = -1) -> bool:
        """Wait for a submitted collective; False if `timeout_ns` passed first."""
        status = self._request_wait(self.handle, request, timeout_ns)
        if status == Status.PENDING:
            return False
        if status:
            raise self.error(status, request.kind)
        return True

    # --- messages ----------------------------------------------------------------------------------
    def post(self, message: Message, *, is_send: bool) -> None:
        """Start to send or receive. Keep `message` alive until it finished."""
        status = (self._core.plc_send if is_send else self._core.plc_receive)(self.handle, message)
        if status:
            raise self._message_error(status, message, is_send)

    def wait_message(self, message: Message, timeout_ns: int = -1) -> bool:
        """Wait for a message; False if `timeout_ns` passed first."""
        status = self._message_wait(self.handle, message, timeout_ns)
        if status == Status.PENDING:
            return False
        if status:
            raise self._message_error(status, message, bool(message.is_send))
        return True

    # --- errors ------------------------------------------------------------------------------------
    def calls(self) -> list[abi.CallRecord]:
        """What each rank said about the last compared call."""
        records = (abi.CallRecord * self.size)()
        self._core.plc_comm_calls(self.handle, records)
        return list(records)

    def error(self, status: int, kind: int) -> Exception:
        """The exception for a status of the core, about a call of this kind."""
        if status == Status.MISMATCH:
            return self._mismatch()
        if status == Status.INVALID:
            return ConfigError(
                f"rank {self._me}: {Kind.NAMES[kind]} cannot be done on this data type with this operation"
            )
        if status == Status.NESTED:
            return ConfigError(
                f"rank {self._me}: {Kind.NAMES[kind]} was called by a signal handler in the middle of another call of "
                "the same group; set a flag in the handler and make the call after that one"
            )
        if status == Status.SYSTEM:
            number = C.get_errno()
            return NativeError(
                f"rank {self._me}: {Kind.NAMES[kind]}: the system refused: {os.strerror(number)}"
            )
        failure = self._failure()
        where = f"in {Kind.NAMES[kind]} (call {failure.sequence})"
        return self._group_error(status, failure, where)

    def _failure(self) -> abi.Failure:
        failure = abi.Failure()
        self._core.plc_comm_failure(self.handle, C.byref(failure))
        return failure

    @property
    def _me(self) -> int:
        return self.names[self.rank]

    def _group_error(self, status: int, failure: abi.Failure, where: str) -> Exception:
        if status == Status.TIMEOUT:
            missing = [failure.missing[i] for i in range(failure.missing_count)]
            whose = self.names[failure.rank]
            told = "" if whose == self._me else f"rank {self._me} stopped {where}: "
            return CollectiveTimeout(
                f"{told}rank {whose} reached the timeout of {self.timeout.total_seconds():g} s "
                f"{where if whose == self._me else 'in the same call'}, waiting for "
                + "; ".join(f"rank {self.names[r]} ({self._condition(r)})" for r in missing)
                + ". Give the late rank more time (`timeout=` of init_process_group) or see where it is stuck: "
                "all ranks must make the same calls in the same order",
                missing=[self.names[r] for r in missing],
            )
        if status == Status.PEER_LOST:
            return self._peer_lost(failure.rank, where)
        if status == Status.PEER_LEFT:
            return self._peer_left(failure.rank, where)
        by = f"rank {self.names[failure.rank]}" if 0 <= failure.rank < self.size else "a peer"
        return GroupAborted(
            f"rank {self._me} stopped {where}: {by} aborted the group or gave up waiting; see its error. "
            "The group cannot be used again: destroy it and init anew"
        )

    def _peer_left(self, local: int, where: str) -> PeerLost:
        pid, name = self._pids[local], self.names[local]
        words = self.words_of(local)
        if words:
            return peer_failed(name, pid, words, f"while rank {self._me} waited for it {where}")
        return PeerLost(
            f"rank {name} (pid {pid}) left the group while rank {self._me} waited for it {where}: it called "
            f"destroy_process_group, or ended, one call earlier than rank {self._me}",
            rank=name,
            pid=pid,
        )

    def _peer_lost(self, local: int, where: str) -> PeerLost:
        pid, name = self._pids[local], self.names[local]
        code = _exit_code_when_ended(pid)
        words = self.words_of(local)
        why = (
            f"Its last words:\n{words.rstrip()}\nThis"
            if words
            else "Its own output tells why; this"
        )
        return PeerLost(
            f"rank {name} (pid {pid}) was lost while rank {self._me} waited for it {where}: it {describe_exit(code)}. "
            f"{why} group cannot be used again",
            rank=name,
            pid=pid,
            exitcode=code,
            traceback=words,
        )

    def _condition(self, local: int) -> str:
        pid = self._pids[local]
        if self._core.plc_comm_peer_left(self.handle, local):
            return f"pid {pid}, left the group"
        words = self.words_of(local).strip()
        return f"pid {pid}, {'alive' if is_running(pid) else 'not running'}" + (
            f"; it said: {words}" if words else ""
        )

    def _mismatch(self) -> MismatchError:
        calls = self.calls()
        values = {self.names[r]: describe_call(call) for r, call in enumerate(calls)}
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in values.items())
        if calls[0].kind == Kind.BUCKET:
            found, cure = "defined a bucket differently", "All ranks must define the same buckets"
        else:
            found, cure = (
                "made different calls",
                "All ranks of a group must make the same calls in the same order",
            )
            cure += " with matching sizes"
        return MismatchError(f"the ranks {found}, nothing was exchanged:\n{lines}\n{cure}", values)

    def _message_error(self, status: int, message: Message, is_send: bool) -> Exception:
        peer = "any rank" if message.peer == ANY_SOURCE else f"rank {self.names[message.peer]}"
        what = f"{'send to' if is_send else 'recv from'} {peer} (tag {message.tag})"
        if status == Status.SIZE:
            return self._size_mismatch(message, what, is_send)
        if status == Status.INVALID:
            return ConfigError(
                f"rank {self._me}: {what}: there is no such peer in a group of {self.size}"
            )
        if status == Status.TIMEOUT and self._failure().status != status:
            return self._message_timeout(message, what)
        if status in (Status.PEER_LOST, Status.PEER_LEFT):
            return self._message_lost(status, message, what)
        if status == Status.SYSTEM:
            return self.error(status, Kind.BARRIER)
        return self._group_error(status, self._failure(), f"in {what}")

    def _size_mismatch(self, message: Message, what: str, is_send: bool) -> MismatchError:
        here, there = ("sent", "expected") if is_send else ("expected", "sent")
        return MismatchError(
            f"rank {self._me}: {what}: {here} {message.bytes} bytes, rank {self.names[message.source]} {there} "
            f"{message.found_bytes}; give tensors of the same size and type on both sides"
        )

    def _message_timeout(self, message: Message, what: str) -> CollectiveTimeout:
        known = message.peer != ANY_SOURCE
        state = f" ({self._condition(message.peer)})" if known else ""
        return CollectiveTimeout(
            f"rank {self._me}: {what}{state} did not finish in {self.timeout.total_seconds():g} s",
            missing=[self.names[message.peer]] if known else [],
        )

    def _message_lost(self, status: int, message: Message, what: str) -> Exception:
        failure = self._failure()
        if (
            failure.status == status
        ):  # the whole group failed, perhaps for another peer than this message's
            return self._group_error(status, failure, f"in {what}")
        if message.peer == ANY_SOURCE:
            return PeerLost(
                f"rank {self._me}: {what}: every other rank has ended or left the group"
            )
        return self._group_error(
            status, abi.Failure(status=status, rank=message.peer), f"in {what}"
        )


def describe_call(call: abi.CallRecord) -> str:
    """One rank's call in a line: "all_reduce of 10 float32, SUM (call 3)"."""
    name = Kind.NAMES[call.kind]
    if call.kind == Kind.BUCKET:
        what = f"{call.count} {DTYPE_NAMES[call.dtype]} at byte {call.label}, {OP_NAMES[call.op]}"
        return f"{name} {call.sequence}: {what}"
    text = (
        name if call.kind == Kind.BARRIER else f"{name} of {call.count} {DTYPE_NAMES[call.dtype]}"
    )
    if DTYPE_NAMES[call.dtype] == "bytes" and call.label:
        text += f" ({call.label.to_bytes(8, 'little').lstrip(bytes(1)).decode(errors='replace')})"
    if call.kind in (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        text += f", {OP_NAMES[call.op]}"
    if call.kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER):
        text += f", root {call.root}"
    return f"{text} (call {call.sequence})"


def _config(
    size: int, slot_bytes: int | None, timeout: timedelta, spin_ns: int | None
) -> abi.Config:
    crowded = size > len(os.sched_getaffinity(0))
    many = size > _MANY_RANKS
    return abi.Config(
        slot_bytes=slot_bytes or (_SLOT_BYTES_MANY_RANKS if many else _SLOT_BYTES),
        ring_bytes=_RING_BYTES_MANY_RANKS if many else _RING_BYTES,
        timeout_ns=int(timeout.total_seconds() * 1e9),
        spin_ns=spin_ns if spin_ns is not None else _SPIN_NS_CROWDED if crowded else _SPIN_NS,
    )


def _check(status: int, step: str) -> None:
    if status == Status.SYSTEM:
        raise NativeError(f"could not {step}: {os.strerror(C.get_errno())}")
    if status != Status.OK:
        raise NativeError(f"could not {step}: status {status}")


def _watch(pids: Sequence[int], mine: int) -> list[int]:
    """A descriptor per peer, to notice its end. A peer that has ended already is an error now."""
    descriptors: list[int] = []
    for index, pid in enumerate(pids):
        try:
            descriptors.append(-1 if index == mine else _pid_watch.acquire(pid))
        except ProcessLookupError as error:
            _unwatch(pids[:index], mine)
            raise PeerLost(
                f"process {pid}, a rank of this group, ended before the group was ready", pid=pid
            ) from error
    return descriptors


def _unwatch(pids: Sequence[int], mine: int) -> None:
    for index, pid in enumerate(pids):
        if index != mine:
            _pid_watch.release(pid)


def _exit_code_when_ended(pid: int) -> int | None:
    """For a process that was found dead: its memory goes before its exit code can be asked for."""
    descriptor = _pid_watch.peek(pid)
    if descriptor >= 0:
        ending = select.poll()
        ending.register(descriptor, select.POLLIN)
        ending.poll(_ENDING_MS)
    return exit_code_of(pid, descriptor)
