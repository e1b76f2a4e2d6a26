"""What crosses between the main process and a worker.

Every exchange is one order and one answer. An order or answer is a `Message`: a tuple of plain
values whose first is an `Order` or an `Answer`, the number of the call it belongs to, tensors, and
objects that had to be pickled.

    order                                                          answer
    FORWARD   releases, modes, updates, requires_grad; inputs      DONE     outputs
    BACKWARD  releases, keeps_graph; output gradients              DONE     parameter gradients
    either                                                         FAILED   traceback, exception
                                                                   STALE    name of what is unknown

`releases` are calls whose graphs the worker may drop. `updates` and `requires_grad` are what the
user changed in the module since the last order (`replica_set.PendingUpdates`); parameters and
buffers are in memory that workers map.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any, NamedTuple

import torch

__all__ = [
    "Answer",
    "GradientKind",
    "Modes",
    "Order",
    "Source",
    "TensorMeta",
    "Update",
    "is_plain",
    "meta_of",
    "source_of",
]

Source = int | torch.Tensor  # the address of a plain tensor, or a tensor that is not plain
Update = tuple[int, str, Any]  # index of the submodule, attribute, value


class Order(enum.IntEnum):
    """What a worker is asked to do."""

    FORWARD = 1
    BACKWARD = 2


class Answer(enum.IntEnum):
    """How it went."""

    DONE = 0
    FAILED = 1
    STALE = 2  # the order refers to a class or function that is younger than the worker


class GradientKind(enum.IntEnum):
    """What a worker has for one parameter or input. A sparse gradient is described by its shape."""

    MISSING = 0
    DENSE = 1
    ALL_DENSE = -1  # in place of the list: every parameter has one, and no input wants one


class TensorMeta(NamedTuple):
    """What the reader must know to see a tensor again."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False
    channels_last: bool = False


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The description of a tensor."""
    channels_last = (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, channels_last)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are what lies at its address, one after the other."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def source_of(tensor: torch.Tensor) -> Source:
    """Where its values are to be read. The tensor must live until they were."""
    return tensor.data_ptr() if type(tensor) is torch.Tensor and is_plain(tensor) else tensor


class Modes(NamedTuple):
    """Torch's thread-local settings that a forward runs under."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: str
    autocast_cache: bool
    deterministic: bool

    @staticmethod
    def current() -> tuple[bool, bool, bool, str, bool, bool]:
        """This process's settings, as a plain tuple, which is what messages are made of."""
        autocast = torch.is_autocast_enabled("cpu")
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            str(torch.get_autocast_dtype("cpu")).removeprefix("torch.") if autocast else "",
            autocast and torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def are_default(self) -> bool:
        """Whether they are those of an idle worker."""
        return self.grad and not self.inference and not self.autocast

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The same settings in this process."""
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)
        if not self.inference and not self.autocast:
            return torch.set_grad_enabled(self.grad)
        stack = contextlib.ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        if self.autocast:
            dtype = getattr(torch, self.autocast_dtype)
            stack.enter_context(
                torch.autocast("cpu", dtype=dtype, cache_enabled=self.autocast_cache)
            )
        stack.enter_context(torch.set_grad_enabled(self.grad))
        return stack
