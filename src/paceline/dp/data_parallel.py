"""`DataParallel`: one line, and a module runs on all cores or all accelerators."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from paceline._pytree import without_marks
from paceline._state_dict import align_names
from paceline._torch_internals import compiler_of_frames, not_compiled
from paceline.core import native_status
from paceline.dp.autotune import Autotune
from paceline.dp.gather import ScalarGather
from paceline.dp.process_executor import ProcessExecutor
from paceline.dp.replica_scope import is_inside_replica
from paceline.dp.scatter import Splitter
from paceline.dp.thread_executor import ThreadExecutor
from paceline.errors import ConfigError

__all__ = ["DataParallel"]

_SCALARS = ("mean", "sum", "stack")
_BATCH_NORMS = ("replica", "global")
_EXECUTORS = (None, "processes", "threads")
_NAMES_OF_COMPILED = ("_orig_mod", "dynamo_ctx", "get_compiler_config")
_NOT_COMPILED = (
    "it hands parts of the batch to other processes or devices, which run the module as it is. "
    "Compile the module instead: DataParallel(torch.compile(module))"
)


@dataclasses.dataclass(frozen=True)
class _Options:
    device_ids: Sequence[int | torch.device] | None
    workers: int | str | None
    threads: int
    executor: str | None
    split: dict[type, Splitter]
    scalars: str
    batch_norm: str
    timeout: float


class DataParallel(nn.Module):
    """Runs a module on parts of each batch at once, with the outputs and gradients of the whole.

    On the CPU, processes share the module's parameters; with accelerators, one thread drives each
    of `device_ids`. The first four arguments are those of `torch.nn.DataParallel`.

    Args:
        module: the model, on the CPU or an accelerator.
        dim: the dimension inputs are split along.
        workers: replicas on the CPU, this process included (default: cores / `threads`); "auto":
            split only if the first batches show that it pays.
        threads: of torch in each replica.
        executor: "processes" or "threads"; chosen by the device of the module by default.
        split: maps classes of your own to functions `(object, [(start, stop), ...]) -> parts`.
        scalars: how losses that `forward` returns are combined: "mean" (weighted by samples where
            their number is known), "sum" or "stack".
        batch_norm: "global" lets batch normalisation see the statistics of the whole batch, not
            those of each replica's share.
        timeout: seconds to wait for a worker that runs but does not answer.

    Raises:
        ConfigError: an argument is wrong, or there is no way to split on this machine.

    Example:
        ```python
        model = paceline.DataParallel(model)
        model(x).sum().backward()
        ```
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        workers: int | str | None = None,
        threads: int = 1,
        executor: str | None = None,
        split: Mapping[type, Splitter] | None = None,
        scalars: str = "mean",
        batch_norm: str = "replica",
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"DataParallel wraps a torch.nn.Module, got {module!r}")
        _check_arguments(workers, threads, executor, scalars, batch_norm, dim)
        self.module = module
        self.dim = dim
        self.device_ids: list[int] = []
        self.output_device: int | torch.device | None = None
        self._output_device = output_device
        self._is_closed = False
        self._compiler_is_reported = False
        self._options = _Options(
            device_ids, workers, threads, executor, dict(split or {}), scalars, batch_norm, timeout
        )
        self._scalars = ScalarGather(scalars)
        self._executor: ProcessExecutor | ThreadExecutor | None = self._make_executor()
        self._autotune = (
            Autotune()
            if workers == "auto" and isinstance(self._executor, ProcessExecutor)
            else None
        )

    # --- running ---------------------------------------------------------------------------------
    @not_compiled(_NOT_COMPILED, including_calls=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, on all replicas."""
        if compiler_of_frames() is not None:
            self._report_compiler()
        return self._run(inputs, kwargs)

    @not_compiled(_NOT_COMPILED)
    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_closed:
            raise ConfigError(
                "this DataParallel was closed; use the module itself, `model.module`, or wrap "
                "it again"
            )
        executor, autotune = self._executor, self._autotune
        if executor is None or is_inside_replica():
            return self._run_whole(inputs, kwargs)
        if autotune is not None:
            # One thread at a time, also where the batch stays whole: a split forward in another
            # thread would put proxies in place of the parameters.
            with self._module_at_rest():
                if self._autotune is not autotune:  # over, by another thread's forward
                    return self._run(inputs, kwargs)
                outputs = self._run_and_time(executor, autotune, inputs, kwargs)
        else:
            outputs = executor.run(inputs, kwargs)
        if (note := self._scalars.take_note()) is not None:
            warnings.warn(note, stacklevel=5)
        return outputs

    @not_compiled(_NOT_COMPILED)
    def _report_compiler(self) -> None:
        """Whoever compiles around us expects the module to be compiled."""
        parts = self.module.modules()
        if self._compiler_is_reported or any(map(_is_compiled, parts)):
            return
        self._compiler_is_reported = True
        warnings.warn(
            f"torch.compile compiles nothing inside DataParallel: {_NOT_COMPILED}", stacklevel=4
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward; each replica does so for itself."""
        self.module.compile(*args, **kwargs)

    def _run_whole(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, named = without_marks((inputs, kwargs))
        return self.module(*args, **named)

    def _run_and_time(
        self,
        executor: ProcessExecutor | ThreadExecutor,
        autotune: Autotune,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = autotune.run(
            lambda: self._run_whole(inputs, kwargs),
            lambda: executor.run(inputs, kwargs),
        )
        if autotune.is_over:
            self._autotune = None
            if not autotune.splitting_pays:
                executor.refresh()  # the workers end with the last graph that needs them
                self._executor = None
                warnings.warn(
                    "DataParallel(workers='auto') does not split: a forward took "
                    f"{autotune.describe()}. Its matrix products already use all cores, or the "
                    "batch is too small. To force splitting, pass workers=N",
                    stacklevel=2,
                )
        return result

    def _make_executor(self) -> ProcessExecutor | ThreadExecutor | None:
        options = self._options
        devices = self._devices()
        if devices:
            self.device_ids = [device.index for device in devices]
            output = devices[0] if self._output_device is None else _device(self._output_device)
            self.output_device = output.index if output.type != "cpu" else output
            if options.batch_norm == "global":
                raise ConfigError(
                    "batch_norm='global' is for worker processes on the CPU; on accelerators use "
                    "paceline.DistributedDataParallel with torch.nn.SyncBatchNorm"
                )
            return ThreadExecutor(
                self.module, devices, output, self.dim, self._scalars, options.split
            )
        cores = len(os.sched_getaffinity(0))
        requested = None if options.workers == "auto" else options.workers
        count = max(1, cores // options.threads) if requested is None else int(requested)
        if count == 1:
            return None
        status = native_status()
        if not status.available:
            self._report_missing_core(status.reason, is_requested=isinstance(requested, int))
            return None
        return ProcessExecutor(
            self.module,
            count,
            options.threads,
            self.dim,
            self._scalars,
            options.split,
            options.timeout,
            global_batch_norm=options.batch_norm == "global",
        )

    def _report_missing_core(self, reason: str, is_requested: bool) -> None:
        """Raise for whoever requested a number of workers; warn all others."""
        cure = (
            "reinstall paceline where a C compiler is found (`paceline doctor` shows what is "
            "missing)"
        )
        if is_requested:
            raise ConfigError(
                f"DataParallel(workers={self._options.workers}) on the CPU needs the native core, "
                f"which is missing: {reason}. To install it, {cure}; workers=1 or workers=None "
                "runs without it, unsplit in this process"
            )
        warnings.warn(
            f"DataParallel does not split batches: the native core is missing: {reason}. The "
            "module runs unsplit in this process, with all intra-op threads. To use workers, "
            f"{cure}",
            stacklevel=5,
        )

    def _devices(self) -> list[torch.device]:
        """The accelerators to run on; none for the CPU."""
        options = self._options
        if options.executor == "processes" or not torch.accelerator.is_available():
            if options.executor == "threads":
                raise ConfigError(
                    "executor='threads' is for accelerators, and this machine shows none"
                )
            return []
        first = next(self.module.parameters(), None)
        if (
            options.device_ids is None
            and options.executor is None
            and first is not None
            and first.device.type == "cpu"
        ):
            return []  # the module is on the CPU, whatever else the machine has
        ids: Sequence[int | torch.device] = options.device_ids or range(
            torch.accelerator.device_count()
        )
        return [_device(each) for each in ids]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """All of torch's ways to move a module lead here.

        `DataParallel(module).to(device)` runs on that device.
        """
        with self._module_at_rest():
            moved = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        if not self._is_closed and isinstance(self._executor, ThreadExecutor) != bool(
            self._devices()
        ):
            if self._executor is not None:
                self._executor.end()
            self.device_ids, self.output_device = [], None
            self._executor = self._make_executor()
        return moved

    @property
    def workers(self) -> int:
        """How many replicas a large enough batch is split among."""
        return 1 if self._executor is None else self._executor.workers

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes that run now, beside this one."""
        return [] if self._executor is None else self._executor.pids

    def refresh(self) -> None:
        """Let workers see a change that cannot be noticed: one inside an object of your own."""
        if self._executor is not None:
            self._executor.refresh()

    # --- life cycle ------------------------------------------------------------------------------
    def close(self) -> None:
        """End the workers. The module stays as it is and can be used by itself."""
        self._is_closed = True
        if self._executor is not None:
            self._executor.end()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- like the module it wraps ----------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # torch.compile asks every callable whether it is one of its own.
            if name == "module" or name in _NAMES_OF_COMPILED or name.startswith("_torchdynamo"):
                raise
            module = self.module
            if name in module._parameters or name in module._buffers:
                with self._module_at_rest():
                    return getattr(module, name)
            return getattr(module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; during another thread's forward this waits for its end."""
        with self._module_at_rest():
            return iter([*super().named_parameters(*args, **kwargs)])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; during another thread's forward this waits for its end."""
        with self._module_at_rest():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Accepts the module's own names, and those with the prefix `module.` of `state_dict`."""
        with self._module_at_rest():
            own = [f"module.{name}" for name in self.module.state_dict()]
            return super().load_state_dict(align_names(state_dict, own), *args, **kwargs)

    def _module_at_rest(self) -> AbstractContextManager[Any]:
        """A context in which no other thread's forward has proxies in place of the parameters.

        A gradient taken of a proxy would be that of one replica. A replica's own forward works with
        them and goes on; in a worker, nobody would ever release the lock it was forked with.
        """
        executor = self._executor
        if isinstance(executor, ProcessExecutor) and not is_inside_replica():
            return executor.module_at_rest()
        return nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_executor"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._executor = self._make_executor()


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or "_orig_mod" in part._modules


def _device(device: int | torch.device) -> torch.device:
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, device)
    return torch.device(device)


def _check_arguments(
    workers: int | str | None,
    threads: int,
    executor: str | None,
    scalars: str,
    batch_norm: str,
    dim: int,
) -> None:
    if workers is not None and workers != "auto" and (not isinstance(workers, int) or workers < 1):
        raise ConfigError(f"workers must be a positive number or 'auto', not {workers!r}")
    if threads < 1:
        raise ConfigError(f"threads, per worker, must be positive, not {threads!r}")
    if executor not in _EXECUTORS:
        raise ConfigError(f"executor must be 'processes' or 'threads', not {executor!r}")
    if scalars not in _SCALARS:
        raise ConfigError(f"scalars must be one of {', '.join(_SCALARS)}, not {scalars!r}")
    if batch_norm not in _BATCH_NORMS:
        raise ConfigError(f"batch_norm must be 'replica' or 'global', not {batch_norm!r}")
    if dim < 0:
        raise ConfigError(
            "dim must not be negative: inputs with different numbers of dimensions have different "
            f"last ones; got {dim}"
        )
