"""Notes every collective that Python code starts or waits for, on process groups of any kind: Gloo,
NCCL, MPI, ours.

All of torch's functions come down to methods of `ProcessGroup` and to `Work.wait`, whichever way a
script imported them. Those methods are replaced on the class while this process is being observed,
and put back afterwards. Calls that C++ makes by itself (the reducer of torch's own
DistributedDataParallel) do not pass here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Field, Phase, WaitLabel

__all__ = ["CallNotes", "joining"]

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
# Two ranks meet in these, not the group: their numbers differ from rank to rank.
_MESSAGES = {"send", "recv", "recv_anysource"}
_CALLS, _TIMEOUT, _SAME_KIND = int(Field.CALLS), int(Field.TIMEOUT), int(Field.SAME_KIND)
_JOIN = WaitLabel("init_process_group").packed()


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """This process waits for the others to come to the default group."""
    recorder.enter(_JOIN, 0)
    try:
        yield
    finally:
        # No sync_point: who started late says nothing about who is slow.
        recorder.leave(met=False, then=int(Phase.OTHER))


class _GroupFacts:
    """One group: its name, its ranks, when it gives up, how many calls were made on it."""

    __slots__ = ("kinds", "made", "members", "name", "number", "places", "timeout_ns")

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        name = str(getattr(group, "group_name", "") or "")
        whole = not dist.is_initialized() or group.size() == dist.get_world_size()
        members: tuple[int, ...] = ()
        if not whole:
            try:
                members = tuple(dist.get_process_group_ranks(group))
            except (KeyError, ValueError, RuntimeError):
                members = ()  # a group torch does not know: made by hand
        self.name = "the default group" if group is dist.group.WORLD else f"group {name or '?'}"
        self.number = group_number(name)
        self.members = members
        self.made = 0
        self.kinds = dict.fromkeys(_METHODS, 0)
        self.places: dict[str, WaitLabel] = {}
        self.timeout_ns = _timeout_ns(group)

    def place(self, method: str) -> WaitLabel:
        found = self.places.get(method)
        if found is None:
            number = (
                self.number if method not in _MESSAGES else group_number(f"{self.number} messages")
            )
            found = WaitLabel(_METHODS[method], self.name, number, self.members).packed()
            self.places[method] = found
        return found


def _timeout_ns(group: Any) -> int:
    """After which one of its backends gives a call up; 0 if none says so."""
    found = []
    with contextlib.suppress(AttributeError, RuntimeError):  # a group that was made by hand
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            if (limit := getattr(options, "_timeout", None)) is not None:
                found.append(int(limit.total_seconds() * 1e9))
    return min(found, default=0)


class CallNotes:
    """Installed while this process is observed."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Any, _GroupFacts] = weakref.WeakKeyDictionary()
        self._under_way: weakref.WeakKeyDictionary[Any, tuple[WaitLabel, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._replaced: list[tuple[Any, str, Any]] = []
        self._thread = recorder.thread
        self._done: type = type(None)  # our own work that is over when the call returns

    def install(self) -> None:
        """Begin to note. Also covers groups that exist already."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import Work

        from paceline.backend.process_group import PacelineGroup
        from paceline.backend.work import DoneWork, PendingWork

        self._done = DoneWork

        for kind in (dist.ProcessGroup, PacelineGroup):
            for method in _METHODS:
                if method in vars(kind):
                    self._replace(kind, method, self._noted(method, vars(kind)[method]))
        for work in (Work, PendingWork):
            self._replace(work, "wait", self._noted_wait(vars(work)["wait"]))
        for module in (dist, dist.distributed_c10d):
            self._replace(
                module, "init_process_group", self._noted_join(vars(module)["init_process_group"])
            )

    def remove(self) -> None:
        """Leave the classes as they were."""
        for kind, name, original in reversed(self._replaced):
            setattr(kind, name, original)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)

    def _facts(self, group: Any) -> _GroupFacts:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _GroupFacts(group)
        return found

    def _noted(self, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(group, *args, **kwargs)
            facts = self._facts(group)
            facts.made += 1
            words = recorder.page.words
            words[_CALLS] += 1
            words[_TIMEOUT] = facts.timeout_ns
            facts.kinds[method] = words[_SAME_KIND] = facts.kinds[method] + 1
            place, number = facts.place(method), facts.made
            recorder.enter(place, number)
            met = True
            try:
                work = original(group, *args, **kwargs)
                # What is waited for afterwards meets there, however soon it was done: the same on
                # every rank.
                if work is not None and not isinstance(work, self._done):
                    self._under_way[work] = (place, number)
                    met = False
                return work
            finally:
                recorder.leave(met=met)

        return functools.update_wrapper(
            noted, original, assigned=("__name__", "__doc__"), updated=()
        )

    def _noted_join(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def join(*args: Any, **kwargs: Any) -> Any:
            with joining():
                return original(*args, **kwargs)

        return join

    def _noted_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            known = (
                self._under_way.pop(work, None) if threading.get_ident() == self._thread else None
            )
            if known is None:
                return original(work, *args, **kwargs)
            recorder.enter(*known)
            try:
                return original(work, *args, **kwargs)
            finally:
                recorder.leave()

        return functools.update_wrapper(
            wait, original, assigned=("__name__", "__doc__"), updated=()
        )
