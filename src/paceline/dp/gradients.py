"""Everything that happens to gradients: captured in a worker, handed over, summed in the main
process.

    worker         GradientCapture     every gradient of one backward ends here
                   encode_gradients    those of parameters go to the worker's GradientRegion, sparse
                                       ones and those of inputs into the answer
    main process   WorkerGradients     one worker's gradients, as the answer describes them
                   GradientAccumulator adds all workers' gradients to our own

Sums are taken in the order of the replicas: the same bits each time. The usual case is one native
call on either side: the worker copies all its gradients into its region, and the main process adds
all regions to its own gradients, if nothing else refers to those.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import operator
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch

from paceline._torch_internals import current_graph_task, foreach_copy_
from paceline.backend.host_engine import DTYPE_CODES
from paceline.core.kernels import add_pieces, copy_pieces
from paceline.dp.autograd_functions import CaptureGradients, Gradients, exclusively_owned
from paceline.dp.protocol import GradientKind, is_plain
from paceline.dp.shared_parameters import SharedParameters, Slot, aligned_bytes, view_like
from paceline.errors import GroupError

__all__ = [
    "BackwardCall",
    "GradientAccumulator",
    "GradientCapture",
    "GradientRegion",
    "GradientViews",
    "WorkerGradients",
    "encode_gradients",
    "sum_gradients",
]

_address = torch.Tensor.data_ptr
_Kind = int | tuple[int, ...]  # a GradientKind, or the shape of a sparse gradient
_Spec = tuple[_Kind | tuple[_Kind, ...], int]  # the kinds, and how many of them are parameters'


# ---------------------------------------------------------------------- shared memory


class GradientRegion:
    """Where one worker leaves the gradients of the parameters, in memory both sides have mapped.

    Made before the fork. Pages that no gradient is written to do not exist.
    """

    def __init__(self, parameters: SharedParameters) -> None:
        tensors = parameters.tensors
        memory = mmap.mmap(-1, max(sum(map(aligned_bytes, tensors)), mmap.PAGESIZE))
        self.tensors: list[torch.Tensor] = []
        offset = 0
        for parameter in tensors:
            self.tensors.append(view_like(parameter, memory, offset))
            offset += aligned_bytes(parameter)


class GradientViews:
    """Some parameters' gradients in a region, for copying or adding all of them in one call."""

    def __init__(self, region: GradientRegion, indices: Sequence[int]) -> None:
        self.tensors = [region.tensors[index] for index in indices]
        self.addresses = array("Q", [view.data_ptr() for view in self.tensors])
        self.counts = array("Q", [view.numel() for view in self.tensors])
        self.dtypes = array("I", [DTYPE_CODES.get(view.dtype, 0) for view in self.tensors])
        self._nbytes = array("Q", [view.nbytes for view in self.tensors])
        self._are_plain = all(
            view.is_contiguous() and view.is_floating_point() and view.dtype in DTYPE_CODES
            for view in self.tensors
        )

    def addresses_of(self, gradients: Gradients) -> array[int] | None:
        """The addresses of gradients that lie in memory as the views do.

        None if some do not, or are missing.
        """
        if not self._are_plain:
            return None
        for gradient in gradients:
            if (
                gradient is None
                or gradient.layout is not torch.strided
                or not gradient.is_contiguous()
                or gradient.is_neg()  # negated when read
            ):
                return None
        return array("Q", map(_address, cast("Sequence[torch.Tensor]", gradients)))

    def fill(self, addresses: array[int]) -> None:
        """Copy from there."""
        copy_pieces(self.addresses, addresses, self._nbytes)


# -------------------------------------------------------------------------- in a worker


@dataclasses.dataclass
class GradientCapture:
    """Catches the gradients of the parameters that require one.

    The module computes with proxies of the parameters, whose gradients come here. `captured` has an
    entry for each time a backward did: one, unless the module runs backwards of its own. `direct`
    are parameters that code used without the proxy, as LSTMs do: their gradients are in `.grad`.
    """

    parameters: list[torch.Tensor]
    views: GradientViews
    captured: list[Gradients]
    direct: list[torch.Tensor]

    @classmethod
    def install(cls, slots: Sequence[Slot], region: GradientRegion) -> GradientCapture:
        """Put proxies in place of the parameters."""
        indices = [index for index, slot in enumerate(slots) if slot.parameter.requires_grad]
        parameters = [slots[index].parameter for index in indices]
        capture = cls(parameters, GradientViews(region, indices), [], [])
        # The proxies are outputs of one node, so that autograd delivers all gradients in one call.
        # The node needs an input that requires a gradient, or its outputs would not require any.
        root = torch.empty(0, requires_grad=True)
        apply: Callable[..., tuple[torch.Tensor, ...]] = CaptureGradients.apply
        proxies = iter(apply(capture.captured, parameters, root) if indices else ())
        for parameter in parameters:
            earlier_hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if earlier_hooks:
                earlier_hooks.clear()
            parameter.register_post_accumulate_grad_hook(capture.direct.append)
        for slot in slots:
            tensor = next(proxies) if slot.parameter.requires_grad else slot.parameter
            for holder, name in slot.entries:
                holder[name] = tensor
        return capture

    def take(self) -> Gradients:
        """What was captured since the last time, for each parameter."""
        if len(self.captured) == 1 and not self.direct:
            return self.captured.pop()  # the usual case
        sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        for gradients in self.captured:
            _add_each(sums, gradients)
        if self.direct:
            _add_each(sums, [parameter.grad for parameter in self.parameters])
            for parameter in self.direct:
                parameter.grad = None
        self.captured.clear()
        self.direct.clear()
        return sums


def _add_each(sums: list[torch.Tensor | None], terms: Gradients) -> None:
    for index, term in enumerate(terms):
        if term is not None:
            before = sums[index]
            sums[index] = term if before is None else before + term


def encode_gradients(
    views: GradientViews, parameters: Gradients, inputs: Gradients
) -> tuple[_Spec, list[torch.Tensor]]:
    """Copy dense gradients of parameters to the region.

    Returns the spec of the answer, for `WorkerGradients.decode`, and the tensors to send with it.
    """
    count = len(parameters)
    if not inputs and (addresses := views.addresses_of(parameters)) is not None:
        views.fill(addresses)  # the usual case, in as few steps as possible
        return (GradientKind.ALL_DENSE, count), []
    kinds: list[_Kind] = []
    dense: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    for index, gradient in enumerate((*parameters, *inputs)):
        if gradient is None:
            kinds.append(GradientKind.MISSING)
        elif gradient.is_sparse:
            kinds.append(tuple(gradient.shape))
            coalesced = gradient.coalesce()
            sent += [coalesced.indices(), coalesced.values()]
        else:
            kinds.append(GradientKind.DENSE)
            if index < count:
                dense.append(gradient)
                targets.append(views.tensors[index])
            else:
                sent.append(gradient)
    if dense:
        with torch.no_grad():
            foreach_copy_(targets, dense)
    return (tuple(kinds), count), sent


# ------------------------------------------------------------------ in the main process


@dataclasses.dataclass
class WorkerGradients:
    """Gradients one worker computed.

    `all_in_region`: every parameter has one, each at its offset in the worker's region.
    """

    parameters: Gradients
    inputs: Gradients
    all_in_region: bool = False

    @classmethod
    def decode(
        cls, spec: _Spec, sent: Sequence[torch.Tensor], views: GradientViews
    ) -> WorkerGradients:
        """What `encode_gradients` described."""
        kinds, count = spec
        if kinds == GradientKind.ALL_DENSE:
            return cls(views.tensors, [], all_in_region=True)
        tensors = iter(sent)
        gradients: list[torch.Tensor | None] = []
        for index, kind in enumerate(cast("tuple[_Kind, ...]", kinds)):
            if kind == GradientKind.MISSING:
                gradients.append(None)
            elif kind == GradientKind.DENSE:
                gradients.append(views.tensors[index] if index < count else next(tensors))
            else:
                indices, values = next(tensors).clone(), next(tensors).clone()
                gradients.append(
                    torch.sparse_coo_tensor(
                        indices,
                        values,
                        cast("tuple[int, ...]", kind),
                        is_coalesced=True,
                        check_invariants=False,
                    )
                )
        return cls(gradients[:count], gradients[count:])

    def copied(self) -> WorkerGradients:
        """The same in memory of their own: the region and the channel are about to be reused."""
        return WorkerGradients(
            [None if gradient is None else gradient.clone() for gradient in self.parameters],
            [None if gradient is None else gradient.clone() for gradient in self.inputs],
        )


class BackwardCall(Protocol):
    """A call that a backward goes through."""

    def worker_gradients(self) -> list[WorkerGradients]:
        """What the workers computed; waits for them."""

    def parameters_done(self) -> None:
        """The gradients of parameters were used."""


class GradientAccumulator:
    """Adds what workers computed to our own gradients, for all calls of one backward.

    Autograd's node refers to this and must not lead back to itself: calls are referred to weakly.
    """

    def __init__(self, views: Sequence[GradientViews], lock: threading.RLock) -> None:
        self._views = views
        self._lock = lock
        # Addresses in the regions of one worker, of two, ...: as many as a batch was split among.
        self._addresses = [
            functools.reduce(operator.add, [each.addresses for each in views[:count]])
            for count in range(1, len(views) + 1)
        ]
        self._calls: dict[int, list[weakref.ref[BackwardCall]]] = {}

    def expect(self, call: BackwardCall) -> None:
        """The backward that runs now goes through this call."""
        # By graph task, because backwards nest: a hook or a checkpoint may run one inside another,
        # and each must sum the gradients of its own calls only.
        task = current_graph_task()
        if task not in self._calls:
            # A backward that failed did not take its calls; one that this one is nested in will.
            self._calls = {
                other: refs for other, refs in self._calls.items() if any(ref() for ref in refs)
            }
            self._calls[task] = []
        self._calls[task].append(weakref.ref(call))

    def sums(self, own: Gradients) -> Gradients:
        """Our own gradients with the workers' added, in place where nothing else refers to ours."""
        # Checked before the workers' answers are waited for: while they are busy it costs nothing.
        owned = exclusively_owned(own)
        with self._lock:
            return self._sums(own, owned)

    def _sums(self, own: Gradients, owned: Sequence[bool]) -> Gradients:
        refs = self._calls.pop(current_graph_task(), ())
        calls = [call for ref in refs if (call := ref()) is not None]
        if not calls:
            raise GroupError(
                "a backward reached parameters of DataParallel, but none of its outputs, so the "
                "gradients of the other replicas are missing. Return from forward what you want to "
                "differentiate"
            )
        addresses = self._views[0].addresses_of(own) if all(owned) else None
        others = [each for call in calls for each in call.worker_gradients()]
        sums = own
        if (
            addresses is not None
            and len(calls) == 1
            and all(gradients.all_in_region for gradients in others)
        ):
            views = self._views[0]
            sources = self._addresses[len(others) - 1]
            add_pieces(addresses, len(others), sources, views.counts, views.dtypes)
        else:
            sums = sum_gradients(own, [gradients.parameters for gradients in others], owned)
        for call in calls:
            call.parameters_done()
        return sums


def sum_gradients(
    own: Gradients, others: Sequence[Gradients], owned: Sequence[bool] | None = None
) -> list[torch.Tensor | None]:
    """For each parameter, the sum over the replicas; None where none has a gradient.

    The sums do not lie in the others' memory, which is reused. Where nothing else refers to our own
    term (`owned`), it becomes the sum.
    """
    sums: list[torch.Tensor | None] = [None] * len(own)
    native: list[int] = []
    for index, terms in enumerate(zip(own, *others, strict=True)):
        present = [term for term in terms if term is not None]
        if len(present) == len(terms) and all(map(_is_plain_number, present)):
            native.append(index)
            is_owned = owned is not None and owned[index]
            sums[index] = present[0] if is_owned else present[0].clone()
        elif len(present) == 1:
            sums[index] = present[0] if terms[0] is not None else present[0].clone()
        elif present:
            sums[index] = functools.reduce(operator.add, present)
    if native:
        totals = [cast("torch.Tensor", sums[index]) for index in native]
        add_pieces(
            array("Q", map(_address, totals)),
            len(others),
            array(
                "Q", [_address(cast("torch.Tensor", each[i])) for each in others for i in native]
            ),
            array("Q", [total.numel() for total in totals]),
            array("I", [DTYPE_CODES[total.dtype] for total in totals]),
        )
    return sums


def _is_plain_number(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.dtype in DTYPE_CODES
