"""What `paceline.Training` cannot train, refused by name with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data import DataLoader, GlobalBatchSampler
from paceline.errors import ConfigError

__all__ = ["Optimizers", "check_loader", "check_model", "check_state", "named_optimizers"]

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}


def check_model(model: nn.Module) -> None:
    """Raise `ConfigError` for models that cannot be computed shard by shard."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, found {type(model).__name__}. Put several modules "
            "into one torch.nn.ModuleDict"
        )
    if type(model).__name__ in _WRAPPERS:
        raise ConfigError(
            f"model is a {type(model).__name__}, but Training exchanges gradients itself: give the "
            "bare module, model.module"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, which needs all samples of the global "
                "batch at once, while shards are computed one after the other. Use BatchNorm, "
                "which sees one shard at a time as it sees one GPU's part, or GroupNorm or "
                "LayerNorm"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name} of a lazy module has no shape yet: run one forward before "
                "making the Training"
            )


def check_loader(loader: DataLoader[Any]) -> GlobalBatchSampler:
    """The sampler of a loader whose global batches do not depend on the number of ranks.

    Raises:
        ConfigError: the loader's order depends on it, or on chance.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"loader is a {type(loader).__module__}.{type(loader).__name__}, whose batches are not "
            "global. Use paceline.DataLoader(dataset, batch_size=..., shuffle=True), where "
            "batch_size counts the samples of all ranks together"
        )
    if not loader.in_order:
        raise ConfigError(
            "the loader has in_order=False and yields batches in the order in which workers happen "
            "to finish them: leave in_order at True"
        )
    if not isinstance(loader.batch_sampler, GlobalBatchSampler):
        source = loader.batch_sampler or loader.dataset
        raise ConfigError(
            f"the order of {type(source).__name__} is not a function of the global batch's number. "
            "Give the loader a dataset with a length and batch_size only, or a "
            "paceline.GlobalBatchSampler as batch_sampler"
        )
    return loader.batch_sampler


def named_optimizers(optimizer: Optimizers, model: nn.Module) -> dict[str, Optimizer]:
    """The optimizers by the names under which their state is saved.

    Raises:
        ConfigError: one is no optimizer, or has parameters that are not the model's.
    """
    if isinstance(optimizer, Mapping):
        optimizers = dict(optimizer)
    elif isinstance(optimizer, Sequence):
        optimizers = {str(number): each for number, each in enumerate(optimizer)}
    else:
        optimizers = {"optimizer": optimizer}
    own = set(model.parameters())
    for name, each in optimizers.items():
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer {name!r} must be a torch.optim.Optimizer, found {type(each).__name__}"
            )
        for parameter in _parameters_of(each):
            if parameter not in own:
                raise ConfigError(
                    f"optimizer {name!r} has a parameter of shape {tuple(parameter.shape)} that is "
                    "not one of the model's, so its gradient would not be exchanged. Put all "
                    "modules that are trained into one torch.nn.ModuleDict and give that as model"
                )
    return optimizers


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The further objects whose state is saved; raises `ConfigError` if one has none."""
    for name, value in state.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise ConfigError(
                    f"state[{name!r}] is a {type(value).__name__} without {method}(): give it "
                    "both, or keep it out of state"
                )
    return dict(state)
