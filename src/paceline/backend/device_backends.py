"""Backends of other devices beside ours: `init_process_group("cpu:paceline,cuda:nccl")`.

torch lets a Python process group replace the whole group, whatever else was asked for: backends
named after ours are never made, those named before are dropped with the group they were registered
on. So we read from the frame of torch's `_new_process_group_helper` (torch 2.13,
torch/distributed/distributed_c10d.py) what was asked for, make what is missing, and keep what is
there. There is no other way to a backend written in Python, because torch's `Backend` class cannot
be derived from in Python. Where that function has another name or other locals, a group serves CPU
tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline._backend_registration import BACKEND_NAME
from paceline._interpreter import find_caller
from paceline._torch_internals import PrefixStore, ProcessGroupGloo, Store, backend_plugin
from paceline.errors import ConfigError

__all__ = ["other_backends"]


def other_backends(options: Any) -> dict[str, Any]:
    """The backends of the group being created that are not ours, by device type.

    `options` is what torch passes to a backend's creator, an object without a declared type.
    """
    frame = find_caller("_new_process_group_helper")
    if frame is None or "backend_config" not in frame.f_locals:
        return {}
    requested = frame.f_locals["backend_config"].get_device_backend_map()
    group, root_store = frame.f_locals["pg"], frame.f_locals["prefix_store"]
    backends = {}
    for device, name in requested.items():
        if str(name).lower() == BACKEND_NAME or device == "cpu":
            continue
        try:
            backends[device] = group._get_backend(torch.device(device))
        except RuntimeError:
            store = PrefixStore(f"{device}/", root_store)
            backends[device] = _make(str(name).lower(), store, options)
    return backends


def _make(name: str, store: Store, options: Any) -> Any:
    membership = (store, options.group_rank, options.group_size)
    if name == "gloo":
        return ProcessGroupGloo(*membership, timeout=options.timeout)
    if name in ("nccl", "xccl"):
        return _make_accelerated(name, membership, options)
    plugin = backend_plugin(name)
    if plugin is None:
        raise ConfigError(
            f"unknown backend {name!r} in the backend string; available: gloo, nccl, xccl and "
            "backends registered with torch.distributed.Backend.register_backend"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(*membership, options.timeout)
    options.store = store
    return plugin.creator_fn(options, None)


def _make_accelerated(name: str, membership: tuple[Store, int, int], options: Any) -> Any:
    kind = getattr(dist, f"ProcessGroup{name.upper()}", None)
    if kind is None:
        raise ConfigError(
            f"this build of torch has no {name} backend; leave it out of the backend string"
        )
    settings = kind.Options()
    settings._timeout = options.timeout
    settings.global_ranks_in_group = options.global_ranks_in_group
    settings.group_name = options.group_id
    return kind(*membership, settings)
