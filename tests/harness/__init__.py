"""What the tests are built with: functions run on many real processes, and checks that nothing is
left behind.
"""

from tests.harness.ranks import (
    Outcome,
    RankDied,
    RanksTimedOut,
    free_rendezvous,
    init_group,
    run_ranks,
)

__all__ = ["Outcome", "RankDied", "RanksTimedOut", "free_rendezvous", "init_group", "run_ranks"]
