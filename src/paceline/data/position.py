"""Where training stands in its data - an epoch and the global batches of it that were consumed -
and how that is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.argument_checks import check_whole_number
from paceline.errors import ConfigError

__all__ = ["Position", "check_state"]

_POSITION = ("epoch", "batch")


class Position:
    """`(epoch, batch)` of the running pass, or of the next one if none is running.

    Every pass takes the next epoch by itself. A pass that was left early does not come back: the
    next one is a new epoch, as with torch's own samplers. `seek` makes the next pass start at a
    certain batch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self._next_pass = (0, 0)

    def begin(self) -> tuple[int, int]:
        """Start a pass; returns its epoch and its first batch."""
        self.epoch, self.batch = self._next_pass
        self._next_pass = (self.epoch + 1, 0)
        return self.epoch, self.batch

    def advance(self, epoch: int, batch: int) -> None:
        """Batches before `batch` of `epoch` have been handed to the training loop."""
        self.epoch, self.batch = epoch, batch

    def finish(self, epoch: int) -> None:
        """End the pass over `epoch`. Changes nothing if a later pass has started since."""
        # Two passes may run side by side; only the later one moves the position.
        if self.epoch == epoch:
            self.epoch, self.batch = self._next_pass

    def seek(self, epoch: int, batch: int) -> None:
        """Let the next pass start here."""
        self.epoch, self.batch = self._next_pass = (epoch, batch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of `epoch`; a position loaded within that epoch is kept."""
        epoch = check_whole_number("epoch", epoch)
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, found {epoch}")
        if epoch != self._next_pass[0]:
            self.seek(epoch, 0)


def check_state(
    state: Mapping[str, Any], identity: Mapping[str, Any], batches: int | None
) -> tuple[int, int]:
    """The epoch and batch of a saved state, if it was saved over the same data in the same order.

    Args:
        state: what `state_dict()` returned.
        identity: the entries that must be equal.
        batches: how many an epoch has, None if that is unknown.

    Raises:
        ConfigError: the state is of another kind, of other data, or outside of the data.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"not a saved position but a {type(state).__name__}: {state!r}")
    missing = [name for name in (*identity, *_POSITION) if name not in state]
    if missing:
        raise ConfigError(
            f"not a saved position of this kind: {', '.join(missing)} missing, "
            f"found {sorted(state)}"
        )
    differences = [
        f"{name} was {state[name]!r} and is now {value!r}"
        for name, value in identity.items()
        if state[name] != value
    ]
    if differences:
        raise ConfigError(
            "the saved position belongs to other data or another order: "
            f"{'; '.join(differences)}. Set up the data as it was when saving (rank and world size "
            "may differ), or start a new epoch"
        )
    epoch, batch = (check_whole_number(f"the saved {key}", state[key]) for key in _POSITION)
    if epoch < 0 or batch < 0 or (batches is not None and batch > batches):
        raise ConfigError(
            f"the saved position is outside of the data: epoch {epoch}, "
            f"batch {batch} of {batches} in an epoch"
        )
    return epoch, batch
