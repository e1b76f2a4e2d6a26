"""Fixtures for every test: nothing is left behind, and a failing run tells its seed."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.harness import leaks

# Deadlines are pytest-timeout's business: on a shared machine hypothesis' own would fail at random.
hypothesis.settings.register_profile("paceline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("paceline")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fails the test that leaks a child process, a thread, an environment variable or shared
    memory.
    """
    before = leaks.snapshot()
    yield
    found = leaks.leaks(before)
    if found:
        pytest.fail("this test left behind:\n  " + "\n  ".join(found), pytrace=False)
