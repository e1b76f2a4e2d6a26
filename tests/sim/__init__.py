"""A simulated accelerator, device type `sim`, for testing device code where there is no GPU.

    tests/sim/build.py            compiles csrc/ once and caches it
    tests/sim/device.py           loads it into this process and makes it `torch.sim`
    tests/sim/cells.py            fused LSTM and GRU cells
    tests/sim/process_group.py    a stream-ordered process group, the backend `simccl`
    tests/sim/stock_parallel.py   what torch's own nn.DataParallel lacks off CUDA
    tests/sim/csrc/               memory, streams, dispatch, and the happens-before checker

Load it in a process of its own (`tests.harness.run_ranks`): torch starts its autograd threads, one
per device, at the first backward, so a process that has already run one cannot gain devices.
"""

from tests.sim.build import SimUnavailable, library
from tests.sim.device import (
    forget_counts,
    hazards,
    host_view,
    kernel,
    left_out,
    load,
    op_counts,
    raise_at_hazard,
    thread_count,
)

__all__ = [
    "SimUnavailable",
    "library",
    "load",
    "hazards",
    "raise_at_hazard",
    "left_out",
    "op_counts",
    "thread_count",
    "forget_counts",
    "kernel",
    "host_view",
]
