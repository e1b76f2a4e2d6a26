"""Trains a small character-level GPT on the reference of the Python language, which comes with
Python, and lets it write a few lines.

    paceline run examples/char_gpt.py                   # one rank per core, under a minute on two
    paceline run examples/char_gpt.py --steps 2000      # better prose
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

CONTEXT = 64


class Excerpts(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every piece of `CONTEXT` characters of a text, with the characters that follow each."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        self.characters = torch.tensor([numbers[character] for character in text])

    def __len__(self) -> int:
        return len(self.characters) - CONTEXT

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.characters[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


class GPT(nn.Module):
    """A transformer that sees only what came before."""

    def __init__(self, characters: int, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        hidden = self.characters(x) + self.positions[:length]
        hidden = self.layers(hidden, mask=self.mask[:length, :length], is_causal=True)
        return self.head(hidden)


@torch.no_grad()
def write(model: nn.Module, text: Excerpts, length: int) -> str:
    """What the model writes after a new line."""
    model.eval()
    written = torch.tensor([[text.alphabet.index("\n")]])
    for _ in range(length):
        chances = model(written[:, -CONTEXT:])[0, -1].div(0.8).softmax(0)
        written = torch.cat([written, torch.multinomial(chances, 1)[None]], 1)
    return "".join(text.alphabet[number] for number in written[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--write", type=int, default=300, help="characters to write at the end")
    options = parser.parse_args()

    paceline.init_process_group()
    torch.manual_seed(0)
    text = Excerpts("\n".join(topics[name] for name in sorted(topics)))
    loader = paceline.DataLoader(text, batch_size=options.batch_size, shuffle=True)
    model = paceline.DistributedDataParallel(GPT(len(text.alphabet)))
    optimizer = paceline.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / options.steps)),
    )
    for step, (x, y) in zip(range(options.steps), loader, strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if paceline.is_main() and (step + 1) % 25 == 0:
            print(f"step {step + 1}: {loss.item() / math.log(2):.2f} bits per character")
    if paceline.is_main():
        print(write(model.module, text, options.write))


if __name__ == "__main__":
    main()
