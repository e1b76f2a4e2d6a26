"""A bucket: gradients that travel together, and the way in and out of their memory."""

from paceline.ddp.buckets.base import Bucket, Fill
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.buckets.in_place import InPlaceBucket
from paceline.ddp.buckets.sparse import SparseBucket

__all__ = ["Bucket", "DenseBucket", "Fill", "InPlaceBucket", "SparseBucket"]
