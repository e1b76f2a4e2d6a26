"""Paceline: data-parallel training for PyTorch.

`import paceline` registers the `paceline` backend with torch.distributed and does nothing else:
torch itself is imported when it is first needed, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline._backend_registration import register_backend
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
    StepError,
)

if TYPE_CHECKING:
    from paceline import optim as optim
    from paceline import ray as ray
    from paceline.backend.group_options import GroupOptions
    from paceline.checkpoint import load, save
    from paceline.data import (
        DataLoader,
        DistributedSampler,
        Evaluation,
        GlobalBatchSampler,
        ShardedIterable,
    )
    from paceline.ddp import DistributedDataParallel, SyncBatchNorm, replica_of, replicate
    from paceline.diagnostics.session import trace
    from paceline.dp import DataParallel
    from paceline.launch.init import (
        destroy_process_group,
        init_process_group,
        is_main,
        local_rank,
        local_world_size,
        rank,
        world_size,
    )
    from paceline.launch.save_agreement import SaveRequest
    from paceline.launch.save_request import save_requested
    from paceline.launch.spawn import spawn
    from paceline.training import Training

# Public names that need torch, and the module each lives in. Resolved on first use (PEP 562).
_LAZY: dict[str, str] = {
    "DataLoader": "paceline.data",
    "DataParallel": "paceline.dp",
    "DistributedSampler": "paceline.data",
    "Evaluation": "paceline.data",
    "GlobalBatchSampler": "paceline.data",
    "GroupOptions": "paceline.backend.group_options",
    "ShardedIterable": "paceline.data",
    "init_process_group": "paceline.launch.init",
    "destroy_process_group": "paceline.launch.init",
    "rank": "paceline.launch.init",
    "world_size": "paceline.launch.init",
    "local_rank": "paceline.launch.init",
    "local_world_size": "paceline.launch.init",
    "is_main": "paceline.launch.init",
    "SaveRequest": "paceline.launch.save_agreement",
    "save_requested": "paceline.launch.save_request",
    "spawn": "paceline.launch.spawn",
    "save": "paceline.checkpoint",
    "load": "paceline.checkpoint",
    "DistributedDataParallel": "paceline.ddp",
    "SyncBatchNorm": "paceline.ddp",
    "replicate": "paceline.ddp",
    "replica_of": "paceline.ddp",
    "trace": "paceline.diagnostics.session",
    "Training": "paceline.training",
}
# Public modules that are imported on first use.
_LAZY_MODULES = {"optim", "ray"}

__all__ = [
    "__version__",
    "PacelineError",
    "ConfigError",
    "MismatchError",
    "GroupError",
    "CollectiveTimeout",
    "PeerLost",
    "GroupAborted",
    "StepError",
    "LaunchError",
    "NativeError",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "replicate",
    "replica_of",
    "DataLoader",
    "DataParallel",
    "DistributedSampler",
    "Evaluation",
    "GlobalBatchSampler",
    "ShardedIterable",
    "Training",
    "GroupOptions",
    "init_process_group",
    "destroy_process_group",
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "is_main",
    "spawn",
    "SaveRequest",
    "save_requested",
    "save",
    "load",
    "trace",
    "optim",
    "ray",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"paceline.{name}")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_backend()
