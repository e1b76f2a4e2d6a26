"""`Training`: the same bits at any number of ranks."""

from paceline.training.global_batch import GlobalBatch
from paceline.training.training import Training

__all__ = ["GlobalBatch", "Training"]
