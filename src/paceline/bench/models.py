"""The models that the benchmarks train: six, from many small tensors to a few large ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Case", "cases"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: how it is built and what it is fed.

    `steps` make a round: some tens of milliseconds, so that a quiet moment of the machine is found.
    """

    build: Callable[[], torch.nn.Module]
    batch: Callable[[], torch.Tensor]
    steps: int


def cases() -> dict[str, Case]:
    """The benchmark set, by name."""
    import torch
    from torch import nn

    def mlp(width: int, depth: int) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(depth):
            linear = nn.Linear(width, width)
            # Torch's default shrinks activations layer by layer: 100 of them down to denormal
            # numbers, which cost a hundred times as much and would be all that is measured.
            nn.init.kaiming_normal_(linear.weight)
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def convolutional() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 64), (64, 128)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4, 10))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
            self.head = nn.Linear(128, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.head(self.lstm(x)[0])
            return output

    def transformer() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    return {
        "mlp-64": Case(lambda: mlp(64, 4), lambda: torch.randn(32, 64), 40),
        "mlp-100-layers": Case(lambda: mlp(64, 100), lambda: torch.randn(32, 64), 4),
        "cnn-batchnorm": Case(convolutional, lambda: torch.randn(16, 3, 32, 32), 2),
        "mlp-17m": Case(lambda: mlp(2048, 4), lambda: torch.randn(64, 2048), 2),
        "transformer": Case(transformer, lambda: torch.randn(8, 64, 128), 2),
        "lstm": Case(Recurrent, lambda: torch.randn(16, 32, 64), 3),
    }
