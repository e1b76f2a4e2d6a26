"""Builds the native core: one shared library with a plain C ABI, loaded through ctypes.

Everything else about the package is in pyproject.toml. Two things need code here:

* the core is compiled with the C compiler alone - no Python headers, no torch - so its wheel is
  tagged
  `py3-none-<platform>` and serves every Python;
* a machine without a compiler still gets a working (slower) install: the failure is written to
  `native_build.json`, which `paceline doctor` shows.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = pathlib.Path(__file__).parent
LIBRARY = "libpaceline_core.so"
SOURCES = sorted(str(p.relative_to(HERE)) for p in (HERE / "csrc").glob("*.c"))
HEADERS = sorted(str(p.relative_to(HERE)) for p in (HERE / "csrc").glob("**/*.h"))
# -ffp-contract=off: a fused multiply-add on one machine and none on another would give other bits.
CFLAGS = [
    "-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fwrapv",
    "-Wall", "-Wextra", "-Icsrc/include",
]  # fmt: skip
LDFLAGS = ["-shared", "-pthread", "-lm"]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


class BuildCore(build_ext):
    """Compiles `csrc/*.c` in one go; a failure is recorded, not raised, unless
    PACELINE_REQUIRE_NATIVE=1.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        library = pathlib.Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(".tmp")
        extra = shlex.split(os.environ.get("CFLAGS", ""))
        command = [*compiler(), *CFLAGS, *extra, *SOURCES, "-o", str(partial), *LDFLAGS]
        record = {"command": shlex.join(command), "machine": platform.machine()}
        error = run(command)
        if error is None:
            partial.replace(library)  # never a half-written library under the final name
        else:
            partial.unlink(missing_ok=True)
            library.unlink(missing_ok=True)
            record["error"] = error
        library.with_name("native_build.json").write_text(json.dumps(record, indent=1))
        if error is None:
            return
        if os.environ.get("PACELINE_REQUIRE_NATIVE") == "1":
            raise SystemExit(f"paceline: the native core did not build: {error}")
        print(
            f"paceline: the native core did not build, installing without it: {error}",
            file=sys.stderr,
        )

    def get_outputs(self) -> list[str]:
        outputs = [pathlib.Path(path) for path in super().get_outputs()]
        outputs += [path.with_name("native_build.json") for path in outputs]
        return [str(path) for path in outputs if path.exists()]

    def copy_extensions_to_source(self) -> None:
        """Editable installs: put the library beside the Python sources."""
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            built = pathlib.Path(self.build_lib, self.get_ext_filename(ext.name))
            target = pathlib.Path(build_py.get_package_dir("paceline.core"))
            for path in (built, built.with_name("native_build.json")):
                goal = target / path.name
                goal.unlink(missing_ok=True)
                if path.exists():
                    self.copy_file(str(path), str(goal))


def run(command: list[str]) -> str | None:
    """Run a compiler command; return None, or one line that says why it failed."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return None
    lines = [
        line for line in done.stderr.splitlines() if "error" in line.lower()
    ] or done.stderr.splitlines()
    return f"{command[0]} exited with code {done.returncode}" + (f": {lines[0]}" if lines else "")


class OneWheelForAllPythons(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform_tag = super().get_tag()
        built = pathlib.Path(self.bdist_dir or "", "paceline", "core", LIBRARY)
        return ("py3", "none", platform_tag if built.exists() else "any")


setup(
    ext_modules=[Extension("paceline.core._core", sources=SOURCES, depends=HEADERS)],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": OneWheelForAllPythons},
)
