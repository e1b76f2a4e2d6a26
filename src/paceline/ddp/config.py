"""The arguments of `DistributedDataParallel`, checked in one place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from paceline.ddp.plan import MIB, BucketLimits
from paceline.ddp.weighting import AverageRule
from paceline.errors import ConfigError

__all__ = [
    "Average",
    "DDPConfig",
    "DelayedNames",
    "Policy",
    "bucket_limits",
    "check_policy",
    "delayed_names",
    "refuse_unknown",
    "syncs_buffers",
    "warn_of_check_reduction",
]

Average = Literal["auto", "samples", "ranks"]
Policy = Literal["raise", "skip"]
_CHECK_REPLICAS_EVERY = 200


@dataclasses.dataclass(frozen=True, slots=True)
class DelayedNames:
    """`delay_all_reduce_named_params` and the parameter whose gradient sends them, by name: a
    pickled model finds them again.
    """

    names: tuple[str, ...]
    trigger: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """What a model was wrapped with. Nothing changes it: `dataclasses.replace` makes another."""

    average: Average = "auto"
    on_error: Policy = "raise"
    check_finite: bool = False
    check_replicas_every: int | None = None
    init_sync: bool = True
    forward_sync_buffers: bool = True
    find_unused_parameters: bool = False
    skip_unused: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    limits: BucketLimits
    bucket_bytes_list: tuple[int, ...] = ()
    mixed_precision: Any = None
    delayed: DelayedNames | None = None

    def __post_init__(self) -> None:
        if self.average not in ("auto", "samples", "ranks"):
            raise ConfigError(
                'average must be "auto" (by samples where their number is known), "samples" (by '
                'the leading dimension of the input) or "ranks" (torch\'s plain average), got '
                f"{self.average!r}"
            )
        check_policy(self.on_error)

    # ----------------------------------------------------------------------------- what follows

    @property
    def average_rule(self) -> AverageRule:
        by_ranks = self.average == "ranks"
        return AverageRule(by_ranks=by_ranks, divide_by_world=by_ranks)

    @property
    def replans(self) -> bool:
        """Whether buckets are planned anew from the order in which gradients arrive."""
        return not self.find_unused_parameters or self.static_graph

    @property
    def is_bucketed_from_start(self) -> bool:
        return self.find_unused_parameters or bool(self.bucket_bytes_list)

    def drift_interval(self, *, has_comm_hook: bool) -> int:
        """Steps between two comparisons of the replicas; 0: none. Replicas that were never made
        equal, or that a hook may keep apart, are compared only if the caller asks for it.
        """
        if self.check_replicas_every is not None:
            return self.check_replicas_every
        return _CHECK_REPLICAS_EVERY if self.init_sync and not has_comm_hook else 0

    def shared_arguments(self) -> dict[str, str]:
        """Arguments that decide what ranks exchange: different ones would end in a hang or in
        nonsense.
        """
        chosen = {
            "init_sync": self.init_sync,
            "average": self.average,
            "forward_sync_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "skip_all_reduce_unused_params": self.skip_unused,
            "bucket_cap_mb": ", ".join(f"{size / MIB:g}" for size in self.limits.bytes),
            "check_replicas_every": self.check_replicas_every,
            "mixed_precision": self.mixed_precision,
        }
        return {f"argument {name}": str(value) for name, value in chosen.items()}


def check_policy(on_error: Policy) -> Policy:
    """The policy, if it is one."""
    if on_error not in ("raise", "skip"):
        raise ConfigError(f'on_error must be "raise" or "skip", got {on_error!r}')
    return on_error


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Arguments neither torch's class nor ours has."""
    if unknown:
        raise ConfigError(
            f"DistributedDataParallel has no argument {', '.join(sorted(unknown))}. It takes "
            "torch's arguments and average, check_replicas_every, check_finite, on_error."
        )


def bucket_limits(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[BucketLimits, tuple[int, ...]]:
    """The limits in force, and those of the list if there is one."""
    sizes = tuple(int(mb * MIB) for mb in bucket_cap_mb_list or ())
    return BucketLimits.create(bucket_cap_mb, bucket_cap_mb_list), sizes


def delayed_names(
    module: torch.nn.Module,
    named: Sequence[tuple[str, torch.nn.Parameter]] | None,
    trigger: torch.nn.Parameter | None,
) -> DelayedNames | None:
    """The two arguments about delayed parameters, which come together or not at all."""
    if (named is None) != (trigger is None):
        raise ConfigError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time."
        )
    if not named or trigger is None:
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if id(trigger) not in names:
        raise ConfigError(
            "param_to_hook_all_reduce is not a parameter of the module that is wrapped"
        )
    return DelayedNames(tuple(name for name, _ in named), names[id(trigger)])


def syncs_buffers(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are made equal before every forward, and whether now."""
    if broadcast_buffers is not None:
        ignored = (
            " and is ignored here because `forward_sync_buffers` is given"
            if forward_sync_buffers
            else ""
        )
        warnings.warn(
            f"`broadcast_buffers` is deprecated{ignored}. Use `forward_sync_buffers` instead, "
            "which synchronises buffers before forward and leaves the initial synchronisation to "
            "`init_sync`.",
            FutureWarning,
            stacklevel=4,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    always = True if broadcast_buffers is None else broadcast_buffers
    return always, always


def warn_of_check_reduction() -> None:
    warnings.warn(
        "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
        "Please avoid using it.",
        FutureWarning,
        stacklevel=3,
    )
