"""The `paceline` backend of torch.distributed: shared memory inside a host, Gloo between hosts."""

from paceline.groups.creation import create_group
from paceline.groups.process_group import PacelineGroup

__all__ = ["PacelineGroup", "create_group"]
