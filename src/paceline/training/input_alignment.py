"""Memory at multiples of 64 bytes: some kernels (a dot product, for one) sum in another order when
their input begins elsewhere.

Memory of torch begins at such addresses; that of numpy, or of a slice of something larger, may not.
And the same batch comes at another address from a worker than from this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline._pytree import map_leaves, tensors_in

__all__ = ["align_inputs", "align_model"]

_BYTES = 64


def align_inputs(inputs: Any) -> Any:
    """The same structure, with tensors copied that begin elsewhere."""
    # Nearly always a tensor or a few of them.
    tensors = inputs if type(inputs) in (tuple, list) else (inputs,)
    if any(type(each) is not torch.Tensor for each in tensors):
        tensors = tensors_in(inputs)
    if all(map(_is_aligned, tensors)):
        return inputs
    return map_leaves(_aligned, inputs)


def align_model(model: nn.Module) -> None:
    """Move parameters and buffers whose memory begins elsewhere, if it is theirs alone.

    Several that share one piece of memory lie in it at the same offsets in every process.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if alone and not _is_aligned(tensor):
            tensor.data = tensor.data.clone()


def _is_aligned(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is not torch.strided
        or tensor.data_ptr() % _BYTES == 0
        or tensor.device.type != "cpu"
        or tensor.numel() == 0
    )


def _aligned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or _is_aligned(leaf):
        return leaf
    # With the same strides, whatever they are: kernels choose by them, too.
    reach = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.as_strided((reach + 1,), (1,)).clone().as_strided(leaf.shape, leaf.stride())
