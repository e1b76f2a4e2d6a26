"""Every collective of the `paceline` backend against Gloo, on random shapes, types, operations and
groups.

Hypothesis draws lists of cases; each list runs in one set of processes that hold a Gloo and a
Paceline group of the same ranks. Sums of integers must agree to the bit. Floating-point sums agree
within rounding: Gloo adds in another order. Bit equality across our own ranks and runs is checked
separately.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import paceline
from paceline.backend.tensor_layout import all_tensors as flattened
from tests.harness import init_group, run_ranks
from tests.harness.single_tensor_calls import all_gather_single, reduce_scatter_single

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
BIT_OPS = ["BAND", "BOR", "BXOR"]
KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send_recv",
]


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    dtype: str
    op: str
    shape: tuple[int, ...]
    root: int
    seed: int
    asynchronous: bool
    layout: str  # contiguous, transposed, strided


@st.composite
def cases(draw, world, kinds=tuple(KINDS)):
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, "complex64", "complex128"]))
    ops = OPS if dtype in FLOATS else [*OPS, *BIT_OPS] if dtype in INTEGERS else ["SUM"]
    # Two of them make 250,000 elements at the most: every rank computes what all the others bring.
    sizes = st.one_of(st.integers(0, 9), st.sampled_from([64, 257, 500]))
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))
    if draw(st.integers(0, 9)) == 0:
        shape = (draw(st.sampled_from([70_001, 300_007])),)  # more than one slot
    return Case(
        kind=draw(st.sampled_from(kinds)),
        dtype=dtype,
        op=draw(st.sampled_from(ops)),
        shape=shape,
        root=draw(st.integers(0, world - 1)),
        seed=draw(st.integers(0, 2**31)),
        asynchronous=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", "contiguous", "transposed", "strided"])),
    )


def make(case, rank, shape, salt=0):
    """This rank's data: small numbers, so that products stay finite and low precision stays exact
    enough.
    """
    import torch

    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed + 1000 * rank + salt)
    low = 0 if case.dtype == "uint8" else -3
    numbers = torch.randint(low, 4, shape, generator=generator)
    values = (
        torch.complex(numbers.double(), (numbers * 2).double()).to(dtype)
        if dtype.is_complex
        else numbers.to(dtype)
    )
    if case.layout == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if case.layout == "strided":
        wide = torch.zeros((*shape, 2), dtype=dtype)
        wide[..., 0] = values
        return wide[..., 0]
    return values


def perform(case, group, rank, world):
    """Run one case on a group; returns the tensors this rank ends up with."""
    import torch
    import torch.distributed as dist

    op = getattr(dist.ReduceOp, case.op)
    rows = case.shape[0]
    flat = (rows * world, *case.shape[1:])
    wait = (lambda work: work.wait()) if case.asynchronous else (lambda work: None)
    mode = {"group": group, "async_op": case.asynchronous}
    root = dist.get_global_rank(group, case.root)
    data = make(case, rank, case.shape)
    many = [make(case, rank, case.shape, salt) for salt in range(world)]
    outputs = [torch.zeros_like(data) for _ in range(world)]
    if case.kind == "all_reduce":
        wait(dist.all_reduce(data, op, **mode))
        return [data]
    if case.kind == "reduce":
        wait(dist.reduce(data, root, op, **mode))
        return [data] if rank == case.root else []
    if case.kind == "broadcast":
        wait(dist.broadcast(data, root, **mode))
        return [data]
    if case.kind == "all_gather":
        wait(dist.all_gather(outputs, data, **mode))
        return outputs
    if case.kind == "all_gather_into_tensor":
        whole = torch.zeros(flat, dtype=data.dtype)
        wait(all_gather_single(whole, data.contiguous(), **mode))
        return [whole]
    if case.kind == "gather":
        wait(dist.gather(data, outputs if rank == case.root else None, dst=root, **mode))
        return outputs if rank == case.root else []
    if case.kind == "scatter":
        wait(dist.scatter(data, many if rank == case.root else None, src=root, **mode))
        return [data]
    if case.kind == "reduce_scatter":
        wait(dist.reduce_scatter(data, many, op, **mode))
        return [data]
    if case.kind == "reduce_scatter_tensor":
        wait(reduce_scatter_single(data, torch.cat(many).contiguous(), op, **mode))
        return [data]
    if case.kind == "all_to_all":
        wait(dist.all_to_all(outputs, many, **mode))
        return outputs
    if case.kind == "all_to_all_single":
        whole = torch.zeros(flat, dtype=data.dtype)
        wait(dist.all_to_all_single(whole, torch.cat(many).contiguous(), **mode))
        return [whole]
    assert case.kind == "send_recv"
    return _ring(case, group, data, world)


def _ring(case, group, data, world):
    import torch
    import torch.distributed as dist

    if world == 1:
        return [data]
    rank = dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    found = torch.zeros_like(data)
    works = [
        dist.irecv(found, before, group, tag=case.root),
        dist.isend(data, after, group, tag=case.root),
    ]
    for work in works:
        work.wait()
    return [found]


def reference(case, rank, world):
    """What a case must give, from the other ranks' data computed here: for what Gloo does not
    offer.
    """
    import torch

    def reduced(tensors):
        wide = [
            t.to(torch.float32) if t.dtype in (torch.float16, torch.bfloat16) else t
            for t in tensors
        ]
        total = wide[0].clone()
        for other in wide[1:]:
            total = {
                "SUM": lambda a, b: a + b,
                "PRODUCT": lambda a, b: a * b,
                "MIN": torch.minimum,
                "MAX": torch.maximum,
                "BAND": torch.bitwise_and,
                "BOR": torch.bitwise_or,
                "BXOR": torch.bitwise_xor,
            }[case.op](total, other)
        return total.to(tensors[0].dtype)

    def brought(by, block=0):
        """What a rank brings: its only tensor, or one of its list."""
        return make(case, by, case.shape, block)

    def from_all(block=0):
        return [brought(by, block) for by in range(world)]

    return {
        "all_reduce": lambda: [reduced(from_all())],
        "reduce": lambda: [reduced(from_all())] if rank == case.root else [],
        "broadcast": lambda: [brought(case.root)],
        "all_gather": from_all,
        "all_gather_into_tensor": lambda: [torch.cat(from_all())],
        "gather": lambda: from_all() if rank == case.root else [],
        "scatter": lambda: [brought(case.root, rank)],
        "reduce_scatter": lambda: [reduced(from_all(rank))],
        "reduce_scatter_tensor": lambda: [reduced(from_all(rank))],
        "all_to_all": lambda: from_all(rank),
        "all_to_all_single": lambda: [torch.cat(from_all(rank))],
        "send_recv": lambda: [brought((rank - 1) % world)],
    }[case.kind]()


def check_cases(rank, world, batch):
    """All data are small whole numbers: every sum is exact, so results must be equal to the bit."""
    import torch

    init_group("paceline")
    import torch.distributed as dist

    group = dist.group.WORLD
    for case in batch:
        found = perform(case, group, rank, world)
        wanted = reference(case, rank, world)
        assert len(found) == len(wanted), case
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b), f"{case}\nfound {a.flatten()[:8]}\nwanted {b.flatten()[:8]}"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_collective_gives_what_it_must(world):
    @hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate], deadline=None)
    @hypothesis.given(st.lists(cases(world), min_size=60, max_size=60))
    def run(batch):
        run_ranks(world, check_cases, batch)

    run()


def test_random_numbers_agree_with_gloo():
    """Against Gloo itself, random floating-point data, within the rounding of another order of
    summation.
    """

    def compare(rank, world):
        import torch
        import torch.distributed as dist

        init_group("gloo")
        ours = dist.new_group(backend="paceline")
        torch.manual_seed(rank)
        for dtype, tolerance in (
            (torch.float32, 1e-5),
            (torch.float64, 1e-13),
            (torch.complex64, 1e-5),
        ):
            for n in (1, 1000, 200_003):
                a = torch.randn(n, dtype=dtype)
                b = a.clone()
                dist.all_reduce(a)
                dist.all_reduce(b, group=ours)
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        dist.destroy_process_group()

    run_ranks(3, compare)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_the_same_bits_on_every_rank_and_in_every_run(world):
    def digest(rank, world):
        import hashlib

        import torch
        import torch.distributed as dist

        init_group("paceline")
        torch.manual_seed(rank)
        text = hashlib.sha256()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for n in (1, 77, 10_000, 300_001):
                data = torch.randn(n).to(dtype)
                dist.all_reduce(data)
                text.update(data.view(torch.uint8).numpy().tobytes())
        dist.destroy_process_group()
        return text.hexdigest()

    assert len({*run_ranks(world, digest), *run_ranks(world, digest)}) == 1


@pytest.mark.one_host("the sum of each host is rounded")
def test_half_precision_is_added_in_float32_and_rounded_once():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline")
        parts = [
            torch.randn(5000, generator=torch.Generator().manual_seed(r)) * 100
            for r in range(world)
        ]
        for dtype in (torch.float16, torch.bfloat16):
            data = parts[rank].to(dtype)
            exact = parts[0].to(dtype).float()
            for part in parts[1:]:
                exact = exact + part.to(dtype).float()
            dist.all_reduce(data)
            assert torch.equal(data, exact.to(dtype))
        dist.destroy_process_group()

    run_ranks(5, check)


def test_averages_factors_and_booleans():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline")
        data = torch.full((10,), float(rank))
        dist.all_reduce(data, dist.ReduceOp.AVG)
        assert torch.equal(data, torch.full((10,), sum(range(world)) / world))
        for factor in (2.0, torch.tensor([2.0])):
            data = torch.ones(3)
            dist.all_reduce(data, dist._make_nccl_premul_sum(factor))
            assert torch.equal(data, torch.full((3,), 2.0 * world))
        data = torch.ones(3)
        dist.all_reduce(
            data, dist._make_nccl_premul_sum(float(rank))
        )  # each rank's own factor for its own data
        assert torch.equal(data, torch.full((3,), float(sum(range(world)))))
        block = torch.zeros(1)
        reduce_scatter_single(block, torch.ones(world), dist._make_nccl_premul_sum(float(rank)))
        assert block.item() == sum(range(world))
        flags = torch.tensor([True, rank == 0, False])
        dist.all_reduce(flags)
        assert flags.tolist() == [True, True, False]
        dist.all_reduce(flags, dist.ReduceOp.PRODUCT)
        assert flags.tolist() == [True, True, False]
        counts = torch.tensor([rank, 5], dtype=torch.int64)
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        assert counts.tolist() == [sum(range(world)) // world, 5]
        dist.destroy_process_group()

    run_ranks(3, check)


def test_uneven_shares():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline")
        outputs = [torch.zeros(r * 1000 + r) for r in range(world)]
        dist.all_gather(outputs, torch.full((rank * 1001,), float(rank)))
        assert all(torch.equal(o, torch.full((r * 1001,), float(r))) for r, o in enumerate(outputs))
        sent = torch.cat([torch.full((rank + to, 3), float(10 * rank + to)) for to in range(world)])
        found = torch.zeros((sum(rank + source for source in range(world)), 3))
        dist.all_to_all_single(
            found,
            sent,
            [rank + source for source in range(world)],
            [rank + to for to in range(world)],
        )
        wanted = torch.cat(
            [torch.full((rank + source, 3), float(10 * source + rank)) for source in range(world)]
        )
        assert torch.equal(found, wanted)
        blocks = [torch.full((r + 1,), float(rank)) for r in range(world)]
        mine = torch.zeros(rank + 1)
        dist.reduce_scatter(mine, blocks)
        assert torch.equal(mine, torch.full((rank + 1,), float(sum(range(world)))))
        dist.destroy_process_group()

    run_ranks(4, check)


def test_messages_with_tags_from_any_source_in_any_order():
    def check(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline")
        if rank == 0:
            # Received in another order than sent, large ones among them: nothing may block.
            found = {}
            for tag in (3, 1, 2):
                data = torch.zeros(100_000 * tag)
                assert dist.recv(data, 1, tag=tag) == 1
                found[tag] = data[0].item()
            assert found == {1: 1.0, 2: 2.0, 3: 3.0}
            senders = []
            for _ in range(world - 1):
                token = torch.zeros(1)
                senders.append(dist.recv(token))
                assert token.item() == senders[-1]
            assert sorted(senders) == list(range(1, world))
        else:
            works = []
            if rank == 1:
                works = [
                    dist.isend(torch.full((100_000 * tag,), float(tag)), 0, tag=tag)
                    for tag in (1, 2, 3)
                ]
            for work in works:
                work.wait()
            dist.send(torch.tensor([float(rank)]), 0)
        dist.barrier()  # what follows has the same tag, and rank 0 has been listening to anyone
        ops = [
            dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % world),
            dist.P2POp(dist.irecv, torch.zeros(1), (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert ops[1].tensor.item() == (rank - 1) % world
        dist.barrier()
        dist.destroy_process_group()

    run_ranks(3, check)


def test_messages_do_not_hinder_collectives():
    """A receive posted early, its message sent late, collectives in between: everything goes on."""

    def check(rank, world):
        import torch
        import torch.distributed as dist

        init_group("paceline")
        other = 1 - rank
        found = torch.zeros(400_000)
        receive = dist.irecv(found, other)
        total = torch.ones(10)
        dist.all_reduce(total)
        send = dist.isend(torch.full((400_000,), float(rank)), other)
        dist.all_reduce(total)
        send.wait()
        receive.wait()
        assert found[-1].item() == other
        assert total[0].item() == 4
        dist.destroy_process_group()

    run_ranks(2, check)


def lists_of_tensors(rank, world):
    """Several tensors per process, the form of torch's own bindings, against Gloo."""
    import torch
    import torch.distributed as dist

    init_group("paceline")
    gloo = dist.new_group(backend="gloo")._get_backend(torch.device("cpu"))
    ours = dist.group.WORLD

    def numbers(index, shape=(3, 2), dtype=torch.float32):
        generator = torch.Generator().manual_seed(10 * rank + index)
        return torch.randint(1, 9, shape, generator=generator).to(dtype)

    def like_gloo(call, tensors):
        """Both groups make the call on their own copies; returns ours."""
        mine, theirs = copy.deepcopy(tensors), copy.deepcopy(tensors)
        call(gloo, theirs).wait()
        call(ours, mine).wait()
        for own, expected in zip(flattened(mine), flattened(theirs), strict=True):
            assert torch.equal(own.to_dense(), expected.to_dense())
        return mine

    for name in [*OPS, *BIT_OPS]:
        op, dtype = getattr(dist.ReduceOp, name), torch.int32
        for shape in [(3, 2), (0,), (), (40_000,)]:
            tensors = [numbers(index, shape, dtype) for index in range(3)]
            like_gloo(lambda group, own, op=op: group.allreduce(own, op), tensors)
    turned = [numbers(index).t() for index in range(2)]
    sums = like_gloo(lambda group, own: group.allreduce(own), turned)
    ours.allreduce(turned, dist.ReduceOp.AVG).wait()  # Gloo divides the first tensor only
    assert all(torch.equal(tensor, sums[0] / world) for tensor in turned)
    sparse = [
        torch.sparse_coo_tensor(
            [[rank, 2 + index]], [1.0, 2.0 + index], (5,), check_invariants=True
        )
        for index in range(2)
    ]
    like_gloo(lambda group, own: group.allreduce(own), sparse)

    options = dist.BroadcastOptions()
    for root in range(world):
        for tensor in range(3):
            options.rootRank, options.rootTensor = root, tensor
            given = [numbers(index) for index in range(3)]
            like_gloo(lambda group, own: group.broadcast(own, options), given)

    for count in (2, 3):
        inputs = [numbers(index).t() for index in range(count)]
        outputs = [[torch.zeros(2, 3) for _ in range(count * world)] for _ in range(count)]
        like_gloo(lambda group, own, inputs=inputs: group.allgather(own, inputs), outputs)
        gathered = ours.allgather(outputs, inputs).get_future().wait()
        assert [len(tensors) for tensors in gathered] == [count * world] * count  # as Gloo's

    one, wrong_type, wrong_shape = torch.ones(1), torch.ones(1).double(), torch.ones(2)
    options.rootRank, options.rootTensor = 0, 2
    reduce_options = dist.ReduceOptions()
    reduce_options.rootTensor = 1
    mistakes = {
        "non-empty": lambda: ours.allreduce([]),
        "one dtype": lambda: ours.allreduce([one, wrong_type]),
        "one shape.*index 1": lambda: ours.allreduce([one, wrong_shape]),
        "one layout": lambda: ours.allreduce([one, one.to_sparse()]),
        "all_reduce_coalesced: .*non-empty": lambda: ours.allreduce_coalesced([]),
        "all_to_all: .*non-empty": lambda: ours.alltoall([], []),
        "invalid root tensor: 2": lambda: ours.broadcast([one, one], options),
        "broadcast: invalid root tensor: 2": lambda: ours.broadcast([one], options),
        "reduce: invalid root tensor: 1": lambda: ours.reduce([one], reduce_options),
        "as many output lists": lambda: ours.allgather([[one] * 4], [one, one]),
        "4 tensors in every output list": lambda: ours.allgather([[one] * 3] * 2, [one, one]),
        "one tensor per process": lambda: ours.reduce([one, one], dist.ReduceOptions()),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(paceline.ConfigError, match=message):
            mistake()
    dist.destroy_process_group()


def test_lists_of_several_tensors_per_process():
    run_ranks(2, lists_of_tensors)


def results_that_cannot_be_written(rank, world):
    import torch
    import torch.distributed as dist

    init_group("paceline")
    for asynchronous in (False, True):
        with pytest.raises(paceline.ConfigError, match=r"share memory.*clone"):
            dist.all_reduce(torch.ones(1).expand(4), async_op=asynchronous)
    with torch.inference_mode():
        turned = torch.full((2, 3), float(rank)).t()
        call = dist.all_reduce(turned, async_op=True)
    call.get_future().wait()  # written by a thread that is not in inference mode
    assert turned.eq(1.0).all()
    work = dist.all_reduce(torch.ones(3, 2).t(), async_op=True)
    work._finish = lambda: torch.ones(2).copy_(torch.ones(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        work.get_future().wait()
    total = torch.ones(2)
    dist.all_reduce(total, async_op=True).get_future().wait()  # its thread lives
    assert total.eq(2.0).all()
    dist.destroy_process_group()


def test_a_result_that_cannot_be_written_is_an_error_and_no_hang():
    run_ranks(2, results_that_cannot_be_written)


def exchanges_of_wrong_shape(rank, world):
    import torch
    import torch.distributed as dist

    init_group("paceline")
    for output, given, sizes in [
        (torch.zeros(2), torch.zeros(4), ()),
        (torch.zeros(2, 2), torch.zeros(2, 3), ()),
        (torch.zeros(2, 2), torch.zeros(2, 3), ([1, 1], [1, 1])),
        (torch.zeros(3), torch.zeros(3), ()),
        (torch.zeros(3), torch.zeros(3), ([3], [3])),
        (torch.zeros(3), torch.zeros(3), ([4, -1], [1, 2])),
        (torch.zeros(3), torch.zeros(3), ([1, 2], [1, 1])),
    ]:
        with pytest.raises(ValueError, match=f"rank {rank}: all_to_all_single: "):
            dist.all_to_all_single(output, given, *sizes)
    with pytest.raises(ValueError, match="all_to_all"):
        dist.all_to_all([torch.zeros(1)] * 3, [torch.zeros(1)] * 2)
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.arange(2.0) + 2 * rank)  # and the group still works
    assert output.tolist() == [rank, 2 + rank]
    dist.destroy_process_group()


def test_exchanges_of_wrong_shape_are_refused_before_anything_is_sent():
    run_ranks(2, exchanges_of_wrong_shape)


# --- memory ---------------------------------------------------------------------------------------
def drop_what_was_sent(rank, world):
    import torch.distributed as dist

    init_group("paceline")
    large = torch.ones(1_000_000)
    storage = weakref.ref(large.untyped_storage())
    dist.broadcast(large, 0)
    dist.all_reduce(large, async_op=True).wait()
    del large
    gc.collect()
    assert storage() is None


def test_a_finished_call_keeps_no_tensors():
    run_ranks(2, drop_what_was_sent)
