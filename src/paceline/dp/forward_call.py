"""One forward on all replicas, and its backward.

    NEW --send shares--> FORWARD --gather outputs--> READY | DONE
    READY --GatherOutputs.backward--> BACKWARD --workers answered--> GRADIENTS --used--> DONE
                                         \\-> FAILED               (retain_graph:)  \\--> READY

A call is made for each forward. The user's autograd graph refers to it; while it is READY (or its
backward was asked to retain the graph) the workers keep their part of the graph under the call's
number. When the user's graph goes, the call goes, and the next order asks the workers to
release theirs.

Who waits for whom: workers wait for orders and never for each other. The main process sends the
shares, runs share 0 itself, and only then waits for the workers' outputs. In the same way backward
sends the output gradients first (`GatherOutputs`), lets autograd run share 0, and waits for the
workers when their gradients are needed (`ReplicaParameters`, `ScatterInput`).

Answers lie in the channels' memory until the next order. A call whose gradients are not used yet
when another call wants the channels copies them (`leave_channels`). Threads of the main process
take turns: a forward holds the lock of the replica set from beginning to end, a backward while it
sends, and again while it reads the answers.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from paceline._interpreter import NotifiesOnDrop
from paceline._pytree import Spec, flatten, is_taken_apart_by_attributes, unflatten
from paceline._torch_internals import keeps_graph, queue_end_of_backward
from paceline.dp import serialization
from paceline.dp.autograd_functions import GatherOutputs, Gradients, ScatterInput
from paceline.dp.call_template import CallTemplate
from paceline.dp.channel import Message, MessageLayout
from paceline.dp.gather import GatherPlan, ReplicaOutputs, ScalarGather, plan_outputs
from paceline.dp.global_batch_norm import GlobalBatchNorm, ReplicaFailed
from paceline.dp.gradients import WorkerGradients, sum_gradients
from paceline.dp.protocol import Answer, Modes, Order, TensorMeta, meta_of, source_of
from paceline.dp.replica_scope import ReplicaScope
from paceline.dp.replica_set import ParameterProxies, PendingUpdates, ReplicaSet
from paceline.dp.scatter import SplitInputs
from paceline.dp.worker_pool import WorkerHandle
from paceline.errors import GroupError

__all__ = ["CallState", "ForwardCall"]

_FORWARD, _BACKWARD = Order.FORWARD.value, Order.BACKWARD.value
_DONE, _STALE = Answer.DONE.value, Answer.STALE.value
_INSIDE_REPLICA = ReplicaScope()
_NO_CONTEXT: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_numbers = itertools.count(1)


class CallState(enum.Enum):
    """Where a call is in its life; the module's docstring has the transitions."""

    NEW = "not sent yet"
    FORWARD = "workers compute their outputs"
    READY = "outputs are gathered, workers keep their graphs"
    BACKWARD = "workers compute their gradients"
    GRADIENTS = "workers' gradients are there"
    DONE = "workers keep nothing"
    FAILED = "a replica failed or ended unexpectedly"


class ForwardCall(NotifiesOnDrop):
    """One forward on several replicas, and its backward. See the module's docstring."""

    def __init__(
        self,
        replica_set: ReplicaSet,
        template: CallTemplate,
        split: SplitInputs,
        scalars: ScalarGather,
    ) -> None:
        self._replica_set = replica_set
        self._template = template
        self._split = split
        self._scalars = scalars
        self._number = next(_numbers)
        self._state = CallState.NEW
        self._retains_graph = False  # of the last backward
        self._workers = replica_set.pool.workers[: len(split.ranges) - 1]
        self._proxies: ParameterProxies | None = None  # None: no gradients are wanted
        self._wanted_inputs: list[int] = []  # leaves whose gradient the workers compute
        self._plans: list[GatherPlan] = []
        self._worker_outputs: list[list[torch.Tensor]] = []
        self._worker_gradients: list[WorkerGradients] = []

    def on_drop(self) -> None:
        if self._workers_keep_graphs:
            self._release_graphs()

    @property
    def _workers_keep_graphs(self) -> bool:
        state = self._state
        if state is CallState.BACKWARD or state is CallState.GRADIENTS:
            return self._retains_graph
        return state is CallState.READY or state is CallState.FORWARD

    def _release_graphs(self) -> None:
        for worker in self._workers:
            self._replica_set.pending[worker.replica].releases.append(self._number)

    # --- forward ---------------------------------------------------------------------------------
    def forward(self) -> Any:
        """Run the module on all replicas and gather the outputs. Once."""
        if self._state is not CallState.NEW:
            raise RuntimeError(
                f"internal error: ForwardCall.forward() called twice (state {self._state.name}: "
                f"{self._state.value})"
            )
        replica_set = self._replica_set
        replica_set.thread_limit.reset()
        modes = Modes.current()
        with_gradients = modes[0] and not modes[1]
        if with_gradients:
            leaves = self._split.leaves
            self._wanted_inputs = [
                index for index in self._template.tensor_indices if leaves[index].requires_grad
            ]
        # Workers get their shares before share 0 runs here, and their answers are read after it:
        # all replicas compute at the same time.
        try:
            self._send_shares(modes)
            self._state = CallState.FORWARD
            with replica_set.thread_limit, self._batch_norm():
                outputs = self._run_module(with_gradients)
        except BaseException as error:
            self._abandon(error)
            raise
        spec, leaves = flatten(outputs, opens=is_taken_apart_by_attributes)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._plan_outputs(spec, leaves, tensors, self._receive_all())
        self._state = CallState.READY if with_gradients else CallState.DONE
        if self._proxies is not None and any(plan.requires_grad for plan in self._plans):
            anchor = self._proxies.anchor
            gathered: Sequence[torch.Tensor]
            gathered = GatherOutputs.apply(self, anchor, *tensors)  # type: ignore[no-untyped-call]
        else:
            gathered = self.gather_outputs(tensors)
        self._worker_outputs = []
        if len(gathered) == len(leaves):
            return unflatten(spec, gathered)
        remaining = iter(gathered)
        return unflatten(
            spec, [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        )

    def _send_shares(self, modes: tuple[Any, ...]) -> None:
        split, replica_set, template = self._split, self._replica_set, self._template
        replica_set.vacate_channels()
        for worker in self._workers:
            replica = worker.replica
            pending = replica_set.pending[replica]
            layout = template.layouts.get((replica, modes[0]))
            offsets = template.offsets.get(replica)
            if layout is None or offsets is None or pending.has_changes or pending.releases:
                self._send_share(worker, pending, modes)
                continue
            # The hot path: a plain call like an earlier one.
            sources = [
                leaf.data_ptr() + offset for leaf, offset in zip(split.leaves, offsets, strict=True)
            ]
            values = (_FORWARD, (), modes, (), ())
            worker.send(values, self._number, layout, sources, is_repeatable=True)

    def _send_share(
        self, worker: WorkerHandle, pending: PendingUpdates, modes: tuple[Any, ...]
    ) -> None:
        """A share of any kind, with what the worker has not been sent yet."""
        split, template, replica = self._split, self._template, worker.replica
        shares = [split.share(index, replica) for index in template.tensor_indices]
        layout = template.layouts[replica, modes[0]] = self._layout(worker, shares, modes[0])
        attributes = tuple((*key, value) for key, value in pending.attributes.items())
        releases = tuple(pending.releases)
        requires_grad = tuple(pending.requires_grad.items())
        worker.send(
            (_FORWARD, releases, modes, attributes, requires_grad),
            self._number,
            layout,
            [*map(source_of, shares)],
            [split.share(index, replica) for index in template.object_indices],
            is_repeatable=not (releases or attributes or requires_grad),
        )
        pending.sent(len(releases))

    def _layout(
        self, worker: WorkerHandle, shares: Sequence[torch.Tensor], grad: bool
    ) -> MessageLayout:
        metas = tuple(map(meta_of, shares))
        if not grad:
            metas = tuple(meta._replace(requires_grad=False) for meta in metas)
        return worker.layout((self._split.spec, self._template.are_tensors), metas)

    def _abandon(self, error: BaseException) -> None:
        """A step failed on this side; some workers may have an order all the same.

        Every order must be answered before the next one is sent: the answers are read and dropped,
        so that the same workers can serve the next forward.
        """
        self._state = CallState.FAILED
        replica_set = self._replica_set
        # Ctrl-C or an exit: waiting for answers would delay it by the rest of the step. With an
        # exchange the workers may wait for a sum that will never be.
        if not isinstance(error, Exception) or replica_set.exchange is not None:
            replica_set.pool.end()
        if not replica_set.pool.is_alive:
            return
        for worker in self._workers:
            if worker.is_busy:
                replica_set.receive(worker)
        self._release_graphs()

    def _run_module(self, with_gradients: bool) -> Any:
        split, replica_set = self._split, self._replica_set
        shares = [
            ScatterInput.apply(self, index, leaf)  # type: ignore[no-untyped-call]
            if index in self._wanted_inputs
            else split.share(index, 0)
            for index, leaf in enumerate(split.leaves)
        ]
        args, kwargs = (
            (shares, {}) if self._template.is_flat_call else unflatten(split.spec, shares)
        )
        if with_gradients:
            self._proxies = proxies = replica_set.proxies()
            with proxies.in_module, _INSIDE_REPLICA:
                outputs = replica_set.module(*args, **kwargs)
        else:
            with _INSIDE_REPLICA:
                outputs = replica_set.module(*args, **kwargs)
        replica_set.snapshot.accept_forward_changes()
        return outputs

    def _batch_norm(self) -> contextlib.AbstractContextManager[Any]:
        if self._replica_set.exchange is None:
            return _NO_CONTEXT
        return GlobalBatchNorm(self._sum_with_workers)

    def _sum_with_workers(self, vector: torch.Tensor) -> torch.Tensor:
        exchange = self._replica_set.exchange
        assert exchange is not None
        try:
            return exchange.sum_in_main(vector, [worker.pidfd for worker in self._workers])
        except ReplicaFailed:
            self._raise_reason()
            raise

    def _raise_reason(self) -> None:
        """A worker failed where others waited for it: raise its error.

        The others wait for the sum and do not answer.
        """
        for worker in self._workers:
            if worker.has_answered():
                self._raise_failure(worker, self._replica_set.receive(worker))

    def _receive_all(self) -> list[Message]:
        """The workers' answers. The call has failed unless all of them are good."""
        # FAILED until the opposite is known: `receive` ends all workers when it raises, and then
        # there are no graphs for `on_drop` to release. All answers are read before any of them is
        # looked at, or those behind a failure would still be unread when the next order is sent.
        self._state = CallState.FAILED
        receive = self._replica_set.receive
        answers = [receive(worker) for worker in self._workers]
        for worker, answer in zip(self._workers, answers, strict=True):
            if answer.values[0] != _DONE:
                self._raise_failure(worker, answer)
        return answers

    def _raise_failure(self, worker: WorkerHandle, answer: Message) -> None:
        if answer.values[0] == _DONE:
            return
        self._state = CallState.FAILED
        self._release_graphs()
        if self._replica_set.exchange is not None:
            self._replica_set.pool.end()  # sums over replicas do not correspond any more
        # In no variable: with its traceback it would keep the workers alive.
        raise _error_of(worker, answer)

    def _plan_outputs(
        self,
        spec: Spec,
        leaves: list[Any],
        tensors: Sequence[torch.Tensor],
        answers: Sequence[Message],
    ) -> None:
        metas = tuple(map(meta_of, tensors))
        known = self._replica_set.gather_plans
        key = (spec, metas, *self._split.loss_counts, *(answer.layout for answer in answers))
        plans = known.get(key)
        if plans is None or len(tensors) < len(leaves):
            are_tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
            objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
            replicas = [
                ReplicaOutputs(spec, are_tensors, metas, objects),
                *(
                    ReplicaOutputs(spec, are_tensors, answer.layout.metas, answer.objects)
                    for answer in answers
                    for spec, are_tensors in (answer.layout.spec,)
                ),
            ]
            plans = known.add(key, plan_outputs(replicas, self._split, self._scalars))
        self._plans = plans
        self._worker_outputs = [
            worker.tensors(answer.layout)
            for worker, answer in zip(self._workers, answers, strict=True)
        ]

    # --- called by the autograd functions --------------------------------------------------------
    def own_share(self, index: int) -> torch.Tensor:
        """Share 0 of input leaf `index`, as a tensor of its own."""
        share: torch.Tensor = self._split.share(index, 0)
        return share.clone()

    def differentiable(self) -> Sequence[bool]:
        """Which gathered outputs have gradients."""
        return [plan.requires_grad for plan in self._plans]

    def gather_outputs(self, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of all replicas, gathered."""
        parts = zip(own, *self._worker_outputs, strict=True)
        return tuple(plan.gather(tensors) for plan, tensors in zip(self._plans, parts, strict=True))

    def start_backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Send the workers their part of the output gradients; the part of share 0."""
        with self._replica_set.lock:
            self._send_backward(gradients)
        return [
            None if gradient is None else plan.gradient_share(gradient, 0)
            for plan, gradient in zip(self._plans, gradients, strict=True)
        ]

    def _send_backward(self, gradients: Gradients) -> None:
        if not self._workers_keep_graphs:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the replicas' graphs were "
                "freed by the first backward. Specify retain_graph=True there if you need to "
                "backward through it again"
            )
        replica_set = self._replica_set
        if not replica_set.pool.is_alive:
            raise GroupError(
                "the workers of DataParallel that hold the graphs of this forward have ended "
                "(closed, or after a failure in an earlier step); run the forward again"
            )
        retains_graph = keeps_graph()
        # The order matters. An earlier call must copy its gradients before these orders overwrite
        # the channels; and the accumulator must know this call before autograd, which goes on with
        # share 0 when this returns, reaches the parameters.
        replica_set.vacate_channels()
        try:
            self._send_gradients(gradients, retains_graph)
        except BaseException as error:
            self._abandon(error)
            raise
        self._retains_graph = retains_graph
        self._state = CallState.BACKWARD
        self._worker_gradients = []
        replica_set.occupy_channels(self)
        assert self._proxies is not None
        self._proxies.accumulator.expect(self)
        self._limit_threads_until_end()

    def _send_gradients(self, gradients: Gradients, retains_graph: bool) -> None:
        present = tuple(gradient is not None for gradient in gradients)
        for worker in self._workers:
            pending = self._replica_set.pending[worker.replica]
            shares = [
                plan.gradient_share(gradient, worker.replica)
                for plan, gradient in zip(self._plans, gradients, strict=True)
                if gradient is not None
            ]
            metas = tuple(TensorMeta(share.dtype, tuple(share.shape)) for share in shares)
            releases = tuple(pending.releases)
            worker.send(
                (_BACKWARD, releases, retains_graph),
                self._number,
                worker.layout((present,), metas),
                [*map(source_of, shares)],
                is_repeatable=not releases,
            )
            # Only those that were sent: the garbage collector may have added some since.
            del pending.releases[: len(releases)]

    def _limit_threads_until_end(self) -> None:
        """Until backward ends the cores belong to the workers as well."""
        limit = self._replica_set.thread_limit
        if limit.is_in_force and not self._wanted_inputs:
            return  # nothing to set back, and `parameters_done` ends this backward
        limit.__enter__()

        def end() -> None:
            with self._replica_set.lock:
                limit.__exit__(None, None, None)
                self._finish()

        queue_end_of_backward(end)

    def worker_gradients(self) -> list[WorkerGradients]:
        """What the workers computed; waits for them, once per backward."""
        if self._state is CallState.BACKWARD:
            answers = self._receive_all()
            assert self._proxies is not None
            self._worker_gradients = [
                WorkerGradients.decode(answer.layout.spec, worker.tensors(answer.layout), views)
                for worker, answer, views in zip(
                    self._workers, answers, self._proxies.views, strict=False
                )
            ]
            self._state = CallState.GRADIENTS
        if self._state is not CallState.GRADIENTS:
            raise GroupError(
                "the gradients of this forward's replicas are gone: an earlier backward failed"
            )
        return self._worker_gradients

    def input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the whole input leaf `index`."""
        with self._replica_set.lock:
            return self._input_gradient(index, own)

    def _input_gradient(self, index: int, own: torch.Tensor | None) -> torch.Tensor | None:
        position = self._wanted_inputs.index(index)
        parts = [own, *(worker.inputs[position] for worker in self.worker_gradients())]
        if all(part is None for part in parts):
            return None
        split = self._split
        factor = split.factors[index]
        if not factor:
            (total,) = sum_gradients([parts[0]], [[part] for part in parts[1:]])
            return total
        whole = torch.zeros_like(split.leaves[index])
        for (start, stop), part in zip(split.ranges, parts, strict=True):
            if part is not None:
                whole.narrow(split.dim, start * factor, (stop - start) * factor).copy_(part)
        return whole

    def parameters_done(self) -> None:
        """The parameters have their gradients; inputs that want some get them later."""
        if not self._wanted_inputs:
            self._finish()

    def _finish(self) -> None:
        """The gradients of this backward are not needed any more."""
        if self._state is CallState.GRADIENTS and self._replica_set.occupies_channels(self):
            self._replica_set.free_channels()
            self._worker_gradients = []
            self._state = CallState.READY if self._retains_graph else CallState.DONE

    def leave_channels(self) -> None:
        """Another order is about to be sent: gradients that may still be needed are copied."""
        with contextlib.suppress(Exception):  # of a backward whose result is not needed any more
            self._worker_gradients = [worker.copied() for worker in self.worker_gradients()]


def _error_of(worker: WorkerHandle, answer: Message) -> BaseException:
    """A worker's exception, with its traceback as a note."""
    kind, text, data = answer.values
    if kind == _STALE:
        return serialization.UnknownObject(text)
    error: BaseException = RuntimeError(text.strip().splitlines()[-1])
    if data:
        with contextlib.suppress(Exception):
            error = serialization.load_exception(data)
    error.add_note(
        f"raised in replica {worker.replica} of DataParallel (pid {worker.pid}):\n{text}"
    )
    return error
