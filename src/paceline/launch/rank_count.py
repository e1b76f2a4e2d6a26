"""How many ranks to start on this host, and the threads each gets."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping

from paceline.errors import ConfigError
from paceline.launch.resources import usable_cores

__all__ = ["count_ranks", "count_accelerators", "threads_for"]


def count_ranks(wish: str) -> int:
    """A number, or "auto": one rank per accelerator, else one per usable core."""
    if wish == "auto":
        return count_accelerators() or usable_cores()
    try:
        number = int(wish)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"the number of ranks should be 1 or more, or auto, but is {wish!r}")
    return number


def count_accelerators() -> int:
    """Devices of the accelerator torch was built for; asked in a child, since asking may start a
    driver for good.
    """
    if not _built_for_an_accelerator():
        return 0
    code = "import torch; print(torch.accelerator.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0


def _built_for_an_accelerator() -> bool:
    """Read from torch's version file: importing torch takes a second, and the launcher can do
    without.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("torch is not installed")
    text = pathlib.Path(spec.origin).with_name("version.py").read_text()
    built_for = re.findall(r"^(?:cuda|hip|xpu)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    return any(value.strip() != "None" for value in built_for) or sys.platform == "darwin"


def threads_for(ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads per rank: what the user set, else the usable cores divided."""
    for name in ("PACELINE_THREADS", "OMP_NUM_THREADS"):
        if text := environ.get(name):
            if not text.isdigit() or int(text) < 1:
                raise ConfigError(f"{name} should be a number of threads but is {text!r}")
            return int(text)
    return max(1, usable_cores() // ranks)
