"""DataParallel: one module, one line, all cores or accelerators. Scatter -> replicas -> gather."""

from paceline._pytree import Whole
from paceline.dp.data_parallel import DataParallel

__all__ = ["DataParallel", "Whole"]
