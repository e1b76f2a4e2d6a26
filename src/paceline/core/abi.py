"""Loads the native core and mirrors its C ABI, `csrc/include/paceline_core.h`."""

from __future__ import annotations

import ctypes as C
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import NativeError

__all__ = [
    "ABI_VERSION",
    "ANY_SOURCE",
    "CallRecord",
    "Config",
    "Failure",
    "HostsReduction",
    "Interpreter",
    "JournalState",
    "Kind",
    "MAX_RANKS",
    "Message",
    "NativeStatus",
    "Request",
    "Status",
    "TreeAverage",
    "TreeSum",
    "Update",
    "Wire",
    "ERROR_TEXT_BYTES",
    "interpreter",
    "library",
    "native_status",
    "library_holding_gil",
]

ABI_VERSION = 12
ANY_SOURCE = -1
ERROR_TEXT_BYTES = 16 * 1024
MAX_RANKS = 1024
_HERE = pathlib.Path(__file__).parent
_LIBRARY = _HERE / "libpaceline_core.so"


class Status:
    """`plc_status`."""

    OK, MISMATCH, TIMEOUT, PEER_LOST, PEER_LEFT, ABORTED, INVALID = range(7)
    SYSTEM, PENDING, SIZE, NESTED, DIVERGED, WIRE = range(7, 13)
    NAMES = (
        *("OK", "MISMATCH", "TIMEOUT", "PEER_LOST", "PEER_LEFT", "ABORTED", "INVALID", "SYSTEM"),
        *("PENDING", "SIZE", "NESTED", "DIVERGED", "WIRE"),
    )


class Kind:
    """`plc_kind`, and the names torch.distributed gives the same calls."""

    (
        BARRIER,
        ALLREDUCE,
        REDUCE,
        BROADCAST,
        ALLGATHER,
        GATHER,
        SCATTER,
        REDUCE_SCATTER,
        ALLTOALL,
        HOSTS_BEGIN,
        HOSTS_FINISH,
        HOSTS_ABANDON,
        BUCKET,
        ELSEWHERE,
    ) = range(14)
    NAMES = (
        "barrier",
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "reduction over hosts",
        "reduction over hosts",
        "reduction over hosts",
        "bucket",
        "no call",
    )


class CallRecord(C.Structure):
    """`plc_call`: the header of one rank's call."""

    _fields_ = [
        ("sequence", C.c_uint64),
        ("kind", C.c_uint32),
        ("dtype", C.c_uint32),
        ("op", C.c_uint32),
        ("root", C.c_int32),
        ("count", C.c_uint64),
        ("label", C.c_uint64),
    ]


class Request(C.Structure):
    """`plc_request`: one collective."""

    _fields_ = [
        ("kind", C.c_uint32),
        ("dtype", C.c_uint32),
        ("op", C.c_uint32),
        ("root", C.c_int32),
        ("label", C.c_uint64),
        ("count", C.c_uint64),
        ("input", C.c_void_p),
        ("output", C.c_void_p),
        ("inputs", C.POINTER(C.c_void_p)),
        ("outputs", C.POINTER(C.c_void_p)),
        ("in_counts", C.POINTER(C.c_uint64)),
        ("out_counts", C.POINTER(C.c_uint64)),
        ("factor", C.c_double),
        ("timeout_ns", C.c_int64),
        ("status", C.c_uint32),
        ("finished", C.c_uint32),
        ("next", C.c_void_p),
    ]


class Wire(C.Structure):
    """`plc_wire`: how a rank reaches those of its lane."""

    TAKE = C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(C.c_void_p))
    SEND = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_int32, C.c_uint64)
    RECEIVE = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint32, C.POINTER(C.c_void_p))
    RELEASE = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint32)

    _fields_ = [
        ("context", C.c_void_p),
        ("take", TAKE),
        ("send", SEND),
        ("receive", RECEIVE),
        ("release", RELEASE),
    ]


class HostsReduction(C.Structure):
    """`plc_hosts_reduction`: a reduction over several hosts, on one rank."""

    MAX_DEPTH = 4

    _fields_ = [
        ("wire", Wire),
        ("host", C.c_uint32),
        ("hosts", C.c_uint32),
        ("lanes", C.c_uint32),
        ("depth", C.c_uint32),
        ("in_pieces", C.c_uint32),
        ("dtype", C.c_uint32),
        ("op", C.c_uint32),
        ("op_between", C.c_uint32),
        ("rounds", C.c_uint32),
        ("factor", C.c_double),
        ("divisor", C.c_uint64),
        ("sends", C.c_uint32),
        ("receives", C.c_uint32),
        ("reads", C.c_uint32),
        ("data", C.c_void_p),
        ("blocks", C.c_uint64),
        ("slice_starts", C.POINTER(C.c_uint64)),
        ("slice_counts", C.POINTER(C.c_uint64)),
        ("piece_starts", C.POINTER(C.c_uint64)),
        ("piece_counts", C.POINTER(C.c_uint64)),
        ("scratch", C.c_void_p),
        ("row_bytes", C.c_uint64),
        ("slot", C.c_uint32),
        ("part_bytes", C.c_uint64),
        ("staged", C.c_uint64),
        ("summed", C.c_uint64),
        ("combined", C.c_uint64),
        ("fetched", C.c_uint64),
        ("sent", C.c_void_p * (MAX_DEPTH + 1)),
    ]


class Message(C.Structure):
    """`plc_message`: one message between two ranks."""

    _fields_ = [
        ("peer", C.c_int32),
        ("tag", C.c_int32),
        ("buffer", C.c_void_p),
        ("bytes", C.c_uint64),
        ("timeout_ns", C.c_int64),
        ("source", C.c_int32),
        ("is_send", C.c_uint32),
        ("found_bytes", C.c_uint64),
        ("moved", C.c_uint64),
        ("deadline_ns", C.c_int64),
        ("status", C.c_uint32),
        ("finished", C.c_uint32),
        ("next", C.c_void_p),
    ]


class Update(C.Structure):
    """`plc_update`: one step of an optimizer over many arrays."""

    _fields_ = [
        ("rule", C.c_uint32),
        ("options", C.c_uint32),
        ("lr", C.c_double),
        ("weight_decay", C.c_double),
        ("eps", C.c_double),
        ("momentum", C.c_double),
        ("dampening", C.c_double),
        ("beta1", C.c_double),
        ("beta2", C.c_double),
        ("lr_decay", C.c_double),
        ("grad_scale", C.c_double),
        ("clip", C.c_double),
        ("part", C.c_uint32),
        ("parts", C.c_uint32),
        ("threads", C.c_uint32),
        ("arrays", C.c_uint32),
        ("addresses", C.c_void_p),
        ("counts", C.c_void_p),
        ("kinds", C.c_void_p),
        ("ranks", C.c_uint32),
        ("distances", C.c_void_p),
        ("weights", C.c_void_p),
        ("comm", C.c_void_p),
        ("members", C.c_void_p),
        ("private_addresses", C.c_void_p),
        ("private_stride", C.c_uint64),
        ("tree", C.c_void_p),
        ("journal", C.c_void_p),
    ]


class TreeSum(C.Structure):
    """`plc_tree_sum`: gradients of which ranks hold the nodes of a tree."""

    _fields_ = [
        ("nodes", C.c_uint32),
        ("owners", C.c_void_p),
        ("adds", C.c_void_p),
        ("divisor", C.c_uint64),
        ("addresses", C.c_void_p),
        ("stride", C.c_uint64),
    ]


class JournalState(C.Structure):
    """`plc_journal_state`: how far a rank is in a step."""

    _fields_ = [
        ("step", C.c_uint64),
        ("begun", C.c_uint64),
        ("made", C.c_uint64),
        ("ended", C.c_uint64),
        ("lines", C.c_uint64 * 2 * 16),  # PLC_JOURNAL_SLOTS
    ]


class TreeAverage(C.Structure):
    """`plc_tree_average`: nodes of a tree that ranks hold, and where this rank's are."""

    _fields_ = [
        ("nodes", C.c_uint32),
        ("owners", C.c_void_p),
        ("adds", C.c_void_p),
        ("arrays", C.c_uint32),
        ("dtype", C.c_uint32),
        ("ends", C.c_void_p),
        ("inputs", C.c_void_p),
        ("outputs", C.c_void_p),
        ("divisor", C.c_uint64),
    ]


class Config(C.Structure):
    """`plc_config`."""

    _fields_ = [
        ("slot_bytes", C.c_uint64),
        ("ring_bytes", C.c_uint64),
        ("timeout_ns", C.c_int64),
        ("spin_ns", C.c_int64),
    ]


class Interpreter(C.Structure):
    """`plc_interpreter`."""

    _fields_ = [
        ("release_gil", C.c_void_p),
        ("acquire_gil", C.c_void_p),
        ("check_signals", C.c_void_p),
    ]


class Failure(C.Structure):
    """`plc_failure`."""

    _fields_ = [
        ("status", C.c_uint32),
        ("rank", C.c_int32),
        ("sequence", C.c_uint64),
        ("missing_count", C.c_uint32),
        ("missing", C.c_uint32 * MAX_RANKS),
    ]


@dataclasses.dataclass(frozen=True)
class NativeStatus:
    """Whether the native core can be used here, and if not, why and what to do."""

    available: bool
    reason: str = ""
    instruction_set: str = ""
    path: str = str(_LIBRARY)
    build_command: str = ""


_Library = TypeVar("_Library", C.CDLL, C.PyDLL)

_U32, _U64, _I32, _I64, _PTR, _DOUBLE = (
    C.c_uint32,
    C.c_uint64,
    C.c_int,
    C.c_int64,
    C.c_void_p,
    C.c_double,
)
_POINTERS = C.POINTER(C.c_void_p)
_NONCE = C.c_uint64 * 2

# name -> (result, arguments), as in the header.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "plc_abi_version": (_I32, []),
    "plc_instruction_set": (C.c_char_p, []),
    "plc_element_bytes": (_U64, [_U32]),
    "plc_reduce_local": (_I32, [_PTR, _POINTERS, _U32, _U64, _U32, _U32, _DOUBLE]),
    "plc_reduce_with": (_I32, [C.c_char_p, _PTR, _POINTERS, _U32, _U64, _U32, _U32, _DOUBLE]),
    "plc_scale_local": (_I32, [_PTR, _U64, _U32, _U64]),
    "plc_round_to_bf16": (None, [_PTR, _PTR, _U64]),
    "plc_sum_of_bf16": (_I32, [_PTR, _POINTERS, _U32, _U64]),
    "plc_digest": (_U64, [_PTR, _U64, _U64]),
    "plc_segment_bytes": (_U64, [_U32, C.POINTER(Config)]),
    "plc_segment_format": (_I32, [_I32, _U32, C.POINTER(Config), _NONCE]),
    "plc_comm_join": (
        _I32,
        [
            _I32,
            _PTR,
            _U32,
            _U32,
            _NONCE,
            C.POINTER(Config),
            C.POINTER(C.c_int),
            C.POINTER(C.c_void_p),
        ],
    ),
    "plc_comm_probe_direct_reads": (_I32, [_PTR, _I32]),
    "plc_comm_reads_directly": (_I32, [_PTR]),
    "plc_comm_leave": (None, [_PTR]),
    "plc_comm_free": (None, [_PTR]),
    "plc_comm_abort": (_I32, [_PTR]),
    "plc_comm_is_gone": (_I32, [_PTR, _U32]),
    "plc_comm_failure": (None, [_PTR, C.POINTER(Failure)]),
    "plc_comm_calls": (None, [_PTR, C.POINTER(CallRecord)]),
    "plc_comm_sequence": (_U64, [_PTR]),
    "plc_comm_peer_pid": (_I32, [_PTR, _U32]),
    "plc_comm_peer_left": (_I32, [_PTR, _U32]),
    "plc_comm_publish_error": (_I32, [_PTR, C.c_char_p, _U64, _I32]),
    "plc_comm_error_text": (_U64, [_PTR, _U32, C.c_char_p, _U64]),
    "plc_comm_set_interpreter": (None, [_PTR, C.POINTER(Interpreter)]),
    "plc_run": (_I32, [_PTR, C.POINTER(Request)]),
    "plc_submit": (_I32, [_PTR, C.POINTER(Request)]),
    "plc_request_wait": (_I32, [_PTR, C.POINTER(Request), _I64]),
    "plc_allreduce": (_I32, [_PTR, _PTR, _U64, _U32, _U32, _I64]),
    "plc_send": (_I32, [_PTR, C.POINTER(Message)]),
    "plc_receive": (_I32, [_PTR, C.POINTER(Message)]),
    "plc_message_wait": (_I32, [_PTR, C.POINTER(Message), _I64]),
    "plc_arena_bytes": (_U64, [_U32, _U64, _U32]),
    "plc_arena_open": (_I32, [_PTR, _I32, _PTR, _U64, _U32, C.POINTER(C.c_void_p)]),
    "plc_arena_close": (None, [_PTR]),
    "plc_arena_region": (_PTR, [_PTR, _U32]),
    "plc_bucket_define": (_I32, [_PTR, _U32, _U64, _U64, _U32, _U32]),
    "plc_bucket_define_external": (_I32, [_PTR, _U32, _U64, _U64, _U64, _U32, _U32]),
    "plc_bucket_reduce_external": (_I32, [_PTR, _U32, _PTR, _I64]),
    "plc_arena_average_tree": (_I32, [_PTR, _U32, C.POINTER(TreeAverage), _I64]),
    "plc_bucket_ready": (_I32, [_PTR, _U32]),
    "plc_bucket_finish": (_I32, [_PTR, _U32, _I64]),
    "plc_copy_pieces": (None, [_U32, _PTR, _PTR, _PTR]),
    "plc_compare_pieces": (_U32, [_U32, _PTR, _PTR, _PTR, _PTR]),
    "plc_add_pieces": (_I32, [_U32, _PTR, _U32, _PTR, _PTR, _PTR]),
    "plc_update_arrays": (_I32, [C.POINTER(Update)]),
    "plc_update_with": (_I32, [C.c_char_p, C.POINTER(Update)]),
    "plc_norm_blocks": (_U64, [C.POINTER(Update)]),
    "plc_square_sums": (_I32, [C.POINTER(Update), _PTR]),
    "plc_square_sums_with": (_I32, [C.c_char_p, C.POINTER(Update), _PTR]),
    "plc_journal_bytes": (_U64, []),
    "plc_journal_begin": (None, [_PTR, _U64]),
    "plc_journal_end": (None, [_PTR]),
    "plc_journal_note": (None, [_PTR, _U64, _U64]),
    "plc_journal_read": (None, [_PTR, C.POINTER(JournalState)]),
    "plc_journal_repair": (None, [C.POINTER(Update), _PTR]),
    "plc_meeting_bytes": (_U64, [_U32]),
    "plc_meet": (_I32, [_PTR, _PTR, _U32, _PTR, _PTR, _PTR, _I64]),
    "plc_claim": (_I32, [_PTR, _U64, _U32]),
    "plc_flag_bytes": (_U64, []),
    "plc_flag_raise": (None, [_PTR]),
    "plc_flag_wait": (_I32, [_PTR, _U32, _I32, _I64, _I64]),
    "plc_hand_over": (None, [_PTR, _PTR, _U64, _U64, _U32, _PTR, _PTR, _PTR]),
    "plc_arena_write_header": (_U32, [_PTR, _PTR]),
    "plc_arena_read_headers": (None, [_PTR, _U32, _PTR]),
    "plc_arena_set_weights": (None, [_PTR, _PTR]),
    "plc_arena_fill": (_I32, [_PTR, _U64, _U32, _PTR, _PTR]),
    "plc_arena_step": (_I32, [_PTR, _PTR, _U32, _U32, _I64, _PTR]),
}


def _load() -> C.CDLL:
    """Open the library, check that it is the one this file describes, and declare its functions."""
    if not _LIBRARY.exists():
        raise NativeError(_why_missing())
    try:
        # use_errno: the core reports failed system calls through errno.
        core = C.CDLL(str(_LIBRARY), use_errno=True)
    except OSError as error:
        raise NativeError(
            f"the native core cannot be loaded: {error}; reinstall paceline"
        ) from error
    version = core.plc_abi_version()
    if version != ABI_VERSION:
        raise NativeError(
            f"the native core has ABI version {version}, this paceline needs {ABI_VERSION}: "
            "reinstall the package so that both come from one version"
        )
    return _declare(core)


def _declare(core: _Library) -> _Library:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core


def _build_record() -> dict[str, str]:
    try:
        record: dict[str, str] = json.loads((_HERE / "native_build.json").read_text())
    except (OSError, ValueError):
        return {}
    return record


def _why_missing() -> str:
    error = _build_record().get("error", "it was not built when paceline was installed")
    return (
        f"the native core is missing ({error}); install a C compiler (Debian: apt-get install gcc) "
        "and reinstall paceline: pip install --force-reinstall --no-deps paceline"
    )


@functools.cache
def library() -> C.CDLL:
    """The loaded core; raises `NativeError` with the reason and the cure if it cannot be used."""
    return _load()


@functools.cache
def library_holding_gil() -> C.PyDLL:
    """The same core for calls made with the GIL held, which saves a microsecond.

    For calls that never block, and for those marked [GIL] in the header: the core releases the GIL
    before it waits, and what a signal handler raises meanwhile (KeyboardInterrupt) is raised by the
    call.
    """
    library()
    return _declare(C.PyDLL(str(_LIBRARY), use_errno=True))


@functools.cache
def interpreter() -> Interpreter:
    """How the core releases the GIL, acquires it again and checks for signals."""
    names = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
    return Interpreter(*(C.cast(getattr(C.pythonapi, name), C.c_void_p) for name in names))


@functools.cache
def native_status() -> NativeStatus:
    """Whether the core can be used, without raising."""
    command = _build_record().get("command", "")
    try:
        core = library()
    except NativeError as error:
        return NativeStatus(False, str(error), build_command=command)
    instruction_set: Callable[[], bytes] = core.plc_instruction_set
    return NativeStatus(True, "", instruction_set().decode(), build_command=command)
