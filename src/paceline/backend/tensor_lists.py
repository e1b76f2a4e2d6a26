"""Several tensors per process, as torch's bindings take them: `group.allreduce([a, b])`.

They are alike, and count as if each were that of a process of its own: all of them are reduced, and
all of them get the result. So one of them, or all of them as one, goes through the collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from paceline.backend.engine import Reduction
from paceline.backend.tensor_layout import Finish, contiguous, copy_back, run_each
from paceline.core.dtypes import Op
from paceline.errors import ConfigError

__all__ = ["check_alike", "check_gather_lists", "combine", "copy_to_all", "is_several"]

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_COMBINE: dict[int, _Combine] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # the group divides by the number of its ranks, as torch's do
    Op.PREMUL_SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def is_several(tensors: object) -> bool:
    return isinstance(tensors, list | tuple) and len(tensors) > 1


def check_alike(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless all tensors have one dtype, layout, device and shape."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        for name in ("dtype", "layout", "device", "shape"):
            expected, found = getattr(first, name), getattr(tensor, name)
            if expected != found:
                raise ConfigError(
                    f"{call}: several tensors of one process must have one {name}, but that at "
                    f"index {index} has {_text(found)}, the first one {_text(expected)}"
                )


def check_gather_lists(
    outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], world: int
) -> None:
    """Raise unless every input has an output list with room for all inputs of all ranks."""
    if len(outputs) != len(inputs):
        raise ConfigError(
            f"all_gather: {len(inputs)} inputs of one process need as many output lists, got "
            f"{len(outputs)}"
        )
    for gathered in outputs:
        if len(gathered) != len(inputs) * world:
            raise ConfigError(
                f"all_gather: {len(inputs)} inputs of each of {world} ranks need "
                f"{len(inputs) * world} tensors in every output list, got {len(gathered)}"
            )


def combine(tensors: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """What this process contributes to a reduction: its tensors, reduced to a new one."""
    combined = functools.reduce(_COMBINE[reduction.code], tensors)
    return combined.coalesce() if combined.is_sparse else contiguous(combined)


def copy_to_all(tensors: Sequence[torch.Tensor], result: torch.Tensor) -> Finish | None:
    """What gives a result to all tensors of this process."""
    return run_each(copy_back(tensor, result) for tensor in tensors if tensor is not result)


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
