"""The native core on ARM: compiled for aarch64 and run under qemu.

The program is that of the sanitizers (`tests/native/*.c`), with the flags of the real build. Its
scenario `digests` prints what each kernel computes; ARM's lines are those of this machine.
"""

from __future__ import annotations

import pathlib
import platform
import re
import shutil
import subprocess

import pytest

import paceline.core
from tests.harness.build_cache import cached_build

# The first test builds the programs, unless an earlier run has.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
ARM_COMPILER = "aarch64-linux-gnu-gcc"
ARM_RUN = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
SCENARIOS = re.findall(
    r"SCENARIO\((\w+)\)", (HERE / "main.c").read_text().partition("scenarios[]")[2]
)
# qemu has no process_vm_readv, with which ranks read each other's memory.
NOT_EMULATED = {"direct", "tree_sums"}


@pytest.fixture(autouse=True)
def _needs_emulator() -> None:
    missing = [tool for tool in (ARM_COMPILER, ARM_RUN[0]) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (gcc-aarch64-linux-gnu, qemu-user)")


def _build_flags() -> list[str]:
    """Those of setup.py, which cannot be imported: it would build."""
    listed = (ROOT / "setup.py").read_text().partition("CFLAGS = [")[2].partition("]")[0]
    flags = [flag for flag in re.findall(r'"([^"]+)"', listed) if not flag.startswith("-I")]
    assert "-ffp-contract=off" in flags
    return [*flags, f"-I{CSRC}", f"-I{CSRC}/include"]


def _program(compiler: str, *more_flags: str) -> pathlib.Path:
    sources = sorted([*CSRC.glob("*.c"), *HERE.glob("*.c")])
    headers = sorted([*CSRC.rglob("*.h"), *HERE.glob("*.h")])
    flags = [*_build_flags(), *more_flags]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)

    def build(target: pathlib.Path) -> None:
        command = [compiler, *flags, *map(str, sources), "-o", str(target), "-pthread", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return cached_build("arm_program", [version.stdout, *flags, *sources, *headers], build)


def _run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=110, check=False
    )


def _run_on_arm(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return _run([*ARM_RUN, str(_program(ARM_COMPILER, *flags))], *arguments)


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in NOT_EMULATED])
def test_scenario_passes_on_arm(scenario: str, request: pytest.FixtureRequest):
    seed = str(getattr(request.config.option, "randomly_seed", 1) % 2**32)
    done = _run_on_arm(scenario, seed)
    assert done.returncode == 0, (
        f"{scenario} {seed} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares ARM with x86-64")
class TestBitsOfArm:
    def test_kernels_give_the_bits_of_the_core_of_this_machine(self, tmp_path: pathlib.Path):
        library = pathlib.Path(paceline.core.__file__).with_name("libpaceline_core.so")
        program = tmp_path / "digests"
        include = [f"-I{CSRC}", f"-I{CSRC}/include"]
        source = ["-std=gnu11", "-O1", "-DDIGESTS_ALONE", str(HERE / "digests.c")]
        link = [str(library), f"-Wl,-rpath,{library.parent}", "-pthread", "-o", str(program)]
        subprocess.run(["cc", *include, *source, *link], check=True)
        here = _run([str(program)])
        on_arm = _run_on_arm("digests", "5")
        assert here.returncode == on_arm.returncode == 0
        assert len(here.stdout.splitlines()) > 400
        assert on_arm.stdout == here.stdout

    def test_a_fused_multiply_add_would_show(self):
        plain = _run_on_arm("digests", "5")
        fused = _run_on_arm("digests", "5", flags=("-O2", "-ffp-contract=fast"))
        assert plain.stdout != fused.stdout
