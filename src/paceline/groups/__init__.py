"""The `paceline` backend of torch.distributed."""

from __future__ import annotations

from typing import Any

from paceline.errors import NativeError

__all__ = ["create_group"]


def create_group(options: Any, backend_options: Any) -> Any:
    """Called by torch.distributed to create a group of this backend."""
    raise NativeError("the paceline backend is not part of this build yet; use backend='gloo'")
