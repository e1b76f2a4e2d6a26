"""The arguments of `DistributedDataParallel`, checked in one place."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.backend import PacelineGroup
from paceline.backend.group_options import check_wire_dtype
from paceline.ddp.plan import MIB, BucketLimits
from paceline.ddp.weighting import AverageRule
from paceline.errors import ConfigError

__all__ = [
    "Average",
    "DDPConfig",
    "DelayedNames",
    "Policy",
    "bucket_limits",
    "check_devices",
    "check_dim",
    "check_flags",
    "check_group",
    "check_mesh",
    "check_module",
    "check_policy",
    "check_rounds",
    "delayed_names",
    "refuse_unknown",
    "syncs_buffers",
    "warn_of_check_reduction",
]

Average = Literal["auto", "samples", "ranks"]
Policy = Literal["raise", "skip"]
_CHECK_REPLICAS_EVERY = 200
_LARGEST_MIB = 2**40  # more bytes do not fit a 64-bit number
_SHOWN_LENGTH = 80  # of a wrong value in a message


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
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.average not in ("auto", "samples", "ranks"):
            raise ConfigError(
                'average must be "auto" (by samples where their number is known), "samples" (by '
                'the leading dimension of the input) or "ranks" (torch\'s plain average), got '
                f"{self.average!r}"
            )
        check_policy(self.on_error)
        _check_interval(self.check_replicas_every)
        check_wire_dtype(self.wire_dtype)
        if self.mixed_precision is not None and not hasattr(self.mixed_precision, "param_dtype"):
            raise TypeError(
                "mixed_precision should have param_dtype, reduce_dtype and buffer_dtype, as "
                "torch.distributed.fsdp.MixedPrecision has, got "
                f"{_shown(self.mixed_precision)}"
            )

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
            "wire_dtype": self.wire_dtype,
        }
        return {f"argument {name}": str(value) for name, value in chosen.items()}


def check_module(module: Any) -> None:
    """What is wrapped is a module."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {_shown(module)}")


def check_group(group: Any) -> None:
    """What is given as a group is one, of whatever kind: also the caller's own."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "process_group: this rank is not a member of the group; wrap the model on its members "
            "only"
        )
    if isinstance(group, type) or not all(hasattr(group, name) for name in ("rank", "size")):
        raise TypeError(
            "process_group should be a process group (None: the default group; see "
            f"torch.distributed.new_group), got {_shown(group)}"
        )


def check_rounds(group: dist.ProcessGroup, device: torch.device) -> None:
    """A group that sums gradients on this device can round them between hosts (`wire_dtype`). One
    rank sends nothing, and one host nothing to another: any group will do, and the first is ours.
    """
    if group.size() > 1 and not isinstance(group, PacelineGroup):
        raise ConfigError(
            f"wire_dtype needs a group of backend paceline, got one of {group.name()}. Make the "
            'group with init_process_group("paceline"), or leave wire_dtype out and register '
            "torch's bf16_compress_hook, which rounds on every rank"
        )
    if device.type != "cpu":
        raise ConfigError(
            f"wire_dtype rounds gradients in host memory, but the model is on {device}, whose own "
            "backend sums them. Leave it out and register torch's bf16_compress_hook"
        )


def check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh should be a DeviceMesh, got {_shown(mesh)}")


def check_devices(device_ids: Any) -> None:
    """A list; what is in it is looked at where it is used."""
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(
            f"device_ids should be None or a list of one device, got {_shown(device_ids)}"
        )


def check_dim(dim: Any) -> None:
    if not isinstance(dim, int):
        raise TypeError(f"dim should be a whole number, got {_shown(dim)}")


def check_flags(**flags: Any) -> None:
    """Arguments that are on or off. None and 0 are off, as in torch; a text would be on."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, int | np.bool_):
            raise TypeError(f"{name} should be True or False, got {_shown(value)}")


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
            "torch's arguments and average, check_replicas_every, check_finite, on_error, "
            "wire_dtype."
        )


def bucket_limits(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[BucketLimits, tuple[int, ...]]:
    """The limits in force, and those of the list if there is one."""
    several: Any = bucket_cap_mb_list
    if several is not None and (isinstance(several, str) or not isinstance(several, Iterable)):
        raise TypeError(f"bucket_cap_mb_list should be a list of numbers, got {_shown(several)}")
    caps = [_mib(f"bucket_cap_mb_list[{i}]", mb) for i, mb in enumerate(several or ())]
    cap = None if bucket_cap_mb is None else _mib("bucket_cap_mb", bucket_cap_mb)
    return BucketLimits.create(cap, caps), tuple(int(mb * MIB) for mb in caps)


def _mib(name: str, value: Any) -> float:
    message = f"{name} should be a number of MiB, 0 or more, got {_shown(value)}"
    if isinstance(value, bool | str | bytes):
        raise TypeError(message)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(message) from error
    if not 0 <= number <= _LARGEST_MIB:
        raise ConfigError(message)
    return number


def _check_interval(every: Any) -> None:
    if every is None:
        return
    is_number = hasattr(every, "__index__") and not isinstance(every, bool)
    if not is_number or operator.index(every) < 0:
        raise ConfigError(
            f"check_replicas_every should be a number of steps, 0 for never, got {_shown(every)}"
        )


def _shown(value: Any) -> str:
    """A value in a message: short, and in one line."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."


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
    if not isinstance(named, list | tuple) or not all(_is_named(entry) for entry in named):
        raise TypeError(
            "delay_all_reduce_named_params should be a list of (name, parameter), as "
            f"named_parameters() gives them, got {_shown(named)}"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, _ in named:
        if name not in names.values():
            raise ConfigError(
                f"delay_all_reduce_named_params: {type(module).__name__} has no parameter {name!r}"
            )
    if id(trigger) not in names:
        raise ConfigError(
            "param_to_hook_all_reduce is not a parameter of the module that is wrapped"
        )
    return DelayedNames(tuple(name for name, _ in named), names[id(trigger)])


def _is_named(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)


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
