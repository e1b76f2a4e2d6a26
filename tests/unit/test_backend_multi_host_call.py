"""Calls of a group on several hosts: what Gloo's errors mean."""

from __future__ import annotations

import pytest

from paceline.backend.multi_host_call import is_timeout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Timed out waiting 4000ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("Read error [10.77.0.2]:29400: Connection timed out", False),  # the kernel gave it up
        ("Connection closed by peer [10.77.0.2]:29400", False),
    ],
)
def test_a_lost_connection_is_no_time_out_of_a_call(text, expected):
    assert is_timeout(text) == expected
