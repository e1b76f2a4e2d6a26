"""Are the replicas one model? Checked before training by description, during training by digest of
the weights.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence

import torch

from paceline.ddp.transport import Transport
from paceline.errors import MismatchError

__all__ = ["DriftCheck", "check_same_model", "describe", "differences", "digest"]

_SHOWN = 10
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(
    parameters: Iterable[tuple[str, torch.Tensor]], buffers: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """What must be equal on all ranks, in order: name -> description."""
    description = {
        "torch version": torch.__version__,
        "byte order and machine": platform.machine(),
    }
    for name, tensor in parameters:
        frozen = "" if tensor.requires_grad else ", requires_grad=False"
        description[name] = f"{_shape(tensor)}{frozen}"
    for name, tensor in buffers:
        description[f"buffer {name}"] = _shape(tensor)
    return description


def _shape(tensor: torch.Tensor) -> str:
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        text += f", strides {tensor.stride()}"
    return text


def check_same_model(transport: Transport, description: Mapping[str, str]) -> None:
    """Compare descriptions over all ranks. One small exchange when they agree; every rank raises
    when they do not.
    """
    text = json.dumps(list(description.items()))
    fingerprint = hashlib.sha256(text.encode()).digest()
    row = torch.frombuffer(bytearray(fingerprint), dtype=torch.int32).clone()
    table = transport.all_gather_small(row)
    if bool((table == row).all()):
        return
    items_by_rank = [json.loads(gathered) for gathered in transport.all_gather_text(text)]
    descriptions_by_rank = [dict(items) for items in items_by_rank]
    orders = [[name for name, _ in items] for items in items_by_rank]
    differing = differences(descriptions_by_rank, orders)
    lines = "\n".join(f"  {line}" for line in differing[:_SHOWN])
    more = f"\n  and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    values = {
        rank: "\n".join(f"{name}: {value}" for name, value in items)
        for rank, items in enumerate(items_by_rank)
    }
    raise MismatchError(
        f"the model is not the same on all ranks (this is rank {transport.rank}):\n{lines}{more}\n"
        "Build the same model, in the same order and dtype, on every rank, and wrap it with the "
        "same arguments.",
        values,
    )


def differences(
    descriptions_by_rank: Sequence[Mapping[str, str]], orders: Sequence[Sequence[str]]
) -> list[str]:
    """One line per name that ranks disagree about; if the names agree, where their order first
    differs.
    """
    names = dict.fromkeys(name for order in orders for name in order)
    lines = []
    for name in names:
        values = [description.get(name, "missing") for description in descriptions_by_rank]
        if len(set(values)) > 1:
            lines.append(
                f"{name}: " + ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            )
    if lines:
        return lines
    for position, at in enumerate(zip(*orders, strict=True)):
        if len(set(at)) > 1:
            names_there = ", ".join(f"rank {rank} {name}" for rank, name in enumerate(at))
            return [f"registered in another order, first at position {position}: {names_there}"]
    return ["the models differ, but no single parameter or buffer could be identified"]


class DriftCheck:
    """Every so many steps: do the replicas still have the same weights? Names the first parameter
    that differs.
    """

    def __init__(
        self, transport: Transport, named: Sequence[tuple[str, torch.Tensor]], every: int
    ) -> None:
        self._transport, self._named, self.every = transport, named, every
        self._steps = 0

    def after_step(self) -> None:
        """Call after each exchange of gradients, on every rank."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.compare()

    def compare(self) -> None:
        digests = digest(tensor for _, tensor in self._named)
        # A weighted sum, so that equal changes of two parameters in opposite directions are seen.
        weights = torch.arange(1, len(digests) + 1, dtype=torch.int64)
        table = self._transport.all_gather_small((digests * weights).sum().reshape(1))
        if bool((table == table[0]).all()):
            return
        digests_by_rank = self._transport.all_gather_small(digests)
        differing = (digests_by_rank != digests_by_rank[0]).any(dim=0).nonzero().flatten().tolist()
        names = [self._named[i][0] for i in differing]
        values = {
            rank: str(digests_by_rank[rank, differing[0]].item())
            for rank in range(self._transport.world)
        }
        away = [
            rank
            for rank in range(1, len(digests_by_rank))
            if bool((digests_by_rank[rank] != digests_by_rank[0]).any())
        ]
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )
        raise MismatchError(
            f"the replicas drifted apart: {shown} differ between rank 0 and rank "
            f"{', '.join(map(str, away))} (this is rank {self._transport.rank}, after "
            f"{self._steps} steps). Something changed the weights of one rank only: a step or load "
            "that not every rank takes, or an optimizer with other settings.",
            values,
        )


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One integer per tensor, from its bits."""
    return torch.stack([_digest_of(tensor.detach()) for tensor in tensors])


def _digest_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return flat.sum(dtype=torch.int64).cpu()
