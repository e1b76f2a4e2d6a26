"""For every test: nothing is left behind, and the last line of a run lists what was skipped."""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Iterator

import hypothesis
import pytest

from tests.harness import leaks
from tests.harness.ranks import HOSTS
from tests.harness.skips import pytest_unconfigure

__all__ = ["pytest_unconfigure"]

# Deadlines are pytest-timeout's business: on a shared machine hypothesis' own would fail at random.
hypothesis.settings.register_profile("paceline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("paceline")

# Programs that came with the test dependencies, mpirun among them, are beside the interpreter.
_SCRIPTS = sysconfig.get_path("scripts")
if _SCRIPTS not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join([_SCRIPTS, os.environ["PATH"]])


# A shell lets what it starts in its background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what holds for ranks of one host, where all ranks believe to be on several."""
    mark = item.get_closest_marker("one_host")
    if mark is not None and HOSTS in os.environ:
        pytest.skip(f"on several hosts: {mark.args[0]}")


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
