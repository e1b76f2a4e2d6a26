"""Backends of other devices beside ours: `init_process_group("cpu:paceline,cuda:nccl")`.

torch lets a Python process group replace the whole group, whatever else was asked for: backends
named after ours are never made, those named before are dropped with the group they were registered
on. So we look into the caller's frame for what was asked for, make what is missing, and keep what
is there. (torch 2.13, `_new_process_group_helper`; there is no other way to a backend written in
Python, because torch's `Backend` class cannot be derived from in Python.)
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from paceline._backend_registration import BACKEND_NAME
from paceline.errors import ConfigError

__all__ = ["other_backends"]


def other_backends(options: Any) -> dict[str, Any]:
    """The backends of the group being created that are not ours, by device type."""
    frame = _creating_frame()
    if frame is None:
        return {}
    config = frame.f_locals["backend_config"].get_device_backend_map()
    group, root_store = frame.f_locals["pg"], frame.f_locals["prefix_store"]
    found = {}
    for device, name in config.items():
        if str(name).lower() == BACKEND_NAME or device == "cpu":
            continue
        try:
            found[device] = group._get_backend(torch.device(device))
        except RuntimeError:
            found[device] = _make(str(name).lower(), PrefixStore(f"{device}/", root_store), options)
    return found


def _creating_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    return frame if frame is not None and "backend_config" in frame.f_locals else None


def _make(name: str, store: Any, options: Any) -> Any:
    place = (store, options.group_rank, options.group_size)
    if name == "gloo":
        return ProcessGroupGloo(*place, timeout=options.timeout)
    if name in ("nccl", "xccl"):
        kind = getattr(dist, f"ProcessGroup{name.upper()}", None)
        if kind is None:
            raise ConfigError(
                f"this build of torch has no {name} backend; leave it out of the backend string"
            )
        settings = kind.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        return kind(*place, settings)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise ConfigError(
            f"backend {name!r} is not known beside paceline; known: gloo, nccl, xccl and registered ones"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(*place, options.timeout)
    options.store = store
    return plugin.creator_fn(options, None)
