"""Samplers, the loader and exact evaluation: every sample once, in an order that does not depend on
the number of ranks.
"""

from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.evaluation import Evaluation, EvaluationPart, EvaluationResult
from paceline.data.global_batch_sampler import GlobalBatchSampler
from paceline.data.loader import DataLoader
from paceline.data.permutation import Permutation
from paceline.data.sharded_iterable import ShardedIterable
from paceline.data.shares import Share, share_of

__all__ = [
    "DistributedSampler",
    "GlobalBatchSampler",
    "ShardedIterable",
    "DataLoader",
    "Evaluation",
    "EvaluationPart",
    "EvaluationResult",
    "Permutation",
    "Share",
    "share_of",
]
