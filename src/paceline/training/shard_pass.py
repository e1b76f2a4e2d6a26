"""One pass over the shards of a global batch: from the first shard of this rank to the gradient of
all.

    begin(shard)    buffers, gradients and random numbers as every shard finds them
      ...           the script's forward and backward
    end(shard)      gradients go into the tree; buffers and metrics are kept
    complete()      1. every rank's message: which shards it has, buffers, metrics, sparse gradients
                    2. dense gradients, averaged in the order of the tree
                    3. `.grad`, buffers and metrics are set, the same on every rank

Nothing is applied before all shards are in. A rank whose shard fails takes part in the first
exchange to say so, and every rank raises. Where ranks were lost, `complete` finds shards that
nobody has: those are computed, and it is called again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import GroupError, MismatchError, NativeError, StepError
from paceline.training.audit import Audit, Digests, check_audit, digests_of
from paceline.training.balance import Pace
from paceline.training.deferred_nodes import DeferredNodes
from paceline.training.gradient_sums import (
    DENSE,
    SPARSE,
    GradientKinds,
    Gradients,
    add_gradients,
    merged_kinds,
    with_values,
)
from paceline.training.group_exchange import Exchange
from paceline.training.metric_log import MetricLog, global_means
from paceline.training.parameter_set import ParameterSet
from paceline.training.shard_buffers import BufferSet, ChangedBuffers, ShardBuffers
from paceline.training.shard_cover import counted_nodes, missing_shards
from paceline.training.shard_gradients import ShardGradients
from paceline.training.shard_plan import BatchPlan, Shard, deal
from paceline.training.shard_random import ShardSeeds, seed_generators
from paceline.training.training_ranks import TrainingRanks
from paceline.training.tree_sum import Node, TreeSum, subtrees

__all__ = ["PassResult", "PassSetting", "ShardPass"]


@dataclasses.dataclass(frozen=True)
class PassSetting:
    """What all passes of an epoch have in common."""

    model: nn.Module
    parameters: ParameterSet
    buffers: BufferSet
    exchange: Exchange
    threads: int
    # Called when the ranks of the exchange are lost; returns if it can be tried again.
    recover: Callable[[GroupError | NativeError], None]
    # Those that share memory: an optimizer of theirs may take sums in its steps.
    ranks: TrainingRanks | None = None


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What a pass leaves beside gradients and buffers; of each rank, its pace and the shards that
    it has computed.
    """

    metrics: dict[str, float]
    changed_buffers: set[str]
    paces: Sequence[Pace] = ()
    computed: Sequence[Sequence[int]] = ()


class ShardPass:
    """See the module's description. `step` and `number` say which pass this is, in messages."""

    def __init__(
        self,
        setting: PassSetting,
        plan: BatchPlan,
        seeds: ShardSeeds,
        audit: Audit | None,
        *,
        step: int,
        number: int,
    ) -> None:
        self._setting, self._plan, self._seeds = setting, plan, seeds
        self._audit, self._audited = audit, list[Digests]()
        self._step, self._number = step, number
        if setting.ranks is not None:
            setting.ranks.average_what_is_left()  # not zeroed since: this pass adds to it
        self._gradients = ShardGradients(setting.parameters, plan)
        self._buffers = ShardBuffers(setting.buffers, plan)
        self._logs: dict[int, MetricLog] = {}
        self._log = MetricLog(0)

    def begin(self, shard: Shard) -> None:
        """Let a shard find everything as it would on any rank."""
        self._gradients.begin()
        self._log = MetricLog(shard.samples)
        seed_generators(self._seeds.of_shard(shard.number))

    def log(self, name: str, value: float | torch.Tensor) -> None:
        """Keep a metric of the shard that was begun last."""
        self._log.add(name, value)

    def end(self, shard: Shard) -> None:
        """Take what a shard has computed.

        Raises:
            StepError: it computed nothing, or in a way that cannot be repeated elsewhere.
        """
        if self._audit is not None and self._audit.shard == shard:
            self._audited.append(digests_of(self._setting.parameters.parameters))
        if not self._gradients.take(shard):
            raise StepError(
                f"no parameter has a gradient after shard {shard.number}: call loss.backward() for "
                "every shard, inside the loop over batch.shards()"
            )
        if self._setting.parameters.has_late_gradients():
            raise StepError(
                f"a parameter that required no gradient when the loop over batch.shards() began "
                f"has one after shard {shard.number}: call requires_grad_() before the loop"
            )
        if (threads := torch.get_num_threads()) != self._setting.threads:
            raise StepError(
                f"torch.get_num_threads() is {threads} after shard {shard.number}, but the number "
                f"of threads is part of the bits and was set to {self._setting.threads}: give "
                "paceline.Training(threads=...) and do not call torch.set_num_threads()"
            )
        self._buffers.take(shard)
        self._logs[shard.number] = self._log

    def end_audit(self, shard: Shard) -> None:
        """Take the digests of a shard that another rank has computed, too, and nothing else."""
        self._audited.append(digests_of(self._setting.parameters.parameters))
        self.forget_shard()

    def forget_shard(self) -> None:
        """Leave no trace of the shard that was begun last."""
        self._gradients.clear()
        self._buffers.put_back()

    def abandon(self) -> None:
        """Leave gradients and buffers as they were before the pass."""
        self._buffers.put_back()
        self._gradients.put_back()

    def complete(
        self, pace: Pace, failure: StepError | None = None
    ) -> PassResult | Sequence[Shard]:
        """Exchange everything with the other ranks; then `.grad` is final. Or else return shards
        that no rank has and this one is to compute before it calls again.

        Raises:
            StepError: a rank failed.
            MismatchError: ranks are not in the same step, or computed one shard differently.
            GroupError, NativeError: ranks were lost, perhaps while memory was shared with them. It
                can be called again when there is an exchange again.
        """
        exchange = self._setting.exchange
        try:
            received = exchange.gather(*self._own_message(pace, failure))
            messages = [_Message(*message) for message in received]
            self._check_places(messages, failure)
            computed = [message.shards for message in messages]
            if missing := missing_shards(computed, self._plan.shards):
                return deal(missing, exchange.size)[exchange.rank]
            self._check_audit(messages)
            self._check_metrics(messages)
            means = self._average(messages)
        except BaseException:
            self._gradients.put_back()
            raise
        self._gradients.finish(means)
        by_shard = {
            number: values for message in messages for number, values in message.buffers.items()
        }
        changed = self._buffers.finish(by_shard)
        metrics = {number: sums for message in messages for number, sums in message.metrics.items()}
        seed_generators(self._seeds.after)
        means_of_metrics = global_means(metrics[n] for n in sorted(metrics))
        return PassResult(
            means_of_metrics,
            changed,
            [message.pace for message in messages],
            [message.shards for message in messages],
        )

    # --- messages ---------------------------------------------------------------------------------

    def _own_message(
        self, pace: Pace, failure: StepError | None
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        if failure is not None:
            return {"place": self._place, "failure": str(failure)}, []
        tensors: list[torch.Tensor] = []
        buffers = []
        for shard, changes in self._buffers.changed.items():
            buffers.append([shard, changes.numbers, list(changes.values)])
            tensors += changes.values.values()
        kinds = self._gradients.kinds()
        if not self._may_leave_loose(kinds):
            self._gradients.add_loose()
        sparse = []
        for node, gradients in self._gradients.nodes.items() if SPARSE in kinds else ():
            for number, gradient in enumerate(gradients):
                if gradient is not None and gradient.is_sparse:
                    sparse.append([node, number, list(gradient.shape)])
                    tensors += [gradient.indices(), gradient.values()]
        facts = {
            "place": self._place,
            "kinds": kinds,
            "loose": self._gradients.loose,
            "buffers": buffers,
            "sparse": sparse,
            "audited": self._audited,
            "pace": tuple(pace),  # plain: pickled in a third of the time
            "may_leave_sums": self._deferred is not None,
            "metrics": [[number, log.sums()] for number, log in self._logs.items()],
        }
        return facts, tensors

    def _may_leave_loose(self, kinds: GradientKinds) -> bool:
        """Whether a sum more costs the exchange less than it costs here."""
        setting = self._setting
        return (
            setting.exchange.adds_in_passing
            and setting.parameters.are_on_host
            and SPARSE not in kinds
        )

    @property
    def _place(self) -> str:
        return f"step {self._step}, pass {self._number}"

    def _check_places(self, messages: Sequence[_Message], failure: StepError | None) -> None:
        places = {rank: message.place for rank, message in enumerate(messages)}
        if len(set(places.values())) > 1:
            raise MismatchError(
                f"ranks are in different steps: {places}. Code outside of the loop over "
                "batch.shards() must do the same on every rank",
                places,
            )
        for rank, message in enumerate(messages):
            if message.failure is not None:
                raise StepError(
                    f"{self._place} counts on no rank, because rank {rank} failed: "
                    f"{message.failure}",
                    rank,
                ) from failure

    def _check_metrics(self, messages: Sequence[_Message]) -> None:
        """A name that some shards have not logged would have the mean of the others."""
        logged = {number: set(sums) for each in messages for number, sums in each.metrics.items()}
        if len({*map(frozenset, logged.values())}) == 1:
            return
        names = set[str]().union(*logged.values())
        name, lacking = next(
            (name, lacking)
            for name in sorted(names)
            if (lacking := [number for number, own in sorted(logged.items()) if name not in own])
        )
        ranks = [rank for rank, each in enumerate(messages) if {*lacking} & {*each.metrics}]
        raise StepError(
            f"{self._place} counts on no rank: {name!r} was not logged for shards {lacking} (of "
            f"ranks {ranks}), but for others, so it has no mean over the global batch. Call "
            "batch.log for every shard, on every rank; a tensor without elements counts for nothing"
        )

    def _check_audit(self, messages: Sequence[_Message]) -> None:
        if self._audit is not None:
            found = [
                (rank, each) for rank, message in enumerate(messages) for each in message.audited
            ]
            names = self._setting.parameters.names
            check_audit(self._place, self._audit.shard.number, found, names)

    # --- gradients --------------------------------------------------------------------------------

    def _average(self, messages: Sequence[_Message]) -> Gradients:
        kinds = merged_kinds([message.kinds for message in messages])
        nodes = self._nodes(messages)
        try:
            if not kinds.strip(DENSE):
                own, deferred = self._own_nodes(nodes), self._deferred
                if deferred is not None and all(nodes) and all(m.may_leave_sums for m in messages):
                    forms = self._setting.parameters.dense_forms(kinds)
                    return deferred.leave(own, nodes, forms, self._plan)
                return self._average_nodes(own, nodes, kinds)
            dense = self._average_dense(nodes, kinds)
        except (GroupError, NativeError):
            # The exchange may have used up what it was given.
            self._forget()
            raise
        means = {**dense, **self._average_sparse(messages, nodes, kinds)}
        return [means.get(number) for number in range(len(kinds))]

    @property
    def _deferred(self) -> DeferredNodes | None:
        """Where sums are left to the next step, as far as this rank knows."""
        setting = self._setting
        deferred = None if setting.ranks is None else setting.ranks.deferred
        if (
            deferred is None
            or self._gradients.carries
            or not setting.parameters.are_summed_as_they_are
            or not deferred.covers(setting.parameters)
        ):
            return None
        return deferred

    def _nodes(self, messages: Sequence[_Message]) -> Sequence[Sequence[Node]]:
        """The nodes that count, by rank."""
        leaves = len(self._plan.shards)
        held = [subtrees(message.shards, leaves, message.loose) for message in messages]
        is_twice = sum(len(message.shards) for message in messages) > leaves
        return counted_nodes(held) if is_twice else held

    def _forget(self) -> None:
        """Count no shard as computed."""
        self._gradients.forget()
        self._buffers.changed.clear()
        self._logs.clear()
        self._audited.clear()

    def _average_dense(
        self, nodes: Sequence[Sequence[Node]], kinds: GradientKinds
    ) -> dict[int, torch.Tensor | None]:
        numbers = [number for number, kind in enumerate(kinds) if kind == DENSE]
        if not numbers:
            return {}
        own = {
            node: [gradients[number] for number in numbers]
            for node, gradients in self._own_nodes(nodes).items()
        }
        means = self._average_nodes(own, nodes, kinds)
        return dict(zip(numbers, means, strict=True))

    def _own_nodes(self, nodes: Sequence[Sequence[Node]]) -> dict[Node, Gradients]:
        """Those of this rank's sums that count, which are not needed here any more."""
        held = self._gradients.take_nodes()
        return {node: held[node] for node in nodes[self._setting.exchange.rank]}

    def _average_nodes(
        self,
        own: dict[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        kinds: GradientKinds,
    ) -> Gradients:
        return self._setting.exchange.average_nodes(
            own,
            nodes,
            self._setting.parameters.dense_forms(kinds),
            self._plan,
        )

    def _average_sparse(
        self, messages: Sequence[_Message], nodes: Sequence[Sequence[Node]], kinds: GradientKinds
    ) -> dict[int, torch.Tensor | None]:
        numbers = [number for number, kind in enumerate(kinds) if kind == SPARSE]
        if not numbers:
            return {}
        # All of them travelled in the messages: every rank adds all.
        tree = TreeSum[Gradients](len(self._plan.shards), add_gradients)
        for message, own in zip(messages, nodes, strict=True):
            for node in own:
                tree.add_node(node, [message.sparse.get((node, number)) for number in numbers])
        parameters = self._setting.parameters.parameters
        means: dict[int, torch.Tensor | None] = {}
        for number, total in zip(numbers, tree.root, strict=True):
            if total is not None:
                mean = with_values(total, total.values() / self._plan.total_weight)
                means[number] = mean.to(parameters[number].device)
        return means


class _Message:
    """What one rank says at the end of a pass."""

    def __init__(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        self.place: str = facts["place"]
        self.failure: str | None = facts.get("failure")
        self.kinds: GradientKinds = facts.get("kinds", "")
        self.loose: int | None = facts.get("loose")
        self.metrics = dict(facts.get("metrics", []))
        self.audited: list[Digests] = facts.get("audited", [])
        self.may_leave_sums: bool = facts.get("may_leave_sums", False)
        self.pace = Pace(*facts.get("pace", (None, 0.0)))
        following = iter(tensors)
        self.buffers = {
            shard: ChangedBuffers(numbers, {group: next(following) for group in groups})
            for shard, numbers, groups in facts.get("buffers", [])
        }
        self.sparse: dict[tuple[Node, int], torch.Tensor] = {}
        for (level, index), number, shape in facts.get("sparse", []):
            indices, values = next(following), next(following)
            self.sparse[(level, index), number] = torch.sparse_coo_tensor(
                indices, values, shape, is_coalesced=True, check_invariants=False
            )

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards this rank has computed."""
        return tuple(sorted(self.buffers))
