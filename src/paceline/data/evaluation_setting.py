"""How a dataset is evaluated while `paceline.Training` trains: to the same bits at any number of
ranks.

An `Evaluation` is told nothing about a training; the training says here what holds as long as it
exists. Batches are then cut as on a single rank, and ranks take whole ones; a model computes with
the threads of the training, on memory that begins where it begins in the loop over shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.data.changing_ranks import ChangingRanks

__all__ = ["EvaluationSetting", "announce", "current_setting"]


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationSetting:
    """What a training asks of evaluations.

    Args:
        threads: of torch.
        prepare: makes of a batch what the model is given.
        ranks: with whom this process evaluates in an elastic job; None if ranks do not change.
    """

    threads: int
    prepare: Callable[[Any], Any]
    ranks: ChangingRanks | None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside of the block torch has the training's threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Announced:
    setting: weakref.ref[EvaluationSetting] | None = None


def announce(setting: EvaluationSetting) -> None:
    """From now on evaluations of this process are done like this, as long as the setting exists."""
    _Announced.setting = weakref.ref(setting)


def current_setting() -> EvaluationSetting | None:
    """The setting of the training that this process makes; None if there is none."""
    return None if _Announced.setting is None else _Announced.setting()
