"""The process executor: share 0 of a batch runs here, the others in worker processes.

One forward, step by step:
 1. take the inputs apart and decide who gets what                       scatter, call_template
 2. let workers follow what the user did to the module                   replica_set
 3. write each worker's share into its channel and wake it               forward_call, channel
 4. run the module on share 0, with parameters that remember this call   autograd_functions
 5. read the workers' outputs and gather them with ours                  gather
Backward does steps 3 to 5 with gradients (gradients).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline._malloc import keep_freed_memory
from paceline._pytree import Whole, unflatten
from paceline.dp import serialization
from paceline.dp.call_template import call_key
from paceline.dp.forward_call import ForwardCall
from paceline.dp.gather import ScalarGather
from paceline.dp.global_batch_norm import StatisticsExchange
from paceline.dp.replica_set import ReplicaSet
from paceline.dp.scatter import Splitter, split_inputs
from paceline.dp.thread_limit import IntraOpThreadCap
from paceline.errors import ConfigError

__all__ = ["ProcessExecutor"]


class ProcessExecutor:
    """Runs a module on `workers` replicas, of which this process is the first."""

    def __init__(
        self,
        module: nn.Module,
        workers: int,
        threads: int,
        dim: int,
        scalars: ScalarGather,
        splitters: Mapping[type, Splitter],
        timeout_s: float,
        global_batch_norm: bool = False,
    ) -> None:
        self._module = module
        self.workers = workers
        self.threads = threads
        self._dim = dim
        self._scalars = scalars
        self._splitters = splitters
        self._leaf_types = (Whole, *splitters)
        self._timeout_s = timeout_s
        self._global_batch_norm = global_batch_norm
        self._has_tensor_splitter = any(issubclass(torch.Tensor, kind) for kind in splitters)
        self._lock = threading.RLock()
        self._replica_set: ReplicaSet | None = None
        self._thread_cap = IntraOpThreadCap(workers, threads)
        keep_freed_memory(workers)  # before workers are forked: they inherit it

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward on the whole batch. Threads that call at the same time take turns."""
        with self._lock:
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = None if self._has_tensor_splitter else call_key(args, kwargs)
        known = self._replica_set
        if known is not None and not known.pool.is_alive:
            known = None
        template = known.templates.get(key) if known is not None and key is not None else None
        if known is not None and template is not None:
            split = template.split.with_leaves([*args])
            known.seed(len(split.ranges) - 1)  # ahead of all else: workers see to it meanwhile
        else:
            split = split_inputs(
                (args, kwargs), self.workers, self._dim, self._splitters, self._leaf_types
            )
        if len(split.ranges) == 1 or self._has_lazy_parameters():
            args, kwargs = unflatten(split.spec, split.leaves)
            return self._module(*args, **kwargs)
        unknown = ""
        for _ in range(2):
            ready = self._ready_replica_set()
            if ready is not known or template is None:
                ready.seed(len(split.ranges) - 1)
            try:
                template = ready.template(key, split)
                return ForwardCall(ready, template, split, self._scalars).forward()
            except serialization.UnknownObject as error:
                unknown = str(error)
                self.refresh()  # inputs of a class defined after the workers were forked
        raise ConfigError(
            f"the input refers to {unknown}, which worker processes cannot import; define it at "
            "the top level of a module that can be imported"
        )

    def module_at_rest(self) -> AbstractContextManager[Any]:
        """A context in which no other thread is in a forward: all parameters are in the module.

        While a forward runs, the module holds proxies in their place.
        """
        return self._lock

    def refresh(self) -> None:
        """Start new workers at the next forward.

        Graphs that still wait for their backward keep the old ones.
        """
        with self._lock:
            self._replica_set = None
            self._thread_cap.end()

    def end(self) -> None:
        """End the workers, once no thread uses them."""
        with self._lock:
            replica_set, self._replica_set = self._replica_set, None
            if replica_set is not None:
                replica_set.pool.end()
            self._thread_cap.end()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        replica_set = self._replica_set
        return (
            replica_set.pool.pids if replica_set is not None and replica_set.pool.is_alive else []
        )

    def _has_lazy_parameters(self) -> bool:
        """Lazy modules get their shapes from a first forward, which is not split."""
        return self._replica_set is None and any(map(is_lazy, self._module.parameters()))

    def _ready_replica_set(self) -> ReplicaSet:
        known = self._replica_set
        if known is not None and known.pool.is_alive and known.follow_changes():
            return known
        parameters, forward_mutates = None, False
        if known is not None:
            forward_mutates = known.snapshot.forward_mutates
            if known.parameters.follow_changes() and known.parameters.belong_to(self._module):
                parameters = known.parameters
        self._replica_set = known = None  # ends the old workers, unless graphs need them
        self._thread_cap.begin()
        exchange = None
        if self._global_batch_norm:
            exchange = StatisticsExchange(self.workers - 1, self._timeout_s)
        with torch.inference_mode(False):  # the parameters' new memory is for training, too
            self._replica_set = ReplicaSet(
                self._module,
                self.workers,
                self.threads,
                self._timeout_s,
                self._lock,
                exchange,
                parameters,
                forward_mutates,
            )
        return self._replica_set
