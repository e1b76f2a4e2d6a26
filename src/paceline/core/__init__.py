"""The host engine: collectives over shared memory for the ranks of one host. Python face of the
native core.
"""

from paceline._linux import host_identity
from paceline.core.abi import NativeStatus, native_status
from paceline.core.arena import BucketArena
from paceline.core.communicator import Communicator

__all__ = ["BucketArena", "Communicator", "NativeStatus", "host_identity", "native_status"]
