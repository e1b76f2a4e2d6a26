"""Optimizers with torch's names, arguments and state, whose step is one pass over memory.

    optimizer = paceline.optim.AdamW(model.parameters(), lr=3e-4)

They are subclasses of torch's: schedulers, hooks, `GradScaler`, `state_dict` and everything else
that works with those works with these, and a checkpoint of one loads into the other.
"""

from __future__ import annotations

from paceline.optim.adagrad import Adagrad
from paceline.optim.adam import Adam, AdamW
from paceline.optim.interrupted_step import InterruptedStep, ParameterRecord
from paceline.optim.sgd import SGD
from paceline.optim.sharded import Sharded

__all__ = ["SGD", "Adam", "AdamW", "Adagrad", "InterruptedStep", "ParameterRecord", "Sharded"]
