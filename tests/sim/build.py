"""Compiles the simulated accelerator once per torch version and source, with the C++ compiler
alone.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tests.harness.build_cache import cached_build

__all__ = ["SimUnavailable", "library"]

_SOURCES = pathlib.Path(__file__).parent / "csrc"
# -O1: the kernels are torch's own; what is compiled here only passes tensors on.
# -DNDEBUG: as torch itself was built, which decides the layout of some of its classes.
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-Wall",
    "-Wno-stringop-overflow",
)
# torch's headers take longer to read than all sources to compile, so few units read them.
_UNITS = 2
_COMPILE_TIMEOUT_S = 600.0


class SimUnavailable(Exception):
    """The simulated accelerator cannot be built here; the message says why."""


def library() -> pathlib.Path:
    """The compiled library; built now if it has not been for this torch and these sources."""
    compiler = _compiler()
    return cached_build("libsim.so", _inputs(compiler), lambda target: _build(compiler, target))


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise SimUnavailable(
            f"no C++ compiler: {command[0]!r} is not on PATH (set CXX to name another)"
        )
    return command


def _inputs(compiler: list[str]) -> list[str | pathlib.Path]:
    """All that decides the contents of the library."""
    import torch

    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    torch_version = f"{torch.__version__} {torch.version.git_version}"
    return [torch_version, *compiler, version, *_FLAGS, *sorted(_SOURCES.iterdir())]


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
        libraries = ["-L", str(root / "lib"), "-ltorch_cpu", "-ltorch", "-lc10"]
        _run([*compiler, "-shared", *objects, "-o", str(target), *libraries])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
    )
    if done.returncode != 0:
        # A compiler that is there but fails is a fault to see, not a reason to skip.
        raise RuntimeError(
            f"the simulated accelerator did not compile: {shlex.join(command)}\n{done.stderr}"
        )
