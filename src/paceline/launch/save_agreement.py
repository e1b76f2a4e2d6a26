"""How all ranks come to the same call of `save_requested()`, without ever waiting for each other.

A rank that waited in its call for the others would stop a loop that synchronises in every step: a
peer that is one step ahead waits for that rank in its backward. So ranks agree on a call that none
of them has made yet, and nobody waits. They share a register in the store, which is changed by
compare-and-set alone and holds one of

    open C         calls up to number C are answered "no" without looking at the register
    closed T stop  call T is answered with the request
    left           a rank has left the loop for good: there will be no request any more

A rank that comes to a call above the largest C it has seen looks first, and raises C if the
register is still open. A rank that was sent a signal closes the register: T becomes C + 1. Whatever
the order of these steps, every rank gives the request in call T:

- C only grows and a closed register does not change, so every C that a rank has ever seen is below
  T: no rank has answered call T before the register was closed.
- T is above every C, so each rank looks before it answers call T, and finds the register closed.

The only thing a call waits for is the answer of the store, whose server takes no part in the
training. With call T a rank goes on to the register of the next request, which starts open with
C = T. A signal that comes after a register was closed is served by the save in call T, unless it
asks to stop and the closed register does not: then it closes the next one.

The larger C is, the less often ranks look, and the later a request is served. See `Pace`.
"""

from __future__ import annotations

import dataclasses

__all__ = ["NO_REQUEST", "Pace", "SaveAgreement", "SaveRequest"]

_LOOK_EVERY_S = 0.25
# Calls may suddenly become slower: a request is served at most so many of them late.
_MOST_CALLS_AHEAD = 64


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """The answer of `save_requested()`; true if a save is due.

    Args:
        due: save now.
        stop: the script should end after saving.

    Example:
        ```python
        if request := paceline.save_requested():
            print("asked to save", "and to stop" if request.stop else "")
        ```
    """

    due: bool = False
    stop: bool = False

    def __bool__(self) -> bool:
        return self.due


NO_REQUEST = SaveRequest()


class SaveAgreement:
    """One rank's part in the agreement. Pure: its owner reads and writes the register.

    Each call is a `begin_call`, then for every `proposal` a compare-and-set with `known` as the
    expected value, whose outcome goes to `learn`, then an `answer`.
    """

    def __init__(self) -> None:
        self.number = 0  # of the register, and of requests answered so far
        self.calls = 0
        self.known = ""  # what the register held when this rank last looked; "" if it never did
        self.is_over = False
        self._ceiling = 0  # C
        self._target: int | None = None  # T, once the register is known to be closed
        self._stop = False

    @property
    def needs_look(self) -> bool:
        """Whether the next call cannot be answered without looking at the register."""
        return self.calls >= self._ceiling and self._target is None and not self.is_over

    @property
    def is_closed(self) -> bool:
        """Whether a request has been agreed on and is still to be answered."""
        return self._target is not None

    def begin_call(self) -> None:
        self.calls += 1

    def proposal(self, wanted: SaveRequest, calls_ahead: int) -> str | None:
        """What to write in place of `known` before this call can be answered; None if it can be
        answered now. `wanted` is what a signal asked this rank for; `calls_ahead` is how many calls
        from this one on should need no look.
        """
        if self.is_over or self.is_closed:
            return None
        if wanted.due:
            return f"closed {self._ceiling + 1} {int(wanted.stop)}"
        if self.calls > self._ceiling:
            return f"open {self.calls + calls_ahead - 1}"
        return None

    def proposal_to_leave(self) -> str | None:
        """As `proposal`, for a rank that will make no more calls."""
        return None if self.is_over or self.is_closed else "left"

    def learn(self, text: str) -> None:
        """What the register holds after a compare-and-set."""
        self.known = text
        match text.split():
            case ["open", ceiling]:
                self._ceiling = int(ceiling)
            case ["closed", target, stop]:
                self._target, self._stop = int(target), stop == "1"
            case _:
                self.is_over = True

    def answer(self) -> SaveRequest:
        """The answer to this call, once there is no proposal left."""
        if self._target is None or self.calls < self._target:
            return NO_REQUEST
        self.number += 1
        self.known, self._ceiling, self._target = "", self._target, None
        return SaveRequest(due=True, stop=self._stop)


class Pace:
    """How many calls ahead a rank opens the register: about a quarter of a second's worth, so that
    fast loops seldom look and slow ones serve a request in their next call.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # call and time of the last look

    def calls_ahead(self, call: int, now: float) -> int:
        """For a look in this call, at this time in seconds."""
        last, self._last = self._last, (call, now)
        if last is None or now <= last[1]:
            return 1
        calls_per_s = (call - last[0]) / (now - last[1])
        return max(1, min(_MOST_CALLS_AHEAD, int(calls_per_s * _LOOK_EVERY_S)))
