"""For every test: nothing is left behind, and the last line of a run lists what was skipped."""

from __future__ import annotations

import collections
import os
import sysconfig
from collections.abc import Iterator

import hypothesis
import pytest

from tests.harness import leaks

# Deadlines are pytest-timeout's business: on a shared machine hypothesis' own would fail at random.
hypothesis.settings.register_profile("paceline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("paceline")

# Programs that came with the test dependencies, mpirun among them, are beside the interpreter.
_SCRIPTS = sysconfig.get_path("scripts")
if _SCRIPTS not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join([_SCRIPTS, os.environ["PATH"]])

# Tests of one group run in one worker, one after the other. A Ray cluster is found by every program
# on the machine, so there is one at a time.
_GROUPS = {"test_launch_ray.py": "ray"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if group := _GROUPS.get(item.path.name):
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails the test that leaks a child process, a thread, an environment variable or shared
    memory.
    """
    before = leaks.snapshot()
    yield
    left = leaks.leaks(before)
    if left:
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of a run: what was skipped, and why.

    Workers have no terminal; their reports arrive at the process that has one.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    reports = terminal.stats.get("skipped", [])
    files = collections.defaultdict(collections.Counter)
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        file = report.nodeid.partition("::")[0]
        files[reason.removeprefix("Skipped: ")][file] += 1
    parts = [
        f"{reason} ({', '.join(f'{file}: {count}' for file, count in sorted(where.items()))})"
        for reason, where in sorted(files.items())
    ]
    terminal.write_line(
        f"skipped {len(reports)} tests: " + "; ".join(parts) if parts else "skipped no test"
    )
