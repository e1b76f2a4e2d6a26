"""One rank of Open MPI for `paceline bench collectives`, started by mpirun. It sleeps on its pipe
between turns.
"""

from __future__ import annotations

import json
import sys
import time

__all__ = ["main"]


def main(directory: str) -> None:
    """Answer requests - "bytes repetitions" - with the seconds of each repetition, until "end"."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    while True:
        with open(f"{directory}/to-{rank}") as pipe:
            line = pipe.readline().split()
        if line == ["end"]:
            return
        size, repetitions = map(int, line)
        data = numpy.full(size // 4, rank + 1, dtype=numpy.float32)
        times = []
        for _ in range(repetitions):
            world.Barrier()
            start = time.perf_counter()
            world.Allreduce(MPI.IN_PLACE, data)
            times.append(time.perf_counter() - start)
            data.fill(rank + 1)
        with open(f"{directory}/from-{rank}", "w") as pipe:
            pipe.write(json.dumps(times) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
