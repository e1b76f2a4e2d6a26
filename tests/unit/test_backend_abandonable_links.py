"""Connections between hosts of an elastic job: a group that fails to form does not end the job."""

from __future__ import annotations

import datetime
import subprocess
import sys
import textwrap
import types

import pytest
import torch.distributed as dist

from paceline.backend import abandonable_links
from paceline.backend.abandonable_links import connect_unless_obsolete
from paceline.backend.lane import connect
from paceline.errors import GroupAborted, GroupError, PeerLost

LIMIT = datetime.timedelta(seconds=20)


def test_what_the_store_knows_of_a_group_is_raised_as_it_is():
    """Gloo waits for the address of a rank that will not come, in a store of ours."""
    looks = []

    def is_obsolete():
        looks.append(1)
        return len(looks) > 3

    store = abandonable_links._MeetingStore(dist.HashStore(), is_obsolete)
    with pytest.raises(GroupAborted, match="have changed"):
        connect(store, 0, 2, LIMIT)


def test_a_process_may_end_as_soon_as_its_group_is_obsolete():
    """Nobody is left in the store, whom the interpreter would abort the process for."""
    script = """
        import datetime, time, types
        import torch.distributed as dist
        from paceline.backend.abandonable_links import connect_unless_obsolete
        from paceline.backend.host_placement import Placement
        from paceline.errors import GroupAborted

        end = time.monotonic() + 0.2
        communicator = types.SimpleNamespace(rank=0, size=1)
        try:
            connect_unless_obsolete(
                dist.HashStore(),
                Placement.of(0, [0, 1]),
                communicator,
                datetime.timedelta(seconds=30),
                lambda: time.monotonic() > end,
            )
        except GroupAborted:
            print("obsolete")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    ended = [(process.communicate(timeout=60)[0], process.returncode) for process in processes]
    assert ended == [("obsolete\n", 0)] * 6


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GroupAborted("the ranks have changed"), GroupAborted),
        (GroupError("no connection between hosts: refused"), PeerLost),
        (RuntimeError("Connection refused"), PeerLost),
    ],
)
def test_ranks_that_cannot_be_reached_are_lost(monkeypatch, error, expected):
    def no_links(*_):
        raise error

    monkeypatch.setattr(abandonable_links, "Links", no_links)
    placement = types.SimpleNamespace(rank=3)
    with pytest.raises(expected, match=str(error).split(":")[-1]):
        connect_unless_obsolete(dist.HashStore(), placement, None, LIMIT, lambda: False)
