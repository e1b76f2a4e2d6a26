"""Saved positions: whether a state belongs to the data it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

__all__ = ["check_state"]


def check_state(
    state: Mapping[str, Any], identity: Mapping[str, Any], batches: int | None
) -> tuple[int, int]:
    """The epoch and batch of a state, if it was saved over the same data in the same order.

    `identity` is what must be equal; `batches` are those of an epoch, None if nobody knows.
    """
    missing = [name for name in (*identity, "epoch", "batch") if name not in state]
    if missing:
        raise ConfigError(
            f"not a saved position of this kind: {', '.join(missing)} missing, found {sorted(state)}"
        )
    different = {
        name: (state[name], here) for name, here in identity.items() if state[name] != here
    }
    if different:
        found = "; ".join(
            f"{name} was {saved!r} and is now {here!r}" for name, (saved, here) in different.items()
        )
        raise ConfigError(
            f"the saved position belongs to other data or another order: {found}. "
            "Set up the data as it was when saving (rank and world size may differ), or start the epoch anew"
        )
    epoch, batch = int(state["epoch"]), int(state["batch"])
    if epoch < 0 or batch < 0 or (batches is not None and batch > batches):
        raise ConfigError(
            f"the saved position is outside of the data: epoch {epoch}, batch {batch} of {batches} in an epoch"
        )
    return epoch, batch
