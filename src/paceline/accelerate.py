"""Hugging Face Accelerate with Paceline's group and `DistributedDataParallel` in place of torch's.

    from paceline.accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Needs `pip install 'paceline[accelerate]'`. `paceline run`, `torchrun` and `accelerate launch` all
start it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from paceline.ddp import DistributedDataParallel
from paceline.launch.init import init_process_group, world_size

try:
    import accelerate
    from accelerate.utils import DistributedType, InitProcessGroupKwargs
except ImportError as error:
    raise ImportError(
        f"paceline.accelerate needs Accelerate ({error}): pip install 'paceline[accelerate]'"
    ) from error

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):
    """Accelerate's class; data-parallel models are wrapped by Paceline.

    Other ways of training (FSDP, DeepSpeed, one process) are Accelerate's own, on Paceline's group.

    Args:
        cpu: train on the CPU; the default where there is no accelerator.
        **kwargs: those of Accelerate's class.

    Raises:
        ConfigError: the environment describes no job, or contradicts itself.

    Example:
        ```python
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ```
    """

    def __init__(self, *args: Any, cpu: bool = False, **kwargs: Any) -> None:
        if not dist.is_initialized() and world_size() > 1:
            init_process_group(timeout=_timeout(kwargs.get("kwargs_handlers")))
            # Accelerate would choose another number of threads, and warn, were this not set.
            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        # Without it Accelerate does not look for other ranks on a machine that has CPUs only.
        cpu = cpu or not torch.accelerator.is_available()
        super().__init__(*args, cpu=cpu, **kwargs)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Accelerate's preparation - device, precision, compilation - and Paceline's wrapper."""
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        is_wrapped_here = not evaluation_mode and not is_prepared and self._is_data_parallel()
        # For evaluation Accelerate does everything but wrap the model.
        prepared: torch.nn.Module = super().prepare_model(
            model, device_placement, evaluation_mode or is_wrapped_here
        )
        if not is_wrapped_here or not any(p.requires_grad for p in prepared.parameters()):
            return prepared
        return self._wrap(prepared)

    def _is_data_parallel(self) -> bool:
        if self.parallelism_config is not None and self.parallelism_config.tp_enabled:
            return False
        return bool(self.distributed_type == DistributedType.MULTI_CPU or self.multi_device)

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        on_cpu = self.device.type == "cpu"
        handler = self.ddp_handler  # DistributedDataParallelKwargs, if the program gave any
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if on_cpu else [self.local_process_index],
            **(handler.to_kwargs() if handler is not None else {}),
        )
        if handler is not None:
            handler.register_comm_hook(wrapped)
        return wrapped


def _timeout(handlers: Any) -> Any:
    given = [h.timeout for h in handlers or () if isinstance(h, InitProcessGroupKwargs)]
    return given[0] if given else None
