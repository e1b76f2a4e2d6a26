"""Paceline: data-parallel training for PyTorch.

`import paceline` registers the `paceline` backend with torch.distributed and does nothing else: torch itself is
imported when it is first needed, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline._registration import register_backend
from paceline._version import __version__
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    GroupError,
    LaunchError,
    MismatchError,
    NativeError,
    PacelineError,
    PeerLost,
)

if TYPE_CHECKING:
    from paceline.data import DataLoader, DistributedSampler, Evaluation, GlobalBatchSampler, ShardedIterable
    from paceline.dp import DataParallel

# Public names that need torch, and the module each lives in. Resolved on first use (PEP 562).
_LAZY: dict[str, str] = {
    "DataLoader": "paceline.data",
    "DataParallel": "paceline.dp",
    "DistributedSampler": "paceline.data",
    "Evaluation": "paceline.data",
    "GlobalBatchSampler": "paceline.data",
    "ShardedIterable": "paceline.data",
}

__all__ = [
    "__version__",
    "PacelineError",
    "ConfigError",
    "MismatchError",
    "GroupError",
    "CollectiveTimeout",
    "PeerLost",
    "GroupAborted",
    "LaunchError",
    "NativeError",
    "DataLoader",
    "DataParallel",
    "DistributedSampler",
    "Evaluation",
    "GlobalBatchSampler",
    "ShardedIterable",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_backend()
