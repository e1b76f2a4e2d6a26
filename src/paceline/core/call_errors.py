"""Turns a status of the core into the exception that a caller sees.

A status is a number; what a user needs is in the segment: who is missing, which call every rank
made, how a peer ended and the error it published. `CallErrors` reads these for one communicator and
puts them into one message: what happened, on which rank, expected against found, what to do.
"""

from __future__ import annotations

import ctypes as C
import os
import select
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from paceline._linux import PidWatch, exit_code_of, is_running
from paceline.core import abi
from paceline.core.abi import ANY_SOURCE, ERROR_TEXT_BYTES, CallRecord, Kind, Message, Status
from paceline.core.dtypes import BYTES, DTYPE_NAMES, OP_NAMES
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    MismatchError,
    NativeError,
    PeerLost,
    describe_exit,
)
from paceline.failure_channel import peer_failed

__all__ = ["CallErrors", "calls_mismatch", "describe_call"]

_EXIT_WAIT_MS = 300
_START_AGAIN = "call destroy_process_group(), then init_process_group() again"


class _Membership(Protocol):
    """What is read of a communicator."""

    rank: int
    names: list[int]

    @property
    def timeout(self) -> timedelta: ...
    @property
    def handle(self) -> C.c_void_p: ...
    def bucket_name(self, arena: int, index: int) -> str: ...


class CallErrors:
    """Exceptions about the calls of one communicator. `pids` are its ranks' processes, in order."""

    def __init__(self, comm: _Membership, pids: Sequence[int], pid_watch: PidWatch) -> None:
        self._core = abi.library()
        self._comm = comm
        self._pids = pids
        self._pid_watch = pid_watch

    # --- collectives ------------------------------------------------------------------------------
    def of_call(
        self,
        status: int,
        kind: int,
        timeout_ns: int = -1,
        reduction: tuple[int, int] | None = None,
    ) -> Exception:
        """The exception for a status of a collective of this kind, called with this time limit.

        `reduction`: the call's dtype and op, if it reduces.
        """
        call = Kind.NAMES[kind]
        if status == Status.MISMATCH:
            return self._mismatch()
        if status == Status.DIVERGED:
            return self._divergence()
        if status == Status.INVALID:
            return self._unsupported(call, reduction)
        if status == Status.NESTED:
            return ConfigError(
                f"rank {self._me}: {call} was called by a signal handler in the middle of another "
                "call of the same group; set a flag in the handler and make the call after that one"
            )
        if status in (Status.SYSTEM, Status.WIRE):
            reason = f"a system call failed: {os.strerror(C.get_errno())}"
            if status == Status.WIRE:
                reason = "a message to or from another host failed"
            return NativeError(f"rank {self._me}: {call}: {reason}")
        failure = self._failure()
        where = f"in {call} (call {failure.sequence})"
        return self._group_error(status, failure, where, timeout_ns)

    def error_text_of(self, local: int) -> str:
        """The error that a rank of this host published; "" if it published none."""
        buffer = C.create_string_buffer(ERROR_TEXT_BYTES)
        length = self._core.plc_comm_error_text(self._comm.handle, local, buffer, ERROR_TEXT_BYTES)
        return buffer.raw[:length].decode(errors="replace")

    @property
    def _me(self) -> int:
        return self._comm.names[self._comm.rank]

    def _name(self, local: int) -> int:
        return self._comm.names[local]

    def _failure(self) -> abi.Failure:
        failure = abi.Failure()
        self._core.plc_comm_failure(self._comm.handle, C.byref(failure))
        return failure

    def _unsupported(self, call: str, reduction: tuple[int, int] | None) -> ConfigError:
        if reduction is None:
            return ConfigError(f"rank {self._me}: {call} does not support these arguments")
        dtype, op = reduction
        return ConfigError(
            f"rank {self._me}: {call} does not support {OP_NAMES[op]} of {DTYPE_NAMES[dtype]}; "
            "use another operation or cast the tensor first"
        )

    def _calls(self) -> dict[int, CallRecord]:
        """What every rank was doing in the last mismatch."""
        records = (CallRecord * len(self._pids))()
        self._core.plc_comm_calls(self._comm.handle, records)
        return {self._name(r): call for r, call in enumerate(records)}

    def _mismatch(self) -> MismatchError:
        return calls_mismatch(self._calls())

    def _divergence(self) -> MismatchError:
        values = {rank: self._describe_wait(call) for rank, call in self._calls().items()}
        lines = "\n".join(f"  rank {rank}: {value}" for rank, value in values.items())
        return MismatchError(
            f"the ranks wait for each other in different calls (this is rank {self._me}):\n"
            f"{lines}\n"
            "All ranks must make the same calls in the same order: the same collectives, and "
            "forward and backward of the same models between them. This group can no longer be "
            f"used; {_START_AGAIN}",
            values,
        )

    def _describe_wait(self, call: CallRecord) -> str:
        if call.kind == Kind.ELSEWHERE:
            return "no call of this group"
        if call.kind == Kind.BUCKET:
            return self._comm.bucket_name(call.label, call.sequence)
        return describe_call(call)

    def _group_error(
        self, status: int, failure: abi.Failure, where: str, timeout_ns: int = -1
    ) -> Exception:
        if status == Status.DIVERGED:
            return self._divergence()
        if status == Status.TIMEOUT:
            return self._timeout(failure, where, self._limit_s(timeout_ns))
        if status == Status.PEER_LOST:
            return self._peer_lost(failure.rank, where)
        if status == Status.PEER_LEFT:
            return self._peer_left(failure.rank, where)
        known = 0 <= failure.rank < len(self._pids)
        peer = f"rank {self._name(failure.rank)}" if known else "a peer"
        return GroupAborted(
            f"rank {self._me} stopped {where}: {peer} aborted the group or timed out; see "
            f"{peer if known else 'that peer'}'s error. This group can no longer be used; "
            f"{_START_AGAIN}"
        )

    def _limit_s(self, timeout_ns: int) -> float:
        return timeout_ns / 1e9 if timeout_ns >= 0 else self._comm.timeout.total_seconds()

    def _timeout(self, failure: abi.Failure, where: str, limit_s: float) -> CollectiveTimeout:
        missing = [failure.missing[i] for i in range(failure.missing_count)]
        timed_out_rank = self._name(failure.rank)
        ours = timed_out_rank == self._me
        stopped = "" if ours else f"rank {self._me} stopped {where}: "
        return CollectiveTimeout(
            f"{stopped}rank {timed_out_rank} reached the timeout of {limit_s:g} s "
            f"{where if ours else 'in the same call'}, waiting for "
            + "; ".join(f"rank {self._name(r)} ({self._condition(r)})" for r in missing)
            + ". Give the late rank more time (`timeout=` of init_process_group) or see where it "
            "is stuck: all ranks must make the same calls in the same order",
            missing=[self._name(r) for r in missing],
        )

    def _peer_left(self, local: int, where: str) -> PeerLost:
        pid, name = self._pids[local], self._name(local)
        if error_text := self.error_text_of(local):
            return peer_failed(
                name, pid, error_text, f"while rank {self._me} waited for it {where}"
            )
        return PeerLost(
            f"rank {name} (pid {pid}) left the group while rank {self._me} waited for it {where}: "
            f"it called destroy_process_group, or ended, one call earlier than rank {self._me}",
            rank=name,
            pid=pid,
        )

    def _peer_lost(self, local: int, where: str) -> PeerLost:
        pid, name = self._pids[local], self._name(local)
        code = self._exit_code_when_ended(pid)
        error_text = self.error_text_of(local)
        cause = "See that rank's output for the cause. "
        if error_text:
            cause = f"The error that it published:\n{error_text.rstrip()}\n"
        return PeerLost(
            f"rank {name} (pid {pid}) was lost ({describe_exit(code)}) while rank {self._me} "
            f"waited for it {where}. {cause}This group can no longer be used; {_START_AGAIN}",
            rank=name,
            pid=pid,
            exitcode=code,
            traceback=error_text,
        )

    def _exit_code_when_ended(self, pid: int) -> int | None:
        """For a process found dead: its memory goes before its exit code can be asked for."""
        descriptor = self._pid_watch.peek(pid)
        if descriptor >= 0:
            ending = select.poll()
            ending.register(descriptor, select.POLLIN)
            ending.poll(_EXIT_WAIT_MS)
        return exit_code_of(pid, descriptor)

    def _condition(self, local: int) -> str:
        pid = self._pids[local]
        if self._core.plc_comm_peer_left(self._comm.handle, local):
            return f"pid {pid}, left the group"
        error_text = self.error_text_of(local).strip()
        state = f"pid {pid}, {'alive' if is_running(pid) else 'not running'}"
        return f"{state}; its error: {error_text}" if error_text else state

    # --- messages ---------------------------------------------------------------------------------
    def of_message(self, status: int, message: Message, *, is_send: bool) -> Exception:
        """The exception for a status of a message."""
        peer = "any rank" if message.peer == ANY_SOURCE else f"rank {self._name(message.peer)}"
        what = f"{'send to' if is_send else 'recv from'} {peer} (tag {message.tag})"
        if status == Status.SIZE:
            return self._size_mismatch(message, what, is_send)
        if status == Status.INVALID:
            return ConfigError(
                f"rank {self._me}: {what}: there is no such peer in a group of {len(self._pids)}"
            )
        if status == Status.TIMEOUT and self._failure().status != status:
            return self._message_timeout(message, what)
        if status in (Status.PEER_LOST, Status.PEER_LEFT):
            return self._message_lost(status, message, what)
        if status == Status.SYSTEM:
            return self.of_call(status, Kind.BARRIER)
        return self._group_error(status, self._failure(), f"in {what}")

    def _size_mismatch(self, message: Message, what: str, is_send: bool) -> MismatchError:
        here, there = ("sent", "expected") if is_send else ("expected", "sent")
        return MismatchError(
            f"rank {self._me}: {what}: {here} {message.bytes} bytes, rank "
            f"{self._name(message.source)} {there} {message.found_bytes}; give tensors of the same "
            "size and type on both sides"
        )

    def _message_timeout(self, message: Message, what: str) -> CollectiveTimeout:
        known = message.peer != ANY_SOURCE
        state = f" ({self._condition(message.peer)})" if known else ""
        return CollectiveTimeout(
            f"rank {self._me}: {what}{state} did not finish in "
            f"{self._limit_s(message.timeout_ns):g} s. Check that the peer makes the matching call "
            "with the same tag, or pass a longer timeout",
            missing=[self._name(message.peer)] if known else [],
        )

    def _message_lost(self, status: int, message: Message, what: str) -> Exception:
        failure = self._failure()
        if failure.status == status:
            # The whole group failed, perhaps for another peer than this message's.
            return self._group_error(status, failure, f"in {what}")
        if message.peer == ANY_SOURCE:
            return PeerLost(
                f"rank {self._me}: {what}: every other rank has ended or left the group"
            )
        lost = abi.Failure(status=status, rank=message.peer)
        return self._group_error(status, lost, f"in {what}")


def describe_call(call: CallRecord) -> str:
    """One rank's call in a line: "all_reduce of 10 float32, SUM (call 3)"."""
    name, dtype = Kind.NAMES[call.kind], DTYPE_NAMES[call.dtype]
    if call.kind == Kind.BUCKET:
        definition = f"{call.count} {dtype} at byte {call.label}, {OP_NAMES[call.op]}"
        return f"{name} {call.sequence}: {definition}"
    text = name if call.kind == Kind.BARRIER else f"{name} of {call.count} {dtype}"
    if call.dtype == BYTES and call.label:
        text += f" ({call.label.to_bytes(8, 'little').lstrip(bytes(1)).decode(errors='replace')})"
    if call.kind in (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
        text += f", {OP_NAMES[call.op]}"
    if call.kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER):
        text += f", root {call.root}"
    return f"{text} (call {call.sequence})"


def calls_mismatch(
    calls: dict[int, CallRecord], describe: Callable[[CallRecord], str] = describe_call
) -> MismatchError:
    """The exception for calls, or definitions of a bucket, that differ; by rank."""
    values = {rank: describe(call) for rank, call in sorted(calls.items())}
    lines = "\n".join(f"  rank {rank}: {value}" for rank, value in values.items())
    problem = "made different calls"
    cure = "All ranks of a group must make the same calls in the same order with matching sizes"
    if any(call.kind == Kind.BUCKET for call in calls.values()):
        problem, cure = "defined a bucket differently", "All ranks must define the same buckets"
    return MismatchError(f"the ranks {problem}, nothing was exchanged:\n{lines}\n{cure}", values)
