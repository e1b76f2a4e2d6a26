"""Connections between hosts of an elastic job: a group that fails to form does not end the job."""

from __future__ import annotations

import datetime
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
