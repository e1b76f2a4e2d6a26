"""What tests compile, kept between runs and shared by all processes that ask for it.

A build lands in the user's cache directory, in a folder named by a hash of everything that decides
its contents. Any number of processes may ask at once: the first takes a file lock and builds, the
others wait and find it done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable

__all__ = ["cached_build", "digest"]


def cached_build(
    name: str, inputs: Iterable[str | pathlib.Path], build: Callable[[pathlib.Path], None]
) -> pathlib.Path:
    """The file `name` that `build(target)` wrote for these inputs, now or in an earlier run.

    Inputs are source files, by name and content, and text such as flags and versions.
    """
    directory = _root() / f"{pathlib.Path(name).stem}-{digest(inputs)}"
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when this process is killed
        if not target.exists():
            partial = directory / f"{name}.partial"
            build(partial)
            partial.replace(target)  # never a half-written file under the final name
    return target


def _root() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "paceline"


def digest(inputs: Iterable[str | pathlib.Path]) -> str:
    """One name for these inputs."""
    content = hashlib.sha256()
    for item in inputs:
        is_file = isinstance(item, pathlib.Path)
        name, data = (item.name, item.read_bytes()) if is_file else ("", item.encode())
        content.update(f"{name}\0{len(data)}\0".encode() + data)
    return content.hexdigest()[:16]
