"""Strategies for Lightning's `Trainer` and `Fabric`: Paceline's group and Paceline's
`DistributedDataParallel` in place of torch's.

    from paceline.lightning import PacelineStrategy

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=PacelineStrategy())

Needs `pip install 'paceline[lightning]'`. Arguments are those of Lightning's `DDPStrategy`; what it
passes on to torch's `DistributedDataParallel` goes to ours, which takes more (`average`,
`check_finite`, ...). `python train.py`, `torchrun` and `paceline run` all start it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import native_status
from paceline.ddp import DistributedDataParallel
from paceline.launch.backend_choice import accelerator_backend, choose_backend, known_backends
from paceline.launch.init import init_process_group

try:
    from lightning.fabric.strategies import DDPStrategy as _FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy as _TrainerDDPStrategy
except ImportError as error:
    raise ImportError(
        f"paceline.lightning needs Lightning ({error}): pip install 'paceline[lightning]'"
    ) from error

__all__ = ["PacelineFabricStrategy", "PacelineStrategy"]


class PacelineStrategy(_TrainerDDPStrategy):
    """Data-parallel training by Paceline under Lightning's `Trainer`.

    Args:
        **kwargs: those of Lightning's `DDPStrategy` and of `paceline.DistributedDataParallel`.
            Without `process_group_backend` ranks of one host use shared memory.

    Example:
        ```python
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=PacelineStrategy())
        trainer.fit(model, loader)
        ```
    """

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        _join(self)
        # Finds a group and does not make one; what else Lightning does here stays its own.
        super().setup_distributed()

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or _default_backend(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=devices, **self._ddp_kwargs)


class PacelineFabricStrategy(_FabricDDPStrategy):
    """Data-parallel training by Paceline under Lightning's `Fabric`.

    Args:
        **kwargs: those of Fabric's `DDPStrategy` and of `paceline.DistributedDataParallel`. Without
            `process_group_backend` ranks of one host use shared memory.

    Example:
        ```python
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=PacelineFabricStrategy())
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        ```
    """

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        devices = self._determine_ddp_device_ids()
        return DistributedDataParallel(module, device_ids=devices, **self._ddp_kwargs)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        _join(self)
        super()._setup_distributed()

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or _default_backend(self.root_device)


def _join(strategy: Any) -> None:
    """Make the default group, with the rank that Lightning has given this process.

    Ours rather than torch's function, for the failures it makes known to the other ranks and for
    what it shows of a run.
    """
    if dist.is_initialized():
        return
    place = strategy.cluster_environment
    os.environ["MASTER_ADDR"] = place.main_address
    os.environ["MASTER_PORT"] = str(place.main_port)
    device = strategy.root_device
    init_process_group(
        strategy._get_process_group_backend(),
        init_method="env://",
        timeout=strategy._timeout,
        rank=place.global_rank(),
        world_size=place.world_size(),
        device_id=None if device.type == "cpu" else device,
    )


def _default_backend(device: torch.device) -> str:
    accelerator = None if device.type == "cpu" else accelerator_backend()
    return choose_backend(None, os.environ, native_status(), accelerator, known_backends()).backend
