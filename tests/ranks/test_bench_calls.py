"""The calls that `paceline bench collectives` makes: right results, and no warning of torch's."""

from __future__ import annotations

import warnings

from tests.harness import init_group, run_ranks


def make_every_call(rank, world):
    import torch.distributed as dist

    from paceline.bench import bench_collectives

    warnings.simplefilter("error")
    init_group("paceline")
    gloo = dist.new_group(backend="gloo")
    for call in bench_collectives._CALLS:
        if call != "all_reduce":  # those are measured elsewhere, beside MPI
            for turn in bench_collectives._others(call, 64, gloo).values():
                assert len(turn(2)) == 2
    dist.destroy_process_group()


def test_no_call_is_one_that_torch_gives_up():
    run_ranks(2, make_every_call)
