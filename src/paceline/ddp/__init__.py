"""DistributedDataParallel: plan -> buckets -> reducer -> module."""

from paceline.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.ddp.replicate import replica_of, replicate
from paceline.ddp.sync_batchnorm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "replica_of", "replicate"]
