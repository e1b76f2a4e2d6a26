"""What `paceline chaos` makes of the steps that an elastic job shows."""

from __future__ import annotations

import os

import pytest

from paceline.cli import chaos
from paceline.launch.generation import Generation, Member
from paceline.launch.job_page import JobPage


class Launcher:
    """Shows a step of rank 0 at each look, None for a moment without ranks, and then ends."""

    pid = 0

    def __init__(self, page, steps):
        self._page, self._steps = page, list(steps)

    def poll(self):
        if not self._steps:
            return 0
        step = self._steps.pop(0)
        if step is None:
            self._page.vacate(0)
        else:
            self._page.seat(0, 0, os.getpid())
            self._page.set_step(0, step)
        return None


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((0, 5, 6, None), None),
        ((0, 5, 6, 5, 6), None),
        ((0, 5, None, 0, 1, 6), "all ranks were lost once:"),
        ((0, 5, None, 2, 6, None, 0, 6, None), "all ranks were lost 2 times:"),
    ],
)
def test_ranks_that_have_ended_are_not_lost(monkeypatch, steps, said):
    monkeypatch.setattr(chaos, "_POLL_S", 0.0)
    page = JobPage.create("job", min_ranks=1, max_ranks=1)
    monkeypatch.setattr(chaos, "find_job_page_below", lambda pid: page)
    # `_find_page` looks once before the first step is watched.
    launcher = Launcher(page, [steps[0], *steps])
    adversary = chaos._Adversary(launcher, (), 0.0, 60.0, lambda: None)
    adversary.strike_until_over()
    table = adversary.table()
    assert said in table if said else "lost" not in table


@pytest.mark.parametrize(("least_left", "struck_at"), [(0, [5, 6, 6]), (1, [7])])
def test_the_last_rank_is_spared_if_wanted(monkeypatch, least_left, struck_at):
    """Rank 1 has a state from step 7 on. After that, rank 0 was struck, and 1 is the last."""
    monkeypatch.setattr(chaos, "_POLL_S", 0.0)
    page = JobPage.create("job", min_ranks=1, max_ranks=2)
    monkeypatch.setattr(chaos, "find_job_page_below", lambda pid: page)
    killed_at = []
    monkeypatch.setattr(chaos.os, "kill", lambda pid, number: killed_at.append(page.step_in(0)))

    class TwoRanks(Launcher):
        def poll(self):
            ended = super().poll()
            if page.step_in(0) == 7 and page.step_in(1) is None:
                page.seat(1, 1, os.getppid())
                page.set_step(1, 7)
            return ended

    page.seat(1, 1, os.getppid())
    page.publish(Generation(0, (Member(0, 0, 0), Member(1, 1, 0))))
    launcher = TwoRanks(page, [0, 0, 5, 6, 6, 7, 7, 8])
    faults = [chaos.PlannedFault(chaos._Kind.KILL, step, 0.0, 0.0) for step in (5, 6, 6)]
    adversary = chaos._Adversary(launcher, faults, 0.0, 60.0, lambda: None, least_left=least_left)
    adversary.strike_until_over()
    assert killed_at == struck_at
