"""Compiles the simulated accelerator once per torch version and source, with the C++ compiler
alone.

The library lands in a cache directory named by a hash of everything that decides its contents. Any
number of processes may ask at once: the first takes a file lock and builds, the others wait and
find it done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

__all__ = ["SimUnavailable", "library"]

_SOURCES = pathlib.Path(__file__).parent / "csrc"
# -O1: the kernels are torch's own; what is compiled here only passes tensors on. -DNDEBUG: as torch itself was built,
# which decides the layout of some of its classes.
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-Wall",
    "-Wno-stringop-overflow",
)
_UNITS = (
    2  # torch's headers take longer to read than all sources to compile, so few units read them
)
_COMPILE_TIMEOUT_S = 600.0


class SimUnavailable(Exception):
    """The simulated accelerator cannot be built here; the message says why."""


def library() -> pathlib.Path:
    """The compiled library, built now if this torch and these sources have not been built before."""
    compiler = _compiler()
    directory = _cache_directory(compiler)
    target = directory / "libsim.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when this process is killed
        if not target.exists():
            _build(compiler, target)
    return target


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise SimUnavailable(
            f"no C++ compiler: {command[0]!r} is not on PATH (set CXX to name another)"
        )
    return command


def _cache_directory(compiler: list[str]) -> pathlib.Path:
    import torch

    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    content = hashlib.sha256(
        repr((torch.__version__, str(torch.__path__), compiler, version, _FLAGS)).encode()
    )
    for path in sorted(_SOURCES.iterdir()):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "paceline" / f"sim-{content.hexdigest()[:16]}"


def _build(compiler: list[str], target: pathlib.Path) -> None:
    import torch

    root = pathlib.Path(torch.__path__[0])
    headers = [
        "-isystem",
        str(root / "include"),
        "-isystem",
        str(root / "include/torch/csrc/api/include"),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="paceline-sim-") as scratch,
        ThreadPoolExecutor(_UNITS) as pool,
    ):

        def compile_unit(number: int) -> str:
            unit = pathlib.Path(scratch, f"unit{number}.cpp")
            sources = sorted(_SOURCES.glob("*.cpp"))[number::_UNITS]
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            _run([*compiler, *_FLAGS, *headers, "-c", str(unit), "-o", f"{unit}.o"])
            return f"{unit}.o"

        objects = list(pool.map(compile_unit, range(_UNITS)))
        partial = target.with_name("libsim.so.partial")
        libraries = ["-L", str(root / "lib"), "-ltorch_cpu", "-ltorch", "-lc10"]
        _run([*compiler, "-shared", *objects, "-o", str(partial), *libraries])
        partial.replace(target)  # never a half-written library under the final name


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
    )
    if done.returncode != 0:
        # A compiler that is there but fails is a fault to see, not a reason to skip.
        raise RuntimeError(
            f"the simulated accelerator did not compile: {shlex.join(command)}\n{done.stderr}"
        )
