"""Where training stands in its data: an epoch and the global batches of it that were consumed."""

from __future__ import annotations

from paceline.errors import ConfigError

__all__ = ["Progress"]


class Progress:
    """`(epoch, batch)` of the running pass, or of the next one if none is running.

    Every pass takes the next epoch by itself. A pass that was left early does not come back: the
    next one is a new epoch, as with torch's own samplers. `seek` makes the next pass start at a
    certain batch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self._upcoming = (0, 0)

    def begin(self) -> tuple[int, int]:
        """Start a pass; returns its epoch and its first batch."""
        self.epoch, self.batch = self._upcoming
        self._upcoming = (self.epoch + 1, 0)
        return self.epoch, self.batch

    def consumed(self, epoch: int, batch: int) -> None:
        """Batches before `batch` of `epoch` have been handed to the training loop."""
        self.epoch, self.batch = epoch, batch

    def finish(self, epoch: int) -> None:
        """The pass over `epoch` came to its end. One that another pass has overtaken changes
        nothing.
        """
        if self.epoch == epoch:
            self.epoch, self.batch = self._upcoming

    def seek(self, epoch: int, batch: int) -> None:
        """Let the next pass start here."""
        self.epoch, self.batch = self._upcoming = (epoch, batch)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of `epoch`; a position loaded within that epoch is kept."""
        if epoch < 0:
            raise ConfigError(f"epoch must not be negative, found {epoch}")
        if epoch != self._upcoming[0]:
            self.seek(epoch, 0)
