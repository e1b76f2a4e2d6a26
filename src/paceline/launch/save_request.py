"""`save_requested()`: whether a signal asks all ranks to save.

SIGUSR1   save and go on
SIGTERM   save and stop: the machine is wanted back (Slurm, Kubernetes, spot instances)
"""

from __future__ import annotations

from paceline.launch.process_context import ProcessContext, current_context, enter_context
from paceline.launch.save_agreement import SaveRequest

__all__ = ["save_requested"]


def save_requested() -> SaveRequest:
    """Whether all ranks should save now. Call it once per step, on every rank, in the main thread.

    The first call starts listening for SIGTERM and SIGUSR1.

    Returns:
        True on all ranks at the same step, once per request; its `stop` is true if the job should
        end after saving.

    Example:
        ```python
        for step in range(10):
            ...
            if request := paceline.save_requested():
                paceline.save("last.pt", model=model, optimizer=optimizer, step=step)
                if request.stop:
                    break
        ```
    """
    context = current_context() or enter_context(ProcessContext())
    return context.save_listener().next_call()
