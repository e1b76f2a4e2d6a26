"""How ranks bring the parts of a pass together: alone, or on any process group of torch.

Two steps. `gather` brings every rank's message to all. `average_nodes` adds gradients in the order
of the tree: each rank gets its slice of every node from those who hold one (all-to-all), adds
these, and all get all slices (all-gather). That moves as many bytes as an all-reduce where every
rank holds one node, as it does when the numbers of shards and of ranks are powers of two. The group
only moves bytes: no sum is left to it.

Two ranks that hold one node each are an exception. Only one sum is left, of two numbers, which has
one order: there the group's all-reduce will do, for large gradients where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paceline._torch_internals import device_types_of, foreach_copy_, foreach_div_
from paceline.training.gradient_sums import Gradients
from paceline.training.parameter_set import Forms
from paceline.training.shard_plan import BatchPlan
from paceline.training.tensor_message import decode, encode
from paceline.training.tree_sum import Node, TreeSum
from paceline.training.work_sharing import WorkSharing

__all__ = ["Exchange", "Facts", "GroupExchange", "Message", "SingleRank"]

# Numbers between the beginnings of two gradients, at least: 64 bytes of float32.
_STRIDE = 16
# Gradients of this size and more are not copied where it can be avoided.
_LARGE_BYTES = 1024 * 1024
_FIRST_MESSAGE_BYTES = 4096
_LENGTH_BYTES = 16


Facts: TypeAlias = Mapping[str, Any]
Message: TypeAlias = tuple[Facts, Sequence[torch.Tensor]]


class Exchange(Protocol):
    """What a pass needs of the other ranks."""

    rank: int
    size: int
    sharing: WorkSharing
    # Whether `average_nodes` adds nodes of one rank in less time than the rank itself.
    adds_in_passing: bool

    def gather(self, facts: Facts, tensors: Sequence[torch.Tensor] = ()) -> list[Message]:
        """Every rank's facts and tensors, in the order of ranks."""

    def average_nodes(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        """The sum of all ranks' nodes, divided by the weight of all shards. Uses the nodes up; None
        in one counts as zeros.

        Args:
            own: this rank's nodes.
            nodes: which nodes each rank has.
            forms: of each gradient.
            plan: of the global batch.
        """


class SingleRank:
    """A single process, which has all shards."""

    rank, size = 0, 1
    adds_in_passing = False

    def __init__(self, sharing: WorkSharing) -> None:
        self.sharing = sharing

    def gather(self, facts: Facts, tensors: Sequence[torch.Tensor] = ()) -> list[Message]:
        return [(facts, tensors)]

    def average_nodes(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        (total,) = own.values()
        present = [gradient for gradient in total if gradient is not None]
        if present and plan.total_weight != 1:
            foreach_div_(present, plan.total_weight)
        return total


class GroupExchange:
    """The ranks of a process group."""

    # Every node travels.
    adds_in_passing = False

    def __init__(self, group: dist.ProcessGroup, sharing: WorkSharing) -> None:
        self._group, self.sharing = group, sharing
        self.rank, self.size = group.rank(), group.size()
        self._message_bytes = _FIRST_MESSAGE_BYTES
        kinds = device_types_of(group)
        self._message_device = torch.device("cpu" if "cpu" in kinds else sorted(kinds)[0])
        self._layouts: dict[int, tuple[Forms, list[_FlatLayout]]] = {}

    def gather(self, facts: Facts, tensors: Sequence[torch.Tensor] = ()) -> list[Message]:
        return [decode(message) for message in self._gather_bytes(encode(facts, tensors))]

    def _gather_bytes(self, message: torch.Tensor) -> list[torch.Tensor]:
        # The length, then as much as fits: a longer message needs a second round, and from then on
        # there is room for it. All see all lengths, so all decide alike.
        length = torch.tensor([message.numel(), 0]).view(torch.uint8)
        whole = torch.cat([length, message])
        received = self._gather_equal(whole)
        lengths = [int(each[:_LENGTH_BYTES].view(torch.int64)[0]) for each in received]
        if max(lengths) + _LENGTH_BYTES > self._message_bytes:
            self._message_bytes = 2 * (max(lengths) + _LENGTH_BYTES)
            received = self._gather_equal(whole)
        return [
            each[_LENGTH_BYTES : _LENGTH_BYTES + length]
            for each, length in zip(received, lengths, strict=True)
        ]

    def _gather_equal(self, whole: torch.Tensor) -> list[torch.Tensor]:
        sent = torch.zeros(self._message_bytes, dtype=torch.uint8)
        fitting = whole[: self._message_bytes]
        sent[: fitting.numel()] = fitting
        received = torch.empty(
            (self.size, self._message_bytes), dtype=torch.uint8, device=self._message_device
        )
        dist.all_gather(list(received), sent.to(self._message_device), group=self._group)
        return list(received.cpu())

    def average_nodes(
        self,
        own: Mapping[Node, Gradients],
        nodes: Sequence[Sequence[Node]],
        forms: Forms,
        plan: BatchPlan,
    ) -> Gradients:
        total: Gradients = [None] * len(forms)
        if self.size == 2 and [len(each) for each in nodes] == [1, 1]:
            (gradients,) = own.values()
            self._average_pair(gradients, forms, plan.total_weight, total)
            return total
        for layout in self._flat_layouts(forms, range(len(forms))):
            flat = [layout.flatten(own[node]) for node in nodes[self.rank]]
            layout.unflatten(self._average_flat(flat, nodes, layout, plan), total)
        return total

    def _average_pair(
        self, gradients: Gradients, forms: Forms, total_weight: int, total: Gradients
    ) -> None:
        """The mean from this rank's node and the other's."""
        small = [number for number, form in enumerate(forms) if form.nbytes < _LARGE_BYTES]
        for layout in self._flat_layouts(forms, small):
            flat = layout.flatten(gradients)
            dist.all_reduce(flat, group=self._group)
            layout.unflatten(flat.div_(total_weight), total)
        for number in sorted(set(range(len(forms))) - set(small)):
            gradient = forms[number].laid_out(gradients[number])
            dist.all_reduce(gradient.as_strided((gradient.numel(),), (1,)), group=self._group)
            total[number] = gradient.div_(total_weight)

    def _flat_layouts(self, forms: Forms, members: Sequence[int]) -> list[_FlatLayout]:
        # The same in nearly every pass. Members are all of them or the small ones, so that their
        # number says which.
        made_for, layouts = self._layouts.get(len(members), ((), []))
        if made_for is not forms:
            layouts = _flat_layouts(forms, members, self.size)
            self._layouts[len(members)] = (forms, layouts)
        return layouts

    def _average_flat(
        self,
        own: list[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
        layout: _FlatLayout,
        plan: BatchPlan,
    ) -> torch.Tensor:
        slice_length = layout.length // self.size
        counts = [len(each) for each in nodes]
        # 1. Slice r of this rank's nodes to rank r; this rank's slice of all nodes from the others.
        if len(own) == 1:
            sent = own.pop()
        else:
            slices = [node.split(slice_length) for node in own]
            sent = torch.cat(
                [each[rank] for rank in range(self.size) for each in slices] or [layout.new(0)]
            )
        own.clear()
        received = layout.new(slice_length * sum(counts))
        dist.all_to_all_single(
            received,
            sent,
            [slice_length * count for count in counts],
            [slice_length * counts[self.rank]] * self.size,
            group=self._group,
        )
        del sent
        # 2. The mean of this rank's slice, summed in the order of the tree.
        tree = TreeSum[torch.Tensor](len(plan.shards), lambda left, right: left.add_(right))
        every = [node for each in nodes for node in each]
        for node, part in zip(every, received.split(slice_length), strict=True):
            tree.add_node(node, part)
        # 3. All slices to all.
        mean = layout.new(layout.length)
        own_slice = tree.root.div_(plan.total_weight)
        dist.all_gather(list(mean.split(slice_length)), own_slice, group=self._group)
        return mean


class _FlatLayout:
    """Where the gradients of one type and device stand in one flat tensor.

    Each begins at a multiple of 64 bytes, and the length is divided by the number of ranks. Neither
    has an influence on the sums, which are taken number by number; the addresses have on kernels
    that read the gradients later.
    """

    def __init__(self, forms: Forms, members: Sequence[int], ranks: int) -> None:
        self._forms = [forms[number] for number in members]
        self._members = members
        self._dtype, self._device = self._forms[0].dtype, self._forms[0].device
        self._offsets, at = [], 0
        for form in self._forms:
            self._offsets.append(at)
            at += _rounded_up(form.numel, _STRIDE)
        self.length = _rounded_up(max(at, 1), _STRIDE * ranks)

    def new(self, length: int) -> torch.Tensor:
        """A flat tensor with nothing in it."""
        return torch.empty(length, dtype=self._dtype, device=self._device)

    def flatten(self, gradients: Gradients) -> torch.Tensor:
        """A node as a flat tensor."""
        flat = self.new(self.length).zero_()
        views, present = [], []
        for view, number in zip(self._views(flat), self._members, strict=True):
            gradient = gradients[number]
            if gradient is not None:
                views.append(view)
                present.append(gradient)
        if present:
            foreach_copy_(views, present)
        return flat

    def unflatten(self, flat: torch.Tensor, into: Gradients) -> None:
        """Views of a flat tensor, each at its number."""
        for number, view in zip(self._members, self._views(flat), strict=True):
            into[number] = view

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(form.shape, form.strides, offset)
            for form, offset in zip(self._forms, self._offsets, strict=True)
        ]


def _flat_layouts(forms: Forms, members: Sequence[int], ranks: int) -> list[_FlatLayout]:
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in members:
        alike.setdefault((forms[number].dtype, forms[number].device), []).append(number)
    return [_FlatLayout(forms, numbers, ranks) for numbers in alike.values()]


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
