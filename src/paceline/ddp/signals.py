"""What ranks exchange beside their gradients: what each is about to do, and how it stands.

Every exchange of a model begins with one `Signal` per rank. A rank without data (`Call.ANSWER`)
follows whatever its peers are doing; two ranks with data that are doing different things are a
mistake in the program, and raise `MismatchError`.

`Signal.pack` and `Signal.unpack` are the only wire layout. The transports carry SIGNAL_WIDTH
numbers per rank without interpreting them; the native core compares them as bytes at most.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from paceline.ddp.weighting import NOTHING, AverageRule, Basis, Contribution, weights_of
from paceline.errors import MismatchError

__all__ = [
    "SIGNAL_WIDTH",
    "Call",
    "Signal",
    "calls_mismatch",
    "common_call",
    "refuse_half_stated",
    "weights_by_signals",
]

SIGNAL_WIDTH = 8  # numbers a packed signal has


_CALL_NAMES = (
    "no more data",
    "forward",
    "backward",
    "the end of backward",
    "a new plan",
    "dividing the state of an optimizer",
    "the step of an optimizer with divided state",
    "the state_dict() of an optimizer with divided state",
)


class Call(enum.IntEnum):
    """What a rank is about to do."""

    ANSWER = 0  # nothing of its own: it has no data, or it failed
    FORWARD = 1
    BACKWARD = 2
    CLOSE = 3  # all gradients are under way
    REPLAN = 4  # other buckets, because the model has other parameters than before
    OPTIMIZER_DIVIDE = 5
    OPTIMIZER_STEP = 6
    OPTIMIZER_STATE = 7

    @property
    def is_of_optimizer(self) -> bool:
        """Of one whose state is divided among the ranks (`paceline.optim`)."""
        return self >= Call.OPTIMIZER_DIVIDE

    def __str__(self) -> str:
        return _CALL_NAMES[int(self)]


class Signal(NamedTuple):
    """One rank's part of an exchange. A tuple, because every step makes and compares some."""

    call: Call
    contribution: Contribution = NOTHING
    failed: bool = False  # this rank cannot finish its step: nobody may apply it
    unused: bool = False  # some parameter got no gradient here
    buffers: bool = False  # module buffers are synchronised next
    backward_follows: bool = False
    # Nobody here will sum the gradients that are left to a step: they are averaged after all.
    sums_nothing_later: bool = False
    digest: int = 0  # of what an optimizer is about to do; 40 bits at most

    def pack(self) -> list[float]:
        """The signal as SIGNAL_WIDTH numbers."""
        (
            call,
            (reference, total, micro_batches, basis, leading),
            failed,
            unused,
            buffers,
            follows,
            sums_nothing_later,
            digest,
        ) = self
        return [
            float(call),
            reference,
            total,
            float(micro_batches),
            float(basis),
            leading,
            float(failed),
            unused + 2.0 * buffers + 4.0 * follows + 8.0 * sums_nothing_later + 16.0 * digest,
        ]

    @classmethod
    def unpack(cls, row: Sequence[float]) -> Signal:
        contribution = Contribution(row[1], row[2], int(row[3]), Basis(int(row[4])), row[5])
        bits = int(row[7])
        unused, buffers, follows, later = (bool(bits >> place & 1) for place in range(4))
        return cls(
            Call(int(row[0])), contribution, row[6] != 0, unused, buffers, follows, later, bits >> 4
        )


def common_call(signals: Sequence[Signal]) -> Call | None:
    """What the ranks with data are doing, ANSWER if none has any; None if they do different
    things.
    """
    calls = {signal.call for signal in signals if signal.call is not Call.ANSWER}
    if len(calls) > 1:
        return None
    return calls.pop() if calls else Call.ANSWER


def calls_mismatch(signals: Sequence[Signal], name: str, details: Sequence[str]) -> MismatchError:
    """What every rank of the model `name` raises if they do different things. `details`: what each
    has to say about it, if anything.
    """
    values = {
        rank: f"{signal.call} ({detail})" if detail else str(signal.call)
        for rank, (signal, detail) in enumerate(zip(signals, details, strict=True))
    }
    positions = ", ".join(f"rank {rank} is at {call}" for rank, call in values.items())
    if any(signal.call is Call.REPLAN for signal in signals):
        cure = "Every rank must change the model's parameters alike, before the same forward."
    elif any(signal.call.is_of_optimizer for signal in signals):
        cure = (
            "Every rank must call step(), state_dict() and load_state_dict() of an optimizer whose "
            "state is divided among them, also if only one of them saves it."
        )
    else:
        cure = (
            "Every rank must call forward and backward equally often; a rank that runs out of "
            "data calls no_more_data()."
        )
    return MismatchError(
        f"the ranks of {name} are at different points of their step: {positions}. {cure}", values
    )


def refuse_half_stated(signals: Sequence[Signal], name: str) -> None:
    """Raises if some ranks with samples stated their number and others did not."""
    bases = {
        rank: signal.contribution.basis
        for rank, signal in enumerate(signals)
        if not signal.contribution.empty
    }
    if Basis.SAMPLES in bases.values() and len(set(bases.values())) > 1:
        stated = ", ".join(str(rank) for rank, basis in bases.items() if basis is Basis.SAMPLES)
        others = ", ".join(str(rank) for rank, basis in bases.items() if basis is not Basis.SAMPLES)
        raise MismatchError(
            f"the gradients of {name} cannot be weighed against each other: rank {stated} stated "
            f"a number of samples with model.count(n), rank {others} did not. State it on every "
            "rank, or on none.",
            {rank: str(basis) for rank, basis in bases.items()},
        )


def weights_by_signals(signals: Sequence[Signal], rule: AverageRule) -> list[float] | None:
    """Every rank's weight in a backward that ranks have opened by these signals; None if it cannot
    count: a rank failed, or they do not go together.
    """
    if common_call(signals) is not Call.BACKWARD or any(signal.failed for signal in signals):
        return None
    try:
        refuse_half_stated(signals, "")
    except MismatchError:
        return None
    return weights_of([signal.contribution for signal in signals], rule)
