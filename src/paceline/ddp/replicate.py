"""`replicate(model)`: data-parallel in place. The model keeps its class, its attributes and its
state_dict keys.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, TypeVar

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from paceline.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.errors import ConfigError

__all__ = ["replica_of", "replicate"]

_Model = TypeVar("_Model", bound=torch.nn.Module)
_replicas: weakref.WeakKeyDictionary[torch.nn.Module, DistributedDataParallel] = (
    weakref.WeakKeyDictionary()
)


class _Before:
    """Runs before the model's forward. A copy or a pickle of the model is a plain model again."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.handled: BaseException | None = None  # what the caller of forward is handling already

    def __call__(self, _: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.handled = sys.exception()
        return self._ddp._before_forward(inputs, kwargs)

    def __reduce__(self) -> Any:
        return _hook_of_a_copy, ()


class _After(_Before):
    """Runs after the model's forward, also if that fails."""

    def __init__(self, ddp: DistributedDataParallel, before: _Before) -> None:
        super().__init__(ddp)
        self._before = before

    def __call__(self, _: torch.nn.Module, inputs: Any, kwargs: Any, output: Any = None) -> Any:
        error = sys.exception()
        if isinstance(error, Exception) and error is not self._before.handled:
            self._ddp._forward_failed(error)
            return None
        return self._ddp._after_forward(output)


def _hook_of_a_copy() -> Any:
    return _nothing


def _nothing(*_: Any) -> None:
    """Neither before nor after forward."""


def _drop_prefix(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """What a wrapped model has saved can be loaded as well."""
    if not prefix and not hasattr(model, "module"):
        consume_prefix_in_state_dict_if_present(state_dict, "module.")


def replicate(model: _Model, **options: Any) -> _Model:
    """Average the model's gradients over ranks from now on, without a wrapper around it.

    Args:
        model: any module; its class and the names of its parameters stay.
        **options: those of `DistributedDataParallel`.

    Returns:
        The same model.

    Raises:
        MismatchError: the model is not the same on all ranks.
        ConfigError: an argument is wrong, or there is no process group.

    Example:
        ```python
        model = paceline.replicate(torch.nn.Linear(8, 1))
        model(torch.randn(4, 8)).sum().backward()  # averaged
        ```
    """
    if model in _replicas:
        raise ConfigError(f"this {type(model).__name__} is replicated already")
    ddp = DistributedDataParallel(model, **options)
    before = _Before(ddp)
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(_After(ddp, before), with_kwargs=True, always_call=True)
    model.register_load_state_dict_pre_hook(_drop_prefix)  # type: ignore[no-untyped-call]  # torch's
    _replicas[model] = ddp
    return model


def replica_of(model: torch.nn.Module) -> DistributedDataParallel:
    """The `DistributedDataParallel` behind a replicated model.

    Args:
        model: what `replicate` returned.

    Returns:
        The object that has `no_sync()`, `count()`, `join()` and `no_more_data()`.

    Raises:
        ConfigError: the model is not replicated.

    Example:
        ```python
        model = paceline.replicate(torch.nn.Linear(8, 1))
        with paceline.replica_of(model).no_sync():
            model(torch.randn(4, 8)).sum().backward()
        ```
    """
    try:
        return _replicas[model]
    except KeyError:
        raise ConfigError(
            f"this {type(model).__name__} was not given to paceline.replicate()"
        ) from None
