"""`GroupOptions`: what a group of backend `paceline` can be given beyond torch's own arguments."""

from __future__ import annotations

import dataclasses

import torch

from paceline.errors import ConfigError

__all__ = ["GroupOptions"]

_WIRE_DTYPES = (None, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """Given as `pg_options` to `init_process_group` or `new_group`; the same on all ranks.

    `wire_dtype`: the type in which sums of float32 travel between hosts. With `torch.bfloat16` each
    host's sum is rounded once on its way, and half as many bytes are sent; inside a host and in the
    final sum numbers stay float32. All ranks get the same bits. On one host it changes nothing, nor
    does it for tensors of up to 8 KB.
    """

    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype not in _WIRE_DTYPES:
            raise ConfigError(f"wire_dtype must be torch.bfloat16 or None, got {self.wire_dtype!r}")
