"""Reinforcement learning with many tiny steps: a pole is balanced on a cart. Every rank plays its
own games, with a policy that all train together.

    paceline run examples/cart_pole.py                  # under a minute on two ranks
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

import paceline

LONGEST = 200  # steps of a game


class Carts:
    """Many carts at once. A cart has a place, a speed, and a pole with an angle and its speed."""

    def __init__(self, games: int) -> None:
        self.games = games

    def reset(self) -> torch.Tensor:
        self.state = torch.rand(self.games, 4) * 0.1 - 0.05
        return self.state

    def step(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart to the right or to the left; returns the states, and who is still up."""
        place, speed, angle, spin = self.state.unbind(1)
        force = right.float() * 20 - 10
        sine, cosine = angle.sin(), angle.cos()
        pull = (force + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        push = pull - 0.05 * turn * cosine / 1.1
        self.state = torch.stack(
            [place + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], 1
        )
        up = (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < math.radians(12))
        return self.state, up


def play(policy: nn.Module, carts: Carts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One game on each cart: states and pushes, and how long the pole stayed up after each."""
    states, pushes, alive = [], [], []
    state, up = carts.reset(), torch.ones(carts.games, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(LONGEST):
            right = torch.bernoulli(policy(state).squeeze(1).sigmoid()).bool()
            states.append(state)
            pushes.append(right)
            alive.append(up)
            state, still = carts.step(right)
            up = up & still
            if not up.any():
                break
    mask = torch.stack(alive)
    left = mask.float().flip(0).cumsum(0).flip(0)
    return torch.stack(states)[mask], torch.stack(pushes)[mask], left[mask]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--games", type=int, default=8, help="at once, on each rank")
    options = parser.parse_args()

    paceline.init_process_group()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    policy = paceline.DistributedDataParallel(net)
    optimizer = paceline.optim.Adam(policy.parameters(), lr=0.02)
    torch.manual_seed(1 + paceline.rank())  # other games on every rank
    carts, start = Carts(options.games), time.perf_counter()
    for update in range(options.updates):
        states, pushes, left = play(net, carts)
        advantage = (left - left.mean()) / (left.std() + 1e-6)
        optimizer.zero_grad()
        # Games have different lengths: each rank's mean counts as much as it has pushes.
        with policy.count(len(pushes)):
            logits = policy(states).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, pushes.float(), reduction="none"
            )
            (loss * advantage).mean().backward()
        optimizer.step()
        if paceline.is_main() and (update + 1) % 20 == 0:
            rate = (update + 1) / (time.perf_counter() - start)
            lasted = len(pushes) / options.games
            print(f"update {update + 1}: a game lasts {lasted:.0f} steps, {rate:.0f} updates/s")


if __name__ == "__main__":
    main()
