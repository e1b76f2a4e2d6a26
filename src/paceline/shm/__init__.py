"""The host engine: collectives over shared memory for the ranks of one host. Python face of the native core."""

from paceline.shm.buckets import BucketArena
from paceline.shm.communicator import Communicator
from paceline.shm.native import NativeStatus, native_status
from paceline.shm.processes import host_identity

__all__ = ["BucketArena", "Communicator", "NativeStatus", "host_identity", "native_status"]
