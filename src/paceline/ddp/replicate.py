"""`replicate(model)`: data-parallel in place. The model keeps its class, its attributes and its state_dict keys."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch

from paceline.ddp.module import DistributedDataParallel
from paceline.errors import ConfigError

__all__ = ["replica_of", "replicate"]

_Model = TypeVar("_Model", bound=torch.nn.Module)
_replicas: weakref.WeakKeyDictionary[torch.nn.Module, DistributedDataParallel] = weakref.WeakKeyDictionary()


def replicate(model: _Model, **options: Any) -> _Model:
    """Average the model's gradients over ranks from now on. Options are those of DistributedDataParallel."""
    if model in _replicas:
        raise ConfigError(f"this {type(model).__name__} is replicated already")
    ddp = DistributedDataParallel(model, **options)

    def before(_: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return ddp._before_forward(inputs, kwargs)

    def after(_: torch.nn.Module, inputs: Any, kwargs: Any, output: Any) -> Any:
        return ddp._after_forward(output)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    _replicas[model] = ddp
    return model


def replica_of(model: torch.nn.Module) -> DistributedDataParallel:
    """The DistributedDataParallel behind a replicated model: for no_sync(), count(), join(), no_more_data()."""
    try:
        return _replicas[model]
    except KeyError:
        raise ConfigError(f"this {type(model).__name__} was not given to paceline.replicate()") from None
