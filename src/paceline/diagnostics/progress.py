"""A progress bar: loss, samples per second, and the share of time spent on synchronisation."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.diagnostics.host_ranks import HostRanks
from paceline.diagnostics.stragglers import Straggler
from paceline.integrations.tensorboard import ScalarWriter
from paceline.telemetry.recorder import recorder

if TYPE_CHECKING:
    from rich.progress import Progress as _Bar

__all__ = ["Progress"]

_LINE_EVERY_S = 2.0


class Progress:
    """Shows the progress of a run: a live bar on a terminal, a line every two seconds elsewhere.

    Args:
        steps: how many there will be.
        terminal: the path of the terminal to draw on, for a rank whose own output goes through a
            launcher. By default the bar is drawn where standard error goes, if that is a terminal.
        enabled: whether this rank shows it: `paceline.is_main()`.
        tensorboard: a directory for the same figures as scalars.

    Raises:
        ConfigError: TensorBoard is not installed.

    Example:
        ```python
        with paceline.diagnostics.Progress(10, enabled=paceline.is_main()) as progress:
            for step in range(10):
                progress.step(loss=0.5, samples=16, sync_s=0.0)
        ```
    """

    def __init__(
        self,
        steps: int,
        *,
        terminal: str | None = None,
        enabled: bool = True,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        self._steps = steps
        self._enabled = enabled
        self._terminal = terminal
        self._stack = contextlib.ExitStack()
        self._bar: _Bar | None = None
        self._start = self._last_line = 0.0
        self._done = 0
        self._samples = 0
        self._host_ranks = HostRanks()
        self._scalars = ScalarWriter(tensorboard) if tensorboard is not None and enabled else None
        self._sync_s = 0.0

    def __enter__(self) -> Self:
        self._start = self._last_line = time.perf_counter()
        if self._enabled and (self._terminal is not None or sys.stderr.isatty()):
            self._bar = self._draw_on_terminal()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self._scalars is not None:
            self._scalars.close()

    def step(self, loss: float, samples: int, sync_s: float) -> None:
        """Report a step: its loss, the samples of all ranks, and the seconds this rank waited for
        others.
        """
        self._done += 1
        recorder.scalars(loss, samples)
        self._samples += samples
        self._sync_s += sync_s
        if self._scalars is not None:
            speed, share = self.samples_per_second, self.sync_share
            self._scalars.write(self._done, loss=loss, samples_per_second=speed, sync_share=share)
        if not self._enabled:
            return
        if self._bar is None and not self._is_due():
            return
        text = self._text(loss)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, text=text)
        else:
            self._last_line = time.perf_counter()
            sys.stdout.write(f"step {self._done}/{self._steps}  {text}\n")
            sys.stdout.flush()

    def _is_due(self) -> bool:
        return time.perf_counter() - self._last_line >= _LINE_EVERY_S or self._done == self._steps

    @property
    def samples_per_second(self) -> float:
        """Over the whole run so far."""
        return self._samples / max(time.perf_counter() - self._start, 1e-9)

    @property
    def sync_share(self) -> float:
        """The share of the time so far that went into synchronisation."""
        return self._sync_s / max(time.perf_counter() - self._start, 1e-9)

    @property
    def straggler(self) -> Straggler | None:
        """The rank of this host that the others have waited for lately, if there is one; looked
        for every two seconds.
        """
        return self._host_ranks.straggler()

    def _text(self, loss: float) -> str:
        text = (
            f"loss {loss:.4f}  {self.samples_per_second:,.0f} samples/s  sync {self.sync_share:.1%}"
        )
        slow = self.straggler
        return text if slow is None else f"{text}  {slow.describe()}"

    def _draw_on_terminal(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        file = None
        if self._terminal is not None:
            # The exit stack is the context manager.
            file = self._stack.enter_context(pathlib.Path(self._terminal).open("w"))  # noqa: SIM115
        console = Console(file=file, stderr=file is None, force_terminal=True)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        bar = self._stack.enter_context(Bar(*columns, console=console))
        bar.add_task("", total=self._steps, text="")
        return bar
