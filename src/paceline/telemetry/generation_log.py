"""The changes of an elastic job's ranks, beside their traces: a line for each generation.

    DIR/generations.jsonl   {"job": ..., "number": 3, "ranks": [0, 2], "reason": "rank 1 ...",
                             "settled_ns": ..., "still_ns": ..., "wall_offset_ns": ...}

The first rank of a generation writes its line, when all of it train together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Sequence

__all__ = ["GenerationRecord", "append_generation", "read_generations"]

_NAME = "generations.jsonl"


@dataclasses.dataclass(frozen=True)
class GenerationRecord:
    """A generation of an elastic job.

    Args:
        job: the id of the job.
        number: of the generation.
        ranks: its members, by slot.
        reason: who joined or left, and why.
        settled_ns: since when its ranks train together, by the monotonic clock of the writer.
        still_ns: how long that rank has stood still for the change.
        wall_offset_ns: makes wall-clock time of its clock.
    """

    job: str
    number: int
    ranks: Sequence[int]
    reason: str
    settled_ns: int
    still_ns: int
    wall_offset_ns: int


def append_generation(
    directory: str | os.PathLike[str],
    *,
    job: str,
    number: int,
    ranks: Sequence[int],
    reason: str,
    still_ns: int,
) -> None:
    """Write down that a generation trains from now on."""
    now = time.monotonic_ns()
    record = GenerationRecord(job, number, ranks, reason, now, still_ns, time.time_ns() - now)
    line = json.dumps(dataclasses.asdict(record)) + "\n"
    # In one piece: a rank that dies leaves none, not half a line.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(pathlib.Path(directory, _NAME), flags, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_generations(directory: str | os.PathLike[str], job: str) -> list[GenerationRecord]:
    """Those of a job, in their order."""
    path = pathlib.Path(directory, _NAME)
    if not path.exists():
        return []
    records = [GenerationRecord(**json.loads(line)) for line in path.read_text().splitlines()]
    return sorted((each for each in records if each.job == job), key=lambda each: each.number)
