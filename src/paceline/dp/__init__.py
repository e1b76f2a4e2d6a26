"""DataParallel: one module, one line, all cores or accelerators. Scatter -> replicas -> gather."""

from paceline.dp.data_parallel import DataParallel
from paceline.dp.structure import Whole

__all__ = ["DataParallel", "Whole"]
