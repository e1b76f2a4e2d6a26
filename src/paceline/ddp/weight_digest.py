"""A number that changes with the bits of a tensor and with their order: what the drift check
compares instead of the weights.

In host memory the native core reads it as fast as memory delivers; elsewhere, and without the core,
torch computes another one on the device itself. Both have 64 bits. Whatever differs between two
tensors of one shape and dtype, values in another order included, gives the same number with
probability 2**-64 in the core's (a change within eight bytes always shows), and below 2**-32 in
torch's, where a single changed element always shows. Neither is meant against an adversary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from paceline.core import abi, kernels

__all__ = ["can_use_core", "digest", "digest_of_digests"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 18  # elements that torch weighs at once: their factors are kept
_ODD = 0x9E3779B97F4A7C15


def can_use_core(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these tensors can be read by the native core."""
    return abi.native_status().available and all(tensor.is_cpu for tensor in tensors)


def digest(tensors: Sequence[torch.Tensor], *, by_core: bool | None = None) -> torch.Tensor:
    """One integer per tensor. Those of different ranks can be compared if all were made the same
    way: by the core or by torch. By default by whatever `can_use_core` says.
    """
    if by_core is None:
        by_core = can_use_core(tensors)
    each = _by_core if by_core else _by_torch
    return torch.tensor([each(tensor.detach()) for tensor in tensors], dtype=torch.int64)


def digest_of_digests(digests: torch.Tensor) -> int:
    """One number for many; tensors that are exchanged for each other show."""
    total = 0
    for number in digests.tolist():
        total = _mix(total ^ number)
    return _signed(total)


def _by_core(tensor: torch.Tensor) -> int:
    tensor = tensor.contiguous()  # in the order of their indices, wherever elements lie
    return _signed(kernels.digest(tensor.data_ptr(), tensor.nbytes))


def _by_torch(tensor: torch.Tensor) -> int:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    # A sum in which every element has an odd factor of its own, modulo 2**64. Bits of an element
    # are mixed first: where only the highest ones change (signs), most of the sum would stay.
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in bits.split(_BLOCK):
        wide = block.to(torch.int64)
        mixed = wide ^ (wide >> 15)
        total = total * _signed(_ODD) + (mixed * _factors(bits.device)[: len(block)]).sum()
    return _signed(_mix(int(total) ^ _mix(bits.numel())))


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers that look random, the same on every machine."""
    state = torch.arange(1, _BLOCK + 1) * _signed(_ODD)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (state | 1).to(device)


def _mix(number: int) -> int:
    number = ((number & (2**64 - 1)) * _ODD) % 2**64
    return number ^ (number >> 29)


def _signed(number: int) -> int:
    """64 bits as torch's int64 holds them."""
    return (number + 2**63) % 2**64 - 2**63
