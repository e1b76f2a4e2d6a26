"""The native core under the address, undefined-behaviour and thread sanitizers, ranks as threads
over one mapping.

`tests/native/*.c` are linked with `csrc/*.c` to one program per sanitizer; each of its scenarios is
a test here. A scenario checks its own results; the sanitizers check the rest.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import pathlib
import re
import shlex
import subprocess
import tempfile

import pytest

from tests.harness.build_cache import cached_build

# The first test of each sanitizer builds the program, unless an earlier run has.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = pathlib.Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = [
    *("-std=gnu11", "-g", "-fno-omit-frame-pointer", "-fwrapv", "-ffp-contract=off", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{CSRC}/include"),
]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
# What the program is told: stop at the first report, and look for leaks (which the process's end
# would hide).
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
SCENARIOS = re.findall(
    r"SCENARIO\((\w+)\)", (HERE / "main.c").read_text().partition("scenarios[]")[2]
)


def _compile(arguments: list[str]) -> None:
    done = subprocess.run([*COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join([*COMPILER, *arguments])}\n{done.stderr}"


def _optimisation(source: pathlib.Path) -> str:
    """Hundreds of loops, three times: there the compiler's own time counts."""
    return "-O0" if source.name in ("kernels.c", "update.c") else "-O1"


@functools.cache
def _why_not(sanitizer: str) -> str | None:
    """Why this sanitizer cannot be used here, or None."""
    with tempfile.TemporaryDirectory(prefix="paceline-sanitizer-") as directory:
        source, program = pathlib.Path(directory, "empty.c"), pathlib.Path(directory, "empty")
        source.write_text("int main(void) { return 0; }\n")
        build = [*COMPILER, *SANITIZERS[sanitizer], str(source), "-o", str(program)]
        try:
            built = subprocess.run(build, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"no C compiler: {error}"
        if built.returncode != 0:
            reason = built.stderr.strip().splitlines()[-1]
            return f"no runtime for the {sanitizer} sanitizer: {reason}"
        run = [*_launcher(), str(program)]
        ran = subprocess.run(run, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return f"the {sanitizer} sanitizer does not run here: {ran.stderr.strip()}"
    return None


@functools.cache
def _launcher() -> list[str]:
    """The thread sanitizer's memory layout does not fit every kernel's address randomisation."""
    without_randomisation = ["setarch", "-R"]
    try:
        works = (
            subprocess.run(
                [*without_randomisation, "true"], capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        works = False
    return without_randomisation if works else []


def _build(sanitizer: str, sources: list[pathlib.Path], target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-sanitizer-") as directory:
        objects = [str(pathlib.Path(directory, f"{path.stem}.o")) for path in sources]
        flags = [*FLAGS, *SANITIZERS[sanitizer]]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(
                    _compile, [*flags, _optimisation(source), "-c", str(source), "-o", goal]
                )
                for source, goal in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        _compile([*SANITIZERS[sanitizer], *objects, "-pthread", "-lm", "-o", str(target)])


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def program(request: pytest.FixtureRequest) -> pathlib.Path:
    """The test program, built with one sanitizer."""
    sanitizer: str = request.param
    if reason := _why_not(sanitizer):
        pytest.skip(reason)
    longest_first = sorted(
        [*CSRC.glob("*.c"), *HERE.glob("*.c")],
        key=lambda path: (path.name != "kernels.c", path.name),
    )
    headers = sorted([*CSRC.rglob("*.h"), *HERE.glob("*.h")])
    version = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=True)
    settings = [*COMPILER, version.stdout, *FLAGS, *SANITIZERS[sanitizer]]
    return cached_build(
        f"{sanitizer}_sanitizer",
        [*settings, *longest_first, *headers],
        lambda target: _build(sanitizer, longest_first, target),
    )


def _run(program: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_launcher(), str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **OPTIONS},
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_is_clean(program: pathlib.Path, scenario: str, request: pytest.FixtureRequest):
    # pytest-randomly prints its seed.
    seed = str(getattr(request.config.option, "randomly_seed", 1) % 2**32)
    done = _run(program, scenario, seed)
    assert done.returncode == 0, (
        f"{scenario} {seed} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )


def test_every_scenario_is_run(program: pathlib.Path):
    assert _run(program).stdout.split() == SCENARIOS
