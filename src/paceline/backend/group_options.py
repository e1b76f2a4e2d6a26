"""`GroupOptions`: what a group of backend `paceline` can be given beyond torch's own arguments."""

from __future__ import annotations

import dataclasses

import torch

from paceline.errors import ConfigError

__all__ = ["GroupOptions", "check_wire_dtype"]

_WIRE_DTYPES = (None, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """How a group exchanges; given as `pg_options` to `init_process_group` or `new_group`, the same
    on all ranks.

    Args:
        wire_dtype: the type in which sums of float32 travel between hosts. With `torch.bfloat16`
            each host's sum is rounded once on its way, and half as many bytes are sent; inside a
            host and in the final sum numbers stay float32. All ranks get the same bits. On one host
            it changes nothing, nor does it for short tensors: up to 128 KB between two hosts,
            128 KB / (hosts - 1) between more, and 8 KB in any case.

    Raises:
        ConfigError: a type that sums cannot travel in.

    Example:
        ```python
        paceline.init_process_group(pg_options=paceline.GroupOptions(wire_dtype=torch.bfloat16))
        ```
    """

    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype)


def check_wire_dtype(wire_dtype: object) -> None:
    """Numbers may travel between hosts as this type."""
    if wire_dtype not in _WIRE_DTYPES:
        raise ConfigError(f"wire_dtype must be torch.bfloat16 or None, got {wire_dtype!r}")
