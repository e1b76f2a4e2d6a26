"""Records every collective that Python code starts or waits for, on process groups of any kind:
Gloo, NCCL, MPI, ours.

All of torch's functions come down to methods of `ProcessGroup` and to `Work.wait`, whichever way a
script imported them. Those methods are replaced on the classes while this process is observed, and
put back afterwards. Calls that C++ makes by itself (the reducer of torch's own
DistributedDataParallel) do not pass here.

Classes written in Python override torch's methods, so the patch on the base class does not see
them. Whoever installs a recorder names those classes: this package is below the backend and does
not know it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Field, Phase, WaitLabel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["CollectiveRecorder", "joining"]

# Method of a group -> the name under which users know the call.
_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
# These pair two ranks instead of the whole group, so their numbers differ from rank to rank.
_POINT_TO_POINT = {"send", "recv", "recv_anysource"}
_CALLS, _TIMEOUT, _CALLS_OF_KIND = (
    int(Field.CALLS),
    int(Field.TIMEOUT),
    int(Field.CALLS_OF_KIND),
)
_JOIN = WaitLabel("init_process_group").packed()


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Record that this process waits for the others to join the default group."""
    recorder.enter(_JOIN, 0)
    try:
        yield
    finally:
        # No sync point: a rank that started late is not a slow one.
        recorder.leave(sync_point=False, then=int(Phase.OTHER))


class _GroupInfo:
    """One group: its name, its ranks, its timeout, and how many calls were made on it."""

    __slots__ = (
        "_labels",
        "_members",
        "_name",
        "_number",
        "calls",
        "calls_by_method",
        "timeout_ns",
    )

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        name = str(getattr(group, "group_name", "") or "")
        self._name = "the default group" if group is dist.group.WORLD else f"group {name or '?'}"
        self._number = group_number(name)
        self._members = _members(group)
        self._labels: dict[str, WaitLabel] = {}
        self.calls = 0
        self.calls_by_method = dict.fromkeys(_METHODS, 0)
        self.timeout_ns = _timeout_ns(group)

    def label(self, method: str) -> WaitLabel:
        label = self._labels.get(method)
        if label is None:
            number = self._number
            if method in _POINT_TO_POINT:
                number = group_number(f"{number} messages")
            label = WaitLabel(_METHODS[method], self._name, number, self._members).packed()
            self._labels[method] = label
        return label


def _members(group: ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group; empty for all of them, or if torch does not know the group."""
    import torch.distributed as dist

    if not dist.is_initialized() or group.size() == dist.get_world_size():
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()


def _timeout_ns(group: ProcessGroup) -> int:
    """The shortest timeout of a group's backends; 0 if none is known."""
    from paceline._torch_internals import timeouts_of

    return min((int(timeout.total_seconds() * 1e9) for timeout in timeouts_of(group)), default=0)


class CollectiveRecorder:
    """Replaces methods of the process group classes while it is installed.

    `group_classes` and `work_classes` are those that override torch's methods in Python.
    `completed_work` is the class of work that is complete when its call returns: such a call is a
    sync point itself, while all others are when their work is waited for.
    """

    def __init__(
        self,
        group_classes: Sequence[type[ProcessGroup]] = (),
        work_classes: Sequence[type[Work]] = (),
        completed_work: type[Work] | tuple[()] = (),
    ) -> None:
        self._group_classes = tuple(group_classes)
        self._work_classes = tuple(work_classes)
        self._completed_work = completed_work
        self._groups: weakref.WeakKeyDictionary[ProcessGroup, _GroupInfo] = (
            weakref.WeakKeyDictionary()
        )
        self._pending: weakref.WeakKeyDictionary[Work, tuple[WaitLabel, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._replaced: list[tuple[type | ModuleType, str, object]] = []
        self._thread = recorder.thread

    def install(self) -> None:
        """Begin to record, also on groups that exist already."""
        import torch.distributed as dist

        from paceline._torch_internals import Work

        group_classes: tuple[type, ...] = (dist.ProcessGroup, *self._group_classes)
        for group_class in group_classes:
            for method in _METHODS:
                if method in vars(group_class):
                    recorded = self._record_call(method, vars(group_class)[method])
                    self._replace(group_class, method, recorded)
        work_classes: tuple[type, ...] = (Work, *self._work_classes)
        for work_class in work_classes:
            self._replace(work_class, "wait", self._record_wait(vars(work_class)["wait"]))
        for module in (dist, dist.distributed_c10d):
            original = vars(module)["init_process_group"]
            self._replace(module, "init_process_group", _record_join(original))

    def uninstall(self) -> None:
        """Leave the classes as they were."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()

    def _replace(self, owner: type | ModuleType, name: str, replacement: object) -> None:
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)

    def _info(self, group: ProcessGroup) -> _GroupInfo:
        info = self._groups.get(group)
        if info is None:
            info = self._groups[group] = _GroupInfo(group)
        return info

    def _record_call(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(group, *args, **kwargs)
            info = self._info(group)
            info.calls += 1
            fields = recorder.page.fields
            fields[_CALLS] += 1
            fields[_TIMEOUT] = info.timeout_ns
            info.calls_by_method[method] = fields[_CALLS_OF_KIND] = info.calls_by_method[method] + 1
            label, number = info.label(method), info.calls
            recorder.enter(label, number)
            synchronised = True
            try:
                work = original(group, *args, **kwargs)
                # Work that is waited for synchronises there, however early it was complete: the
                # same on every rank.
                if work is not None and not isinstance(work, self._completed_work):
                    self._pending[work] = (label, number)
                    synchronised = False
                return work
            finally:
                recorder.leave(sync_point=synchronised)

        return functools.update_wrapper(
            call, original, assigned=("__name__", "__doc__"), updated=()
        )

    def _record_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            pending = None
            if threading.get_ident() == self._thread:
                pending = self._pending.pop(work, None)
            if pending is None:
                return original(work, *args, **kwargs)
            recorder.enter(*pending)
            try:
                return original(work, *args, **kwargs)
            finally:
                recorder.leave()

        return functools.update_wrapper(
            wait, original, assigned=("__name__", "__doc__"), updated=()
        )


def _record_join(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        with joining():
            return original(*args, **kwargs)

    return init_process_group
