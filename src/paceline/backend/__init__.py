"""The `paceline` backend of torch.distributed: shared memory inside a host, Gloo between hosts."""

from paceline.backend.create import create_group
from paceline.backend.process_group import PacelineGroup

__all__ = ["PacelineGroup", "create_group"]
