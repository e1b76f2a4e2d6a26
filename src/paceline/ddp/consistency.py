"""Are the replicas one model? Checked before training by description, during training by digest of
the weights.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch

from paceline.ddp.transport import Transport
from paceline.ddp.weight_digest import can_use_core, digest, digest_of_digests
from paceline.errors import MismatchError

__all__ = ["DriftCheck", "SmallGathers", "check_same_model", "describe", "differences"]

_SHOWN = 10


class SmallGathers(Protocol):
    """Brings a few bytes of every rank to all of them: a `Transport`, for one."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the ranks in the job; empty if these are all."""

    def all_gather_small(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row, one below the other."""

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text."""


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


def check_same_model(ranks: SmallGathers, description: Mapping[str, str]) -> None:
    """Compare descriptions over all ranks. One small exchange when they agree; every rank raises
    when they do not.
    """
    text = json.dumps(list(description.items()))
    fingerprint = hashlib.sha256(text.encode()).digest()
    row = torch.frombuffer(bytearray(fingerprint), dtype=torch.int32).clone()
    table = ranks.all_gather_small(row)
    if bool((table == row).all()):
        return
    items_by_rank = [json.loads(gathered) for gathered in ranks.all_gather_text(text)]
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
        f"the model is not the same on all ranks (this is rank {ranks.rank}):\n{lines}{more}\n"
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
    """Every so many steps: do the replicas still have the same weights? Names the parameters that
    differ. `named`: the weights as the model has them at that moment.
    """

    def __init__(
        self,
        transport: Transport,
        named: Callable[[], Sequence[tuple[str, torch.Tensor]]],
        every: int,
    ) -> None:
        self._transport, self._named, self.every = transport, named, every
        self._steps = 0

    def after_step(self) -> None:
        """Call after each exchange of gradients, on every rank."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.compare()

    def compare(self) -> None:
        named = self._named()
        tensors = [tensor for _, tensor in named]
        by_core = can_use_core(tensors)
        digests = digest(tensors, by_core=by_core)
        table = self._gather(digests, by_core)
        if not bool((table[:, 1] == by_core).all()):
            # Some ranks have the core and others have not: all let torch do it.
            digests = digest(tensors, by_core=False)
            table = self._gather(digests, False)
        if not bool((table[:, 0] == table[0, 0]).all()):
            self._raise_drift([name for name, _ in named], digests)

    def _gather(self, digests: torch.Tensor, by_core: bool) -> torch.Tensor:
        row = [digest_of_digests(digests), int(by_core)]
        return self._transport.all_gather_small(torch.tensor(row, dtype=torch.int64))

    def _raise_drift(self, names: Sequence[str], digests: torch.Tensor) -> NoReturn:
        own = {
            name: f"{value & (2**64 - 1):016x}"
            for name, value in zip(names, digests.tolist(), strict=True)
        }
        texts = self._transport.all_gather_text(json.dumps(own))
        by_rank: list[dict[str, str]] = [json.loads(text) for text in texts]
        every_name = dict.fromkeys(name for one in by_rank for name in one)
        differing = [name for name in every_name if len({one.get(name) for one in by_rank}) > 1]
        away = [rank for rank, one in enumerate(by_rank) if one != by_rank[0]]
        shown = ", ".join(differing[:_SHOWN]) + (
            f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        )
        raise MismatchError(
            f"the replicas drifted apart: {shown} differ between rank 0 and rank "
            f"{', '.join(map(str, away))} (this is rank {self._transport.rank}, after "
            f"{self._steps} steps). Something changed the weights of one rank only: a step or load "
            "that not every rank takes, or an optimizer with other settings.",
            {rank: one.get(differing[0], "missing") for rank, one in enumerate(by_rank)},
        )
