"""What a step has done that was interrupted: a rank was lost while several made it together.

Every block of a parameter, with its state, is as before the step or as after it (`csrc/journal.h`
sees to that), and here is written down which. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from paceline.core.journal import StepProgress

__all__ = ["InterruptedStep", "ParameterRecord", "UpdatedArray", "record_parts", "record_whole"]

_LINE_BYTES = 64
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class ParameterRecord:
    """What an interrupted step has done to one parameter and its state.

    Elements are numbered in the order in which they lie in memory. Those in neither range are as
    before the step.

    Args:
        elements: how many the parameter has.
        after: those that are as after the step.
        torn: those that may have any value.

    Example:
        ```python
        record = paceline.optim.ParameterRecord(elements=100, after=(range(0, 64),))
        assert not record.is_before and not record.is_after
        ```
    """

    elements: int
    after: tuple[range, ...] = ()
    torn: tuple[range, ...] = ()

    @property
    def is_before(self) -> bool:
        """Whether the step has not touched it."""
        return not (self.after or self.torn)

    @property
    def is_after(self) -> bool:
        """Whether the step is made as far as it is concerned."""
        return sum(map(len, self.after)) == self.elements


@dataclasses.dataclass(frozen=True)
class InterruptedStep:
    """What an interrupted step has done: `optimizer.interrupted_step` after `PeerLost`.

    `str()` says it in a sentence.

    Args:
        parameters: the records of those that the step was to change, by name.

    Example:
        ```python
        optimizer = paceline.optim.AdamW(model.parameters())
        try:
            optimizer.step()
        except paceline.PeerLost:
            for name, record in optimizer.interrupted_step.parameters.items():
                print(name, record.after)
        ```
    """

    parameters: Mapping[str, ParameterRecord]

    @property
    def is_before(self) -> bool:
        """Whether nothing was changed."""
        return all(record.is_before for record in self.parameters.values())

    @property
    def is_after(self) -> bool:
        """Whether all was changed: the step is complete."""
        return not self.is_before and all(r.is_after for r in self.parameters.values())

    @property
    def torn(self) -> tuple[str, ...]:
        """The parameters of which some elements may have any value."""
        return tuple(name for name, record in self.parameters.items() if record.torn)

    def explain(self, error: Exception) -> None:
        """Let the text of the error that interrupted the step end with what was made of it."""
        error.args = (f"{str(error).rstrip('.')}. {self}",)

    def __str__(self) -> str:
        if self.is_before:
            return "Parameters and optimizer state are as before the optimizer's step."
        if self.is_after:
            return "The optimizer's step is complete."
        records = self.parameters.values()
        after = sum(record.is_after for record in records)
        before = sum(record.is_before for record in records)
        parts = [name for name, r in self.parameters.items() if not (r.is_after or r.is_before)]
        text = (
            f"The optimizer's step was interrupted: {after} of {len(records)} parameters are as "
            f"after it, {before} as before it"
        )
        if parts := [name for name in parts if name not in self.torn]:
            text += f", and {_listed(parts)} partly"
        if self.torn:
            text += f"; {_listed(self.torn)} may have any value"
        return f"{text} (optimizer.interrupted_step says which). Go on from a checkpoint."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclasses.dataclass(frozen=True)
class UpdatedArray:
    """A parameter that an update was to change."""

    name: str
    elements: int
    element_bytes: int

    @property
    def lines(self) -> int:
        return -(-self.elements * self.element_bytes // _LINE_BYTES)


def record_parts(
    updates: Sequence[Sequence[UpdatedArray]],
    progress: Sequence[StepProgress | None],
    unsettled: Iterable[int] = (),
) -> InterruptedStep:
    """The record of updates that were made in parts, each by somebody who got so far; None: did not
    begin. The parts numbered in `unsettled` may still be made: what is missing of them is torn.
    """
    unsettled = set(unsettled)
    parameters = {}
    for number, arrays in enumerate(updates):
        total = sum(array.lines for array in arrays)
        after: list[range] = []
        torn: list[range] = []
        for part, reached in enumerate(progress):
            whole = range(total * part // len(progress), total * (part + 1) // len(progress))
            made = _made_lines(reached, number, whole)
            if part in unsettled and sum(map(len, made)) < len(whole):
                torn.append(whole)
            else:
                after += made
        ends = list(accumulate(array.lines for array in arrays))
        for array, end in zip(arrays, ends, strict=True):
            parameters[array.name] = ParameterRecord(
                array.elements,
                _elements_of(array, end, after),
                _elements_of(array, end, torn),
            )
    return InterruptedStep(parameters)


def record_whole(
    sizes: Mapping[str, int],
    stepper: Mapping[str, int],
    progress: Mapping[int, StepProgress | None],
) -> InterruptedStep:
    """The record of parameters that are stepped whole, in one update by somebody each, given their
    numbers of elements. Who has begun and not made it leaves all of its parameters torn.
    """
    parameters = {}
    for name, elements in sizes.items():
        reached, every = progress[stepper[name]], (range(elements),)
        if reached is None or not reached.begun:
            parameters[name] = ParameterRecord(elements)
        elif reached.made:
            parameters[name] = ParameterRecord(elements, after=every)
        else:
            parameters[name] = ParameterRecord(elements, torn=every)
    return InterruptedStep(parameters)


def _made_lines(reached: StepProgress | None, update: int, whole: range) -> list[range]:
    """The lines of a part of one update that have been made."""
    if reached is None or update >= reached.begun:
        return []
    return [whole] if update < reached.made else list(reached.lines)


def _elements_of(array: UpdatedArray, end: int, lines: Iterable[range]) -> tuple[range, ...]:
    """The elements of an array that are in these lines of a row of arrays; the array's own lines
    stop at `end`. Neighbours are joined.
    """
    first, per_line = end - array.lines, _LINE_BYTES // array.element_bytes
    joined: list[range] = []
    for each in sorted(lines, key=lambda each: each.start):
        low, high = max(each.start, first), min(each.stop, end)
        if low >= high:
            continue
        start = (low - first) * per_line
        stop = min((high - first) * per_line, array.elements)
        if joined and joined[-1].stop >= start:
            joined[-1] = range(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(range(start, stop))
    return tuple(joined)
