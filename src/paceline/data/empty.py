"""A batch of zero samples with the structure, shapes and types of a real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ConfigError

__all__ = ["emptied"]


def emptied(batch: Any) -> Any:
    """A collated batch cut to no samples: tensors to `[0:0]`, lists of strings or objects to nothing."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            raise ConfigError(f"cannot make an empty batch from a scalar tensor ({batch}): {_CURE}")
        return batch[0:0]
    if isinstance(batch, Mapping):
        return {name: emptied(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(emptied(part) for part in batch))
    if isinstance(batch, list | tuple):
        # Collating strings gives a list with one entry for each sample; collating pairs gives a pair of batches.
        batches = [emptied(part) for part in batch if isinstance(part, torch.Tensor | Mapping | list | tuple)]
        return type(batch)(batches)
    try:
        return batch[0:0]
    except Exception as error:
        raise ConfigError(f"cannot make an empty batch from {type(batch).__name__}, {error}: {_CURE}") from error


_CURE = (
    "this rank's share of the last global batch has no samples. Give the loader "
    "`empty_batch=function` that makes a batch of zero samples from a batch of one, or use drop_last=True"
)
