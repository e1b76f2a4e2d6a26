"""From the tensors of a call to the contiguous ones an engine works on, and back.

`lay_out` returns a tensor to work on and, where that is a copy, what copies the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from paceline.backend.call_options import REDUCTIONS
from paceline.backend.engine import Reduction
from paceline.core.dtypes import Op
from paceline.errors import ConfigError

__all__ = [
    "Finish",
    "TensorLists",
    "all_tensors",
    "check_non_empty",
    "check_same_dtype",
    "contiguous",
    "copy_back",
    "flat_list",
    "lay_out",
    "lay_out_reduced",
    "run_each",
    "single",
    "single_tensor",
]

# What runs once, when the call has ended well.
Finish: TypeAlias = Callable[[], None]

# A tensor, a list of tensors, or a list that holds one such list: torch passes all three.
TensorLists: TypeAlias = Any


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as they are read, in order."""
    if _is_plain(tensor) and not tensor.requires_grad:
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def lay_out(tensor: torch.Tensor, *, read: bool = True) -> tuple[torch.Tensor, Finish | None]:
    """A contiguous tensor to work on, and what to do afterwards if it is not the tensor itself."""
    if tensor.is_sparse:
        raise ConfigError("only all_reduce takes sparse tensors; give tensor.to_dense()")
    if _is_plain(tensor):
        return tensor, None
    _check_writable(tensor)
    flat = contiguous(tensor) if read else torch.empty(tensor.shape, dtype=tensor.dtype)
    if flat.data_ptr() == tensor.data_ptr() and read:
        flat = flat.clone()
    return flat, copy_back(tensor, flat)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory has its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_writable(tensor: torch.Tensor) -> None:
    """Raise if elements of an expanded tensor share memory: a result could not be written."""
    if any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ConfigError(
            f"elements of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
            "share memory (expand() makes such tensors), so that no result can be written to it; "
            "give tensor.clone()"
        )


def lay_out_reduced(
    tensor: torch.Tensor, reduction: Reduction
) -> tuple[torch.Tensor, Reduction, Finish | None]:
    """The same for a tensor that is reduced in place, and the reduction that is left to do.

    PREMUL_SUM: each rank multiplies its own data by its own factor, a number or a tensor; then it
    is a sum.
    """
    flat, finish = lay_out(tensor)
    if reduction.code != Op.PREMUL_SUM:
        return flat, reduction, finish
    scaled = flat * reduction.factor
    if flat is tensor:
        return scaled, REDUCTIONS[Op.SUM], copy_back(tensor, scaled)
    return flat.copy_(scaled), REDUCTIONS[Op.SUM], finish


def copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> Finish:
    """What writes a result to the tensor it is for."""

    def copy() -> None:
        # A future's result is written by a thread that knows nothing of the caller's mode.
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(flat)

    return copy


def run_each(steps: Iterable[Finish | None]) -> Finish | None:
    """Several steps as one; None if there are none."""
    present = [step for step in steps if step is not None]
    if not present:
        return None

    def run() -> None:
        for step in present:
            step()

    return run


def single(tensors: TensorLists) -> Any:
    """The one entry of a list."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors, list | tuple) and not tensors:
        raise ConfigError("expected a non-empty list of tensors")
    count = len(tensors) if isinstance(tensors, list | tuple) else type(tensors).__name__
    raise ConfigError(f"expected a list with one entry (one tensor per process), got {count}")


def single_tensor(tensors: TensorLists) -> torch.Tensor:
    """A tensor, given as such or as a list of one."""
    tensor: torch.Tensor = tensors if isinstance(tensors, torch.Tensor) else single(tensors)
    return tensor


def check_non_empty(call: str, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ConfigError(f"{call}: expected a non-empty list of tensors")


def flat_list(tensors: TensorLists) -> Sequence[torch.Tensor]:
    """A list of tensors, given as such or as the one entry of a list."""
    is_flat = (
        isinstance(tensors, list | tuple)
        and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        and tensors != []
    )
    flat: Sequence[torch.Tensor] = tensors if is_flat else single(tensors)
    return flat


def all_tensors(tensors: TensorLists) -> list[torch.Tensor]:
    """Every tensor in a list of any depth."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for inner in tensors or [] for tensor in all_tensors(inner)]


def check_same_dtype(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless all tensors of a call have one dtype and are on the CPU."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ConfigError(
            f"{call}: all tensors of a call must have one dtype, got {sorted(map(str, dtypes))}"
        )
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ConfigError(
                f"{call}: all tensors of a call must be on one device, got one on {tensor.device}"
            )
