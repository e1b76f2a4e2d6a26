"""Which devices the tests of this directory run on, and which implementations the matrix
compares.
"""

from __future__ import annotations

import pathlib

import pytest

import paceline
from tests.devices.machine import Machine, chosen_device_type
from tests.sim.build import SimUnavailable, library

SIMULATED_DEVICES = 4
BUILD_TIMEOUT_S = 600  # the first test of a fresh machine also compiles the device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == pathlib.Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))


@pytest.fixture(scope="session")
def sim_machine() -> Machine:
    """Simulated devices; skips where they cannot be built, fails where building them goes wrong."""
    if chosen_device_type() != "sim":
        pytest.skip(f"about simulated devices; this run is on {chosen_device_type()}")
    try:
        library()
    except SimUnavailable as reason:
        pytest.skip(str(reason))
    return Machine("sim", SIMULATED_DEVICES)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    """The devices of the matrix: simulated, or real ones if PACELINE_TEST_DEVICE asks for them."""
    if chosen_device_type() == "sim":
        return request.getfixturevalue("sim_machine")
    import torch

    if not torch.cuda.is_available():
        pytest.exit(
            f"PACELINE_TEST_DEVICE=cuda, but torch {torch.__version__} sees no CUDA device here",
            returncode=1,
        )
    return Machine("cuda", torch.cuda.device_count())


@pytest.fixture(params=["stock", "paceline"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Whose class a test of the matrix uses: torch's own as the reference, and ours.

    The test module names the class in `SUBJECT`.
    """
    subject = request.module.SUBJECT
    if request.param == "paceline" and subject not in paceline.__all__:
        pytest.skip(f"paceline.{subject} does not exist yet")
    return request.param


@pytest.fixture
def needs(machine: Machine):
    """`needs(4)`: skip where there are fewer devices."""

    def require(count: int) -> None:
        if machine.count < count:
            pytest.skip(f"needs {count} devices, this machine has {machine.count}")

    return require
