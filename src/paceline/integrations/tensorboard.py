"""Scalars for TensorBoard. TensorBoard itself is imported only when a writer is made."""

from __future__ import annotations

import os

from paceline.errors import ConfigError

__all__ = ["ScalarWriter"]


class ScalarWriter:
    """Writes one point per name and step to a directory that TensorBoard reads."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"scalars for TensorBoard need its package ({error}): "
                "pip install 'paceline[tensorboard]'"
            ) from error
        self._writer: SummaryWriter = SummaryWriter(os.fspath(directory))

    def write(self, step: int, **values: float) -> None:
        """Write the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
