"""The process executor: share 0 of a batch runs here, the others in worker processes, forward and
backward in parallel.

One forward, step by step:
 1. take the inputs apart and decide who gets what                         (split)
 2. let workers follow what the user did to the module                     (watch, parameters)
 3. write each worker's share into its box and wake it                     (mailbox, crew)
 4. run the module on share 0, with parameters that remember this call     (joints)
 5. read the workers' outputs and join them with ours                      (combine)
Backward: `Join` does step 3 with gradients, autograd step 4, `Parameters` and `Share` step 5 with
sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from paceline._malloc import keep_freed_memory
from paceline.core.kernels import add_pieces
from paceline.dp import serialization
from paceline.dp.autograd_functions import Gradients, Join, Parameters, Share, not_shared
from paceline.dp.channel import Form, Message, Source, is_plain, meta_of, source_of
from paceline.dp.gather import GatherPlan, TensorMeta, join_leaf, same_structure
from paceline.dp.global_batch_norm import MeetingPoint, PeerFailed, WholeBatch
from paceline.dp.gradients import sum_gradients
from paceline.dp.module_snapshot import ModuleSnapshot
from paceline.dp.scatter import SplitInputs, Splitter, split_inputs
from paceline.dp.shared_parameters import (
    GradientPlaces,
    GradientRoom,
    SharedParameters,
    substituted,
)
from paceline.dp.structure import Whole, flatten, is_flat_call, unflatten
from paceline.dp.thread_limit import IntraOpThreadCap, ThreadLimit
from paceline.dp.worker import (
    ALL_DENSE,
    BACKWARD,
    DENSE,
    FAILED,
    FORWARD,
    NOTHING,
    STALE,
    Modes,
    serve,
)
from paceline.dp.worker_pool import Worker, WorkerPool
from paceline.errors import ConfigError, GroupError

__all__ = ["ProcessExecutor"]

_tokens = itertools.count(1)
_KEPT = (
    256  # of what is remembered about calls: inputs that change all the time do not fill the memory
)
_SMALL_BUFFER = 4096  # elements; cheaper sent than thought about


class ProcessExecutor:
    """Runs a module on `workers` replicas, of which this process is the first."""

    def __init__(
        self,
        module: nn.Module,
        workers: int,
        threads: int,
        dim: int,
        scalars: str,
        splitters: Mapping[type, Splitter],
        timeout_s: float,
        is_batch_whole: bool = False,
    ) -> None:
        self._module = module
        self.workers = workers
        self.threads = threads
        self._dim = dim
        self._scalars = scalars
        self._splitters = splitters
        self._leaf_types = (Whole, *splitters)
        self._timeout_s = timeout_s
        self._is_batch_whole = is_batch_whole  # for batch normalisation
        self._splits_tensors_itself = not any(issubclass(torch.Tensor, kind) for kind in splitters)
        self._team: _Team | None = None
        self._quiet = IntraOpThreadCap(threads)
        keep_freed_memory(workers)  # before workers are forked: they inherit it

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward on the whole batch."""
        key = _key_of(args, kwargs) if self._splits_tensors_itself else None
        team = self._team if self._team is not None and self._team.crew.is_alive else None
        route = team.routes.get(key) if team is not None and key is not None else None
        if team is not None and route is not None:
            split = route.split.again([*args])
            team.seed(
                len(split.ranges) - 1
            )  # ahead of everything else: workers see to it meanwhile
        else:
            split = split_inputs(
                (args, kwargs), self.workers, self._dim, self._splitters, self._leaf_types
            )
        if len(split.ranges) == 1 or self._is_unfinished():
            args, kwargs = unflatten(split.spec, split.leaves)
            return self._module(*args, **kwargs)
        for _ in range(2):
            ready = self._ready_team()
            if ready is not team or route is None:
                ready.seed(len(split.ranges) - 1)
            try:
                return _Call(ready, ready.route(key, split), split, self._scalars).forward()
            except serialization.Unknown:
                self.refresh()  # inputs of a class that is younger than the workers
        raise ConfigError(
            "an input refers to a class or function that workers cannot find even when started anew"
        )

    def refresh(self) -> None:
        """Start new workers at the next forward. Graphs that still wait for their backward keep the
        old ones.
        """
        self._team = None
        self._quiet.end()

    def end(self) -> None:
        """End the workers now."""
        team, self._team = self._team, None
        if team is not None:
            team.crew.end()
        self._quiet.end()

    def _is_unfinished(self) -> bool:
        """Lazy modules get their shapes from a first forward, in one piece."""
        return self._team is None and any(map(is_lazy, self._module.parameters()))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._team.crew.pids if self._team is not None and self._team.crew.is_alive else []

    def _ready_team(self) -> _Team:
        team = self._team
        if team is not None and team.crew.is_alive and team.follow():
            return team
        parameters = None
        if team is not None and team.parameters.follow() and team.parameters.cover(self._module):
            parameters = team.parameters
        is_restless = team is not None and team.watch.is_restless
        self._team = team = None  # ends the old workers, unless graphs need them
        self._quiet.begin()
        meeting = MeetingPoint(self.workers - 1, self._timeout_s) if self._is_batch_whole else None
        with torch.inference_mode(False):  # the parameters' new memory is for training, too
            self._team = _Team(
                self._module,
                parameters,
                self.workers,
                self.threads,
                self._timeout_s,
                meeting,
                is_restless,
            )
        return self._team


@dataclasses.dataclass
class _Backlog:
    """What one worker was not told yet."""

    updates: dict[tuple[int, str], Any] = dataclasses.field(default_factory=dict)
    thawed: dict[int, bool] = dataclasses.field(default_factory=dict)
    buffers: set[int] = dataclasses.field(default_factory=set)
    releases: list[int] = dataclasses.field(default_factory=list)

    @property
    def has_news(self) -> bool:
        return bool(self.updates or self.thawed or self.buffers)

    def clear(self, releases: int) -> None:
        """It was told, `releases` of those too: the garbage collector may have added some
        meanwhile.
        """
        if self.has_news:
            self.updates, self.thawed, self.buffers = {}, {}, set()
        del self.releases[:releases]


class _Team:
    """Workers, and what they know of the module."""

    def __init__(
        self,
        module: nn.Module,
        parameters: SharedParameters | None,
        replicas: int,
        threads: int,
        timeout_s: float,
        meeting: MeetingPoint | None,
        is_restless: bool,
    ) -> None:
        self.module = module
        self.meeting = meeting
        self.parameters = parameters if parameters is not None else SharedParameters(module)
        self.parameters.newly_frozen_or_thawed()
        self.buffers = _Buffers(module)
        self.limit = ThreadLimit(threads)
        self.backlogs = [_Backlog() for _ in range(replicas)]
        self.current: _Call | None = None  # whose answers lie in the boxes
        self.watch = ModuleSnapshot(module, is_restless)
        self.joints: dict[
            Any, list[GatherPlan]
        ] = {}  # how outputs that were seen before are joined
        shared, places = self.parameters, self.buffers.places
        self._rooms = rooms = [GradientRoom(shared) for _ in range(replicas - 1)]
        self._stand_ins: _StandIns | None = None
        self.routes: dict[Any, _Route] = {}
        with torch.inference_mode(False):
            self._drawn = torch.zeros((), dtype=torch.int64)
        self.crew = WorkerPool(
            replicas - 1,
            lambda replica, link, pid, pidfd: serve(
                module,
                shared,
                rooms[replica - 1],
                places,
                meeting,
                threads,
                replica,
                link,
                pid,
                pidfd,
            ),
            timeout_s,
        )

    def follow(self) -> bool:
        """Note what the user changed; False if it takes new workers."""
        if not self.parameters.follow() or not self.buffers.fit():
            return False
        updates = self.watch.updates()
        if updates is None:
            return False
        thawed = self.parameters.newly_frozen_or_thawed()
        buffers = self.buffers.changed()
        if updates or thawed or buffers:
            for backlog in self.backlogs[1:]:
                backlog.updates.update({(index, name): value for index, name, value in updates})
                backlog.thawed.update(thawed)
                backlog.buffers.update(buffers)
        return True

    def route(self, key: Any, split: SplitInputs) -> _Route:
        """What is known of calls with inputs like these; remembered if there is a key."""
        route = self.routes.get(key) if key is not None else None
        if route is None:
            route = _Route.of(split, is_plain=key is not None)
            if key is not None:
                if len(self.routes) >= _KEPT:
                    self.routes.clear()
                self.routes[key] = route
        return route

    def seed(self, workers: int) -> None:
        """Take one number from the user's generator, and let workers seed theirs."""
        self.settle()
        seed = int(self._drawn.random_())
        for worker in self.crew.workers[:workers]:
            worker.seed(seed)

    def stand_ins(self) -> _StandIns:
        """What share 0 computes with; made again when other parameters require gradients, or others
        are there.
        """
        known = self._stand_ins
        if known is None or known.slots is not self.parameters.trainable:
            known = self._stand_ins = _StandIns(self.parameters, self._rooms)
        return known

    def settle(self) -> None:
        """Make the boxes free for the next message."""
        current, self.current = self.current, None
        if current is not None:
            current.leave_boxes()

    def answer(self, worker: Worker) -> Message:
        """A worker's answer. If it is lost, or the user interrupts, all workers end: they may not
        agree any more.
        """
        try:
            return worker.answer()
        except (GroupError, KeyboardInterrupt, SystemExit):
            self.crew.end()
            raise


class _StandIns:
    """Tensors that share 0 computes with in place of the parameters that require gradients.

    Autograd takes their gradients to `Parameters`, and from there, as sums over replicas, to the
    parameters.
    """

    def __init__(self, parameters: SharedParameters, rooms: Sequence[GradientRoom]) -> None:
        self.slots = parameters.trainable
        self.places = [GradientPlaces(room, parameters.places) for room in rooms]  # of each worker
        self.sums = _Sums(self.places)
        with torch.inference_mode(False), torch.enable_grad():
            given = [slot.parameter for slot in self.slots]
            *tensors, self.anchor = Parameters.apply(self.sums, *given)  # type: ignore[no-untyped-call]  # torch's
        self.in_place = substituted(self.slots, tensors)


class _Sums:
    """Adds what workers found to our own gradients, for all calls that one backward goes through.

    Autograd's node refers to this and must not lead back to itself: calls are referred to weakly.
    """

    def __init__(self, places: Sequence[GradientPlaces]) -> None:
        self._places = places
        self._others = [  # addresses, for one worker, for two, ...
            functools.reduce(operator.add, [each.addresses for each in places[:count]])
            for count in range(1, len(places) + 1)
        ]
        self._calls: dict[int, list[weakref.ref[_Call]]] = {}

    def expect(self, call: _Call) -> None:
        """The backward that runs now goes through this call."""
        task = torch._C._current_graph_task_id()
        if task not in self._calls:
            # A backward that failed did not take its calls; one that this one is nested in will.
            self._calls = {
                other: refs for other, refs in self._calls.items() if any(ref() for ref in refs)
            }
            self._calls[task] = []
        self._calls[task].append(weakref.ref(call))

    def sums(self, own: Gradients) -> Gradients:
        refs = self._calls.pop(torch._C._current_graph_task_id(), ())
        calls = [call for ref in refs if (call := ref()) is not None]
        if not calls:
            raise GroupError(
                "a backward reached parameters of DataParallel, but none of its outputs: what other replicas found is "
                "missing. Return from forward what you want to differentiate"
            )
        is_mine = not_shared(own)  # workers are still at it: time to look closely
        ours = self._places[0].like_these(own) if all(is_mine) else None
        found = [each for call in calls for each in call.gradients()]
        results = own
        if ours is not None and len(calls) == 1 and all(each.is_in_place for each in found):
            others = self._others[len(found) - 1]
            add_pieces(ours, len(found), others, self._places[0].counts, self._places[0].dtypes)
        else:
            results = sum_gradients(own, [each.parameters for each in found], is_mine)
        for call in calls:
            call.finish_unless_inputs_wait()
        return results


class _Buffers:
    """The buffers of the module. Replica 0 is the module itself; workers get its values when they
    changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places: list[tuple[dict[str, Any], str]] = [
            (part._buffers, name)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if _is_told(buffer)
        ]
        self._seen = [(holder[name], _version(holder[name])) for holder, name in self.places]
        self._trained = False  # since buffers were last looked at
        self._owners = [
            part
            for part in module.modules()
            for buffer in part._buffers.values()
            if _is_told(buffer)
        ]

    def fit(self) -> bool:
        for (holder, name), (seen, _) in zip(self.places, self._seen, strict=True):
            now = holder.get(name)
            if now is not seen and (
                now is None or now.shape != seen.shape or now.dtype != seen.dtype
            ):
                return False
        return True

    def changed(self) -> list[int]:
        found = []
        for index, (holder, name) in enumerate(self.places):
            now = holder[name]
            version = _version(now)
            seen, before = self._seen[index]
            unseen = self._trained and _may_change_unseen(self._owners[index], now)
            if now is not seen or version != before or version < 0 or unseen:
                self._seen[index] = (now, version)
                found.append(index)
        return found

    def expect_training(self) -> None:
        """A forward follows."""
        self._trained = any(owner.training for owner in self._owners)

    def values(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [holder[name] for holder, name in (self.places[index] for index in indices)]


def _is_told(buffer: torch.Tensor | None) -> bool:
    """Those that require a gradient are shared, like parameters."""
    return buffer is not None and not buffer.requires_grad


def _may_change_unseen(owner: nn.Module, buffer: torch.Tensor) -> bool:
    """Kernels of batch normalisation write running statistics without counting up the tensor's
    version.
    """
    return buffer.is_floating_point() and (
        isinstance(owner, _NormBase) or buffer.numel() <= _SMALL_BUFFER
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@dataclasses.dataclass
class _Route:
    """What calls with inputs alike have in common."""

    split: SplitInputs
    kinds: tuple[bool, ...]  # which leaves are tensors
    tensors: list[int]
    others: list[int]
    is_flat: bool
    offsets: dict[
        int, list[int]
    ]  # by replica: in bytes, of its share of each leaf; if all leaves are plain
    forms: dict[tuple[int, bool], Form]  # by replica, and whether gradients are computed

    @classmethod
    def of(cls, split: SplitInputs, is_plain: bool) -> _Route:
        kinds = tuple(isinstance(leaf, torch.Tensor) for leaf in split.leaves)
        tensors = [index for index, is_tensor in enumerate(kinds) if is_tensor]
        others = [index for index, is_tensor in enumerate(kinds) if not is_tensor]
        offsets = {}
        if is_plain and split.dim == 0:
            for replica, (start, _) in enumerate(split.ranges):
                rows = [start * (factor or 0) for factor in split.factors]
                leaves = zip(rows, split.leaves, strict=True)
                offsets[replica] = [row * leaf[:1].nbytes for row, leaf in leaves]
        return cls(split.again([]), kinds, tensors, others, is_flat_call(split.spec), offsets, {})


def _key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides how inputs are split and sent, for plain tensors; None for all others."""
    if kwargs or not all(type(arg) is torch.Tensor and is_plain(arg) for arg in args):
        return None
    return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in args)


class _Call:
    """One forward on several replicas, and its backward."""

    def __init__(self, team: _Team, route: _Route, split: SplitInputs, scalars: str) -> None:
        self._team = team
        self._route = route
        self._split = split
        self._scalars = scalars
        self._token = next(_tokens)
        self._workers = team.crew.workers[: len(split.ranges) - 1]
        self._joints: list[GatherPlan] = []
        self._outputs: list[list[torch.Tensor]] = []  # of the workers, in their boxes, until joined
        self._wanted: list[int] = []  # input leaves whose gradient workers compute
        self._stand_ins: _StandIns | None = None
        self._released = True
        self._pending = False  # workers compute gradients
        self._found: list[_Found] | None = None

    # --- forward ---------------------------------------------------------------------------------
    def forward(self) -> Any:
        team = self._team
        team.limit.reset()
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if grad:
            leaves = self._split.leaves
            self._wanted = [index for index in self._route.tensors if leaves[index].requires_grad]
        self._send_shares()
        self._released = (
            not grad
        )  # workers keep their graphs until this call, and with it the user's graph, is gone
        anchor, outputs = self._run_own_share(grad)
        spec, own = flatten(outputs)
        tensors = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
        self._plan_joints(spec, own, tensors, self._answers())
        if grad and any(joint.requires_grad for joint in self._joints):
            # the workers keep their graphs until this call, and with it the user's graph, is gone
            self._released = False
            joined: Sequence[torch.Tensor] = Join.apply(self, anchor, *tensors)  # type: ignore[no-untyped-call]  # torch's
        else:
            joined = self.join_outputs(tensors)
        self._outputs = []
        if len(joined) == len(own):
            return unflatten(spec, joined)
        found = iter(joined)
        return unflatten(
            spec, [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in own]
        )

    def _send_shares(self) -> None:
        split, team, route = self._split, self._team, self._route
        team.settle()
        team.buffers.expect_training()
        modes = Modes.here()
        for worker in self._workers:
            replica = worker.replica
            backlog = team.backlogs[replica]
            form = route.forms.get((replica, modes[0]))
            offsets = route.offsets.get(replica)
            news: tuple[Any, ...] = ((), (), ())
            sources: list[Source]
            if form is not None and offsets is not None and not backlog.has_news:
                sources = [
                    leaf.data_ptr() + offset
                    for leaf, offset in zip(split.leaves, offsets, strict=True)
                ]
            else:
                shares = [split.share(index, replica) for index in route.tensors]
                form = route.forms[replica, modes[0]] = self._form(worker, shares, modes[0])
                if backlog.has_news:
                    indices = tuple(sorted(backlog.buffers))
                    buffers = team.buffers.values(indices)
                    form = self._form(worker, shares, modes[0], buffers)
                    shares += buffers
                    updates = tuple(
                        (index, name, value) for (index, name), value in backlog.updates.items()
                    )
                    news = (updates, tuple(backlog.thawed.items()), indices)
                sources = [*map(source_of, shares)]
            releases = tuple(backlog.releases)
            objects = (
                [split.share(index, replica) for index in route.others] if route.others else ()
            )
            worker.outbox.write(
                (FORWARD, releases, self._token, modes, *news), form, sources, objects
            )
            backlog.clear(len(releases))
            worker.start()

    def _form(
        self,
        worker: Worker,
        shares: Sequence[torch.Tensor],
        grad: bool,
        buffers: Sequence[torch.Tensor] = (),
    ) -> Form:
        metas = tuple(map(meta_of, shares))
        if not grad:
            metas = tuple(meta._replace(requires_grad=False) for meta in metas)
        metas += tuple(TensorMeta(buffer.dtype, tuple(buffer.shape)) for buffer in buffers)
        return worker.outbox.form((self._split.spec, self._route.kinds), metas)

    def _run_own_share(self, grad: bool) -> tuple[torch.Tensor | None, Any]:
        """The module on share 0. If it fails, the workers' answers are taken out of the way."""
        team = self._team
        try:
            with team.limit, self._whole_batch():
                return self._run_module(grad)
        except Exception:
            if team.meeting is not None:
                team.crew.end()  # they may wait for a sum that will never be
                raise
            for worker in self._workers:
                team.answer(worker)
            self._release_graphs()
            raise
        except BaseException:
            team.crew.end()
            raise

    def _whole_batch(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext()
            if self._team.meeting is None
            else WholeBatch(self._sum_with_workers)
        )

    def _sum_with_workers(self, vector: torch.Tensor) -> torch.Tensor:
        meeting = self._team.meeting
        assert meeting is not None
        try:
            return meeting.sum_in_main(vector, [worker.pidfd for worker in self._workers])
        except PeerFailed:
            self._raise_reason()
            raise

    def _raise_reason(self) -> None:
        """A worker failed where others waited for it: say why. Those that wait for the sum do not
        answer.
        """
        for worker in self._workers:
            if worker.has_answered():
                self._raise_failure(worker, self._team.answer(worker))

    def _run_module(self, grad: bool) -> tuple[torch.Tensor | None, Any]:
        split, team = self._split, self._team
        shares = [
            Share.apply(self, index, leaf) if index in self._wanted else split.share(index, 0)  # type: ignore[no-untyped-call]  # torch's
            for index, leaf in enumerate(split.leaves)
        ]
        args, kwargs = (shares, {}) if self._route.is_flat else unflatten(split.spec, shares)
        anchor = None
        if grad:
            self._stand_ins = stand_ins = team.stand_ins()
            anchor = stand_ins.anchor
            with stand_ins.in_place:
                outputs = team.module(*args, **kwargs)
        else:
            outputs = team.module(*args, **kwargs)
        team.watch.absorb()
        return anchor, outputs

    def _answers(self) -> list[Message]:
        answers = [self._team.answer(worker) for worker in self._workers]
        self._raise_failures(answers)
        return answers

    def _raise_failures(self, answers: Sequence[Message]) -> None:
        for worker, answer in zip(self._workers, answers, strict=True):
            self._raise_failure(worker, answer)

    def _raise_failure(self, worker: Worker, answer: Message) -> None:
        if answer.fixed[0] in (FAILED, STALE):
            self._release_graphs()
            if self._team.meeting is not None:
                self._team.crew.end()  # sums over replicas are out of step
            raise _error_of(
                worker, answer
            )  # in no variable: with its traceback it would keep the workers alive

    def _plan_joints(
        self, spec: Any, own: list[Any], tensors: Sequence[torch.Tensor], answers: Sequence[Message]
    ) -> None:
        metas = tuple(map(meta_of, tensors))
        sizes = self._split.sizes
        known = self._team.joints
        key = (spec, metas, *sizes, *(answer.form for answer in answers))
        joints = known.get(key)
        if joints is None or len(tensors) < len(own):
            objects = [
                [leaf for leaf in own if not isinstance(leaf, torch.Tensor)],
                *(a.objects for a in answers),
            ]
            same_structure([spec, *(answer.form.spec for answer in answers)], objects)
            all_metas = zip(metas, *(answer.form.metas for answer in answers), strict=True)
            joints = [join_leaf(each, sizes, self._split.dim, self._scalars) for each in all_metas]
            if len(known) >= _KEPT:
                known.clear()
            known[key] = joints
        self._joints = joints
        self._outputs = [
            worker.inbox.tensors(a.form) for worker, a in zip(self._workers, answers, strict=True)
        ]

    def _release_graphs(self) -> None:
        self._released = True
        for worker in self._workers:
            self._team.backlogs[worker.replica].releases.append(self._token)

    def __del__(self) -> None:
        if not self._released:
            self._release_graphs()

    def own_share(self, index: int) -> torch.Tensor:
        share: torch.Tensor = self._split.share(index, 0)
        return share.clone()

    def differentiable(self) -> Sequence[bool]:
        return [joint.requires_grad for joint in self._joints]

    def join_outputs(self, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        parts = zip(own, *self._outputs, strict=True)
        return tuple(
            _join(joint, tensors) for joint, tensors in zip(self._joints, parts, strict=True)
        )

    # --- backward --------------------------------------------------------------------------------
    def start_backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        if self._released:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the replicas' graphs were freed by the first "
                "backward. Specify retain_graph=True there if you need to backward through it again"
            )
        if not self._team.crew.is_alive:
            raise GroupError(
                "the workers of DataParallel that hold the graphs of this forward have ended (closed, or lost in an "
                "earlier step); run the forward again"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        self._team.settle()
        self._send_gradients(gradients, keep)
        self._released = not keep
        self._pending, self._found = True, None
        self._team.current = self
        assert self._stand_ins is not None
        self._stand_ins.sums.expect(self)
        self._prepare_the_end()
        return [
            _share_of(joint, gradient, 0)
            for joint, gradient in zip(self._joints, gradients, strict=True)
        ]

    def _send_gradients(self, gradients: Gradients, keep: bool) -> None:
        present = tuple(gradient is not None for gradient in gradients)
        given = [pair for pair in zip(self._joints, gradients, strict=True) if pair[1] is not None]
        for worker in self._workers:
            backlog = self._team.backlogs[worker.replica]
            shares = [_share_of(joint, gradient, worker.replica) for joint, gradient in given]
            metas = tuple(
                TensorMeta(share.dtype, tuple(share.shape)) for share in shares if share is not None
            )
            releases = tuple(backlog.releases)
            form = worker.outbox.form((present,), metas)
            sources = [source_of(share) for share in shares if share is not None]
            worker.outbox.write((BACKWARD, releases, self._token, keep), form, sources)
            del backlog.releases[: len(releases)]
            worker.start()

    def _prepare_the_end(self) -> None:
        """Until backward ends the cores belong to the workers as well."""
        limit = self._team.limit
        if limit.holds and not self._wanted:
            return  # `_Sums` is all that waits for the workers
        limit.__enter__()

        def end() -> None:
            limit.__exit__(None, None, None)
            self.finish()

        torch.autograd.Variable._execution_engine.queue_callback(end)

    def finish_unless_inputs_wait(self) -> None:
        """The parameters have their gradients."""
        if not self._wanted:
            self.finish()

    def finish(self) -> None:
        """Nobody asks for this backward's gradients any more."""
        if self._team.current is self and not self._pending:
            self._team.current, self._found = None, None

    def input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        position = self._wanted.index(index)
        parts = [own, *(each.inputs[position] for each in self.gradients())]
        if all(part is None for part in parts):
            return None
        split = self._split
        if not split.factors[index]:
            (total,) = sum_gradients([parts[0]], [[part] for part in parts[1:]])
            return total
        whole = torch.zeros_like(split.leaves[index])
        for (start, stop), part in zip(split.ranges, parts, strict=True):
            factor = split.factors[index] or 1
            if part is not None:
                whole.narrow(split.dim, start * factor, (stop - start) * factor).copy_(part)
        return whole

    def gradients(self) -> list[_Found]:
        """What the workers found; waits for them, once per backward."""
        if self._pending:
            self._pending = False
            answers = [self._team.answer(worker) for worker in self._workers]
            self._raise_failures(answers)
            assert self._stand_ins is not None
            self._found = [
                _Found.read(*each)
                for each in zip(self._workers, answers, self._stand_ins.places, strict=False)
            ]
        if self._found is None:
            raise GroupError(
                "the gradients of this forward's replicas are gone: an earlier backward failed"
            )
        return self._found

    def leave_boxes(self) -> None:
        """Another message is about to be sent: answers that may still be needed are copied."""
        with contextlib.suppress(Exception):  # of a backward that nobody waits for any more
            self._found = [each.copied() for each in self.gradients()]


@dataclasses.dataclass
class _Found:
    """Gradients one worker computed."""

    parameters: Gradients
    inputs: Gradients
    is_in_place: bool = False  # every parameter's, each where it belongs

    @classmethod
    def read(cls, worker: Worker, answer: Message, places: GradientPlaces) -> _Found:
        kinds, parameters = answer.form.spec
        if kinds == ALL_DENSE:
            return cls(places.tensors, [], is_in_place=True)
        sent = iter(worker.inbox.tensors(answer.form))
        found: list[torch.Tensor | None] = []
        for index, kind in enumerate(kinds):
            if kind == NOTHING:
                found.append(None)
            elif kind == DENSE:
                found.append(places.tensors[index] if index < parameters else next(sent))
            else:
                indices, values = next(sent).clone(), next(sent).clone()
                found.append(
                    torch.sparse_coo_tensor(
                        indices, values, kind, is_coalesced=True, check_invariants=False
                    )
                )
        return cls(found[:parameters], found[parameters:])

    def copied(self) -> _Found:
        return _Found(
            [None if each is None else each.clone() for each in self.parameters],
            [None if each is None else each.clone() for each in self.inputs],
        )


def _join(joint: GatherPlan, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if joint.how == "stack":
        return torch.stack(tuple(tensors))
    if joint.how == "mean":
        wide = torch.complex128 if joint.dtype.is_complex else torch.float64
        total = sum(
            tensor.to(wide) * weight for tensor, weight in zip(tensors, joint.weights, strict=True)
        )
        assert isinstance(total, torch.Tensor)
        return total.to(joint.dtype)
    return torch.cat(tuple(tensors), joint.dim)


def _share_of(
    joint: GatherPlan, gradient: torch.Tensor | None, replica: int
) -> torch.Tensor | None:
    if gradient is None:
        return None
    if joint.how == "stack":
        return gradient[replica]
    if joint.how == "mean":
        return gradient * joint.weights[replica]
    start, stop = joint.ranges[replica]
    if joint.dim == 0:
        return gradient[start:stop]
    return gradient.narrow(joint.dim, start, stop - start)


def _error_of(worker: Worker, answer: Message) -> BaseException:
    kind, text, data = answer.fixed
    if kind == STALE:
        return serialization.Unknown(text)
    error: BaseException
    try:
        error = (
            serialization.rebuilt(serialization.loads(data)[0])
            if data
            else RuntimeError(text.strip().splitlines()[-1])
        )
    except Exception:
        error = RuntimeError(text.strip().splitlines()[-1])
    error.add_note(
        f"raised in replica {worker.replica} of DataParallel (pid {worker.pid}):\n{text}"
    )
    return error
