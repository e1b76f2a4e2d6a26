"""A step that fails on one rank counts on none, and every rank learns who failed and why."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.backend import create
from tests.harness import init_group, run_ranks

WITHIN_S = 20.0  # far from the group's limit, however busy the machine is


@pytest.fixture(params=["gloo", "paceline", "hosts"])
def ranks(request):
    """`run_ranks` on sockets, on shared memory, and each rank on a host of its own."""
    return functools.partial(run_ranks, env={"BACKEND": request.param}, timeout=90)


def join_group(**options):
    way = os.environ["BACKEND"]
    if way == "hosts":
        create.host_identity = lambda: f"host{os.environ['RANK']}"
    init_group("paceline" if way == "hosts" else way, **options)


class Fails(torch.nn.Module):
    """Raises where it is told to, on one rank."""

    def __init__(self, norm=False, width=4):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, width), torch.nn.Linear(width, 4)
        self.norm = torch.nn.BatchNorm1d(4) if norm else torch.nn.Identity()
        self.where = None

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("the needle")
        x = self.first(x)
        if self.where == "backward":
            x.register_hook(self.boom)
        return self.norm(self.second(x))

    def boom(self, gradient):
        raise ValueError("the needle")


def loader(rank, where, culprit, steps, at):
    for step in range(steps):
        if where == "loader" and step == at and rank == culprit:
            raise ValueError("the needle")
        yield torch.full((2, 4), float(step + rank))


def train_until_failure(rank, world, where, culprit, options, at):
    join_group()
    torch.manual_seed(0)
    net = Fails(**options)
    model = paceline.DistributedDataParallel(net, bucket_cap_mb=0.00002)
    data = loader(rank, where, culprit, 5, at)
    for step in range(5):
        before = [p.detach().clone() for p in net.parameters()]
        started = time.monotonic()
        try:
            with model.all_or_none():
                net.where = where if step == at and rank == culprit else None
                loss = model(next(data)).square().mean()
                if where == "loss" and step == at and rank == culprit:
                    raise ValueError("the needle")
                loss.backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p.add_(p.grad, alpha=-0.1)
                        p.grad = None
        except (ValueError, paceline.StepError) as error:
            assert step == at
            assert time.monotonic() - started < WITHIN_S
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            # the group is whole: the next step works
            net.where = None
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            return error
    return None


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "loader"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_every_rank_raises_with_the_culprits_traceback(ranks, where, culprit):
    options = {"norm": culprit == 1, "width": 8 if culprit else 4}
    check_all_know(ranks(2, train_until_failure, where, culprit, options, 2), culprit)


@pytest.mark.parametrize("where", ["loss", "loader", "backward"])
@pytest.mark.parametrize("at", [0, 1])
def test_in_the_first_steps_too(ranks, where, at):
    """After the first step there is a new plan; a rank that fails before its next forward has not
    followed it yet.
    """
    check_all_know(ranks(2, train_until_failure, where, 1, {}, at), 1)


def check_all_know(errors, culprit):
    assert isinstance(errors[culprit], ValueError)
    other = errors[1 - culprit]
    assert isinstance(other, paceline.StepError)
    assert other.rank == culprit
    assert f"rank {culprit} failed in this step" in str(other)
    assert "ValueError: the needle" in other.traceback
    assert "Traceback (most recent call last)" in other.traceback


def fail_after_backward(rank, world, policy):
    """The averages are out, peers have applied them: this rank cannot undo that, and reports it."""
    join_group()
    model = paceline.DistributedDataParallel(Fails())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        try:
            with model.all_or_none(policy) as attempt:
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                if step == 1 and rank == 1:
                    raise ValueError("the needle")
                optimizer.step()
        except (ValueError, paceline.StepError) as error:
            return step, error
        if not attempt.succeeded:
            return step, attempt.error
    return None


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_error_after_backward_is_never_skipped(ranks, policy):
    (late, peer), (step, culprit) = ranks(2, fail_after_backward, policy)
    assert (late, step) == (2, 1)  # the peer hears of it at its next exchange
    assert isinstance(peer, paceline.StepError)
    assert "ValueError: the needle" in peer.traceback
    assert isinstance(culprit, ValueError)
    assert "have applied it" in culprit.__notes__[0]


def without_the_block(rank, world, where):
    """No all_or_none(): a failed forward publishes its error at once, a failed backward at the next
    forward, here while the error is still being handled.
    """
    join_group()
    net = Fails()
    model = paceline.DistributedDataParallel(net)
    for step in range(3):
        net.where = where if step == 1 and rank == 1 else None
        try:
            model(torch.ones(2, 4)).sum().backward()
        except (ValueError, paceline.StepError) as error:
            net.where = None
            model(torch.ones(2, 4)).sum().backward()
            return error
    return None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_peers_learn_of_it_without_a_block_too(ranks, where):
    peer, culprit = ranks(2, without_the_block, where)
    assert isinstance(culprit, ValueError)
    assert isinstance(peer, paceline.StepError)
    assert peer.rank == 1
    assert "without_the_block" in peer.traceback
    assert "in boom" in peer.traceback or where == "forward"
    assert "ValueError: the needle" in peer.traceback


def catch_and_go_on(rank, world):
    """The error of a backward is over and forgotten when the next forward publishes that it was."""
    join_group()
    net = Fails()
    model = paceline.DistributedDataParallel(net)
    caught = None
    for step in range(4):
        net.where = "backward" if step == 1 and rank == 1 else None
        try:
            model(torch.ones(2, 4)).sum().backward()
        except (ValueError, paceline.StepError) as error:
            caught = step, error
    return caught


def test_a_backward_whose_error_was_caught_is_published_by_the_next_forward(ranks):
    (peer_step, peer), (step, culprit) = ranks(2, catch_and_go_on)
    assert (peer_step, step) == (1, 1)
    assert isinstance(culprit, ValueError)
    assert isinstance(peer, paceline.StepError)
    assert peer.rank == 1
    assert "backward raised an error" in peer.traceback
    assert "all_or_none()" in peer.traceback


def swallow_inside_the_block(rank, world):
    """The block ends without an error, but its step was not averaged."""
    join_group()
    net = Fails()
    model = paceline.DistributedDataParallel(net)
    outcomes = []
    for step in range(3):
        net.where = "backward" if step == 1 and rank == 1 else None
        with model.all_or_none("skip") as attempt:
            output = model(torch.ones(2, 4)).sum()
            if rank == 1:
                with contextlib.suppress(ValueError):
                    output.backward()
            else:
                output.backward()
        outcomes.append(attempt.succeeded)
    return outcomes


def test_an_error_that_was_caught_inside_the_block_fails_the_step(ranks):
    assert ranks(2, swallow_inside_the_block) == [[True, False, True]] * 2


def end_by_backward(rank, world):
    """Nobody catches the error of a backward: the process ends, and its peers learn why."""
    join_group()
    net = Fails()
    model = paceline.DistributedDataParallel(net)
    started = time.monotonic()
    try:
        for step in range(3):
            net.where = "backward" if step == 1 and rank == 1 else None
            started = time.monotonic()
            model(torch.ones(2, 4)).sum().backward()
    except paceline.PeerLost as error:
        return error.rank, error.traceback, time.monotonic() - started
    return None


def test_a_backward_that_ends_its_process_is_published_to_the_peers(ranks):
    peer, _ = ranks(2, end_by_backward, check=False, uncaught=True)
    rank, text, seconds = peer.value
    assert rank == 1
    assert "ValueError: the needle" in text
    assert "in boom" in text
    assert seconds < WITHIN_S


def unfreeze_in_the_block(rank, world):
    """The block begins with one reducer and ends with another, which has more parameters."""
    join_group()
    net = Fails()
    net.first.weight.requires_grad_(False)
    model = paceline.DistributedDataParallel(net)
    model(torch.ones(2, 4)).sum().backward()
    net.first.weight.requires_grad_(True)
    with model.all_or_none("skip") as attempt:
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            raise ValueError("the needle")
        loss.backward()
    failed = attempt
    with model.all_or_none("skip") as attempt:
        model(torch.ones(2, 4)).sum().backward()
    return failed.succeeded, type(failed.error).__name__, attempt.succeeded


def test_parameters_may_be_unfrozen_inside_the_block(ranks):
    assert ranks(2, unfreeze_in_the_block) == [
        (False, "StepError", True),
        (False, "ValueError", True),
    ]


def replicated(rank, world):
    join_group()
    net = paceline.replicate(Fails())
    for step in range(3):
        net.where = "forward" if step == 1 and rank == 1 else None
        try:
            net(torch.ones(2, 4)).sum().backward()
        except (ValueError, paceline.StepError) as error:
            net.where = None
            net(torch.ones(2, 4)).sum().backward()
            return error
    return None


def test_a_replicated_model_reports_its_forward_too(ranks):
    peer, culprit = ranks(2, replicated)
    assert isinstance(culprit, ValueError)
    assert isinstance(peer, paceline.StepError)
    assert "ValueError: the needle" in peer.traceback


def train_skipping(rank, world, bad):
    """One batch fails on rank 1; with `skip` the run equals the one that never had it."""
    join_group()
    results = []
    for skip_it in (False, True):
        torch.manual_seed(0)
        net = Fails(norm=True)
        model = paceline.DistributedDataParallel(net, on_error="skip", check_finite=bad == "nan")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            if step == 2 and skip_it:
                continue
            with model.all_or_none() as attempt:
                optimizer.zero_grad()
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                if step == 2 and rank == 1:
                    net.where = bad
                    if bad == "nan":
                        x = x * float("nan")
                model(x).square().mean().backward()
                optimizer.step()
            net.where = None
            assert attempt.succeeded == (step != 2)
        if not skip_it:
            assert all(p.grad is not None for p in model.parameters())
        results.append([t.clone() for t in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("bad", ["forward", "backward", "nan"])
def test_skip_leaves_everything_as_if_the_batch_had_not_been(ranks, bad):
    ranks(2, train_skipping, bad)


def non_finite(rank, world):
    join_group()
    net = Fails()
    model = paceline.DistributedDataParallel(net, check_finite=True)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        paceline.StepError, match=r"non-finite gradient of (first|second)"
    ) as caught:
        model(torch.full((2, 4), float("inf") if rank == 0 else 1.0)).sum().backward()
    assert caught.value.rank == 0
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


def test_a_non_finite_gradient_is_named_on_every_rank(ranks):
    ranks(2, non_finite)


def out_of_step(rank, world):
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = paceline.DistributedDataParallel(net)
    output = model(torch.ones(2, 4))
    loss = output.sum()
    call = loss.backward if rank else lambda: model(torch.ones(2, 4))
    with pytest.raises(paceline.MismatchError, match="rank 0 is at forward, rank 1 is at backward"):
        call()


def test_ranks_at_different_points_are_told_so(ranks):
    ranks(2, out_of_step)


def interrupted(rank, world):
    """Ctrl-C is not a failure of the step: it goes through at once."""
    join_group()
    model = paceline.DistributedDataParallel(Fails(), on_error="skip")
    with pytest.raises(KeyboardInterrupt), model.all_or_none():
        raise KeyboardInterrupt
    model(torch.ones(2, 4)).sum().backward()


def test_ctrl_c_passes(ranks):
    ranks(2, interrupted)


class UsesSecondOnly(torch.nn.Module):
    """The parameters whose bucket is sent last never get a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(x)


def fail_late_beside_a_skipped_bucket(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(
        UsesSecondOnly(),
        skip_all_reduce_unused_params=True,
        find_unused_parameters=True,
        bucket_cap_mb=0.00002,
    )
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        close = model.reducer._close

        def close_late(step):
            time.sleep(0.5)
            step.fail("the needle")
            close(step)

        model.reducer._close = close_late
    with pytest.raises(paceline.StepError, match="the needle"):
        model(torch.ones(2, 4)).sum().backward()


def test_a_failure_is_seen_though_the_last_bucket_is_skipped(ranks):
    """Peers must wait for the closing signal even where no bucket carries gradients with it."""
    ranks(2, fail_late_beside_a_skipped_bucket)


def skip_until_a_peer_is_killed(rank, world, moment):
    """Rank 1 ends in step 2; `moment` says what rank 0 does then."""
    join_group()
    net = Fails(norm=moment == "forward")
    model = paceline.DistributedDataParallel(net, on_error="skip")
    outcomes = []
    try:
        for step in range(6):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with model.all_or_none() as attempt:
                net.where = moment if moment == "backward" and step == 2 else None
                loss = model(torch.ones(2, 4)).sum()
                if moment == "own error" and step == 2:
                    raise ValueError("the needle")
                if moment == "caught" and step == 2:
                    with contextlib.suppress(RuntimeError):
                        loss.backward()
                elif moment == "wrapped":
                    try:
                        loss.backward()
                    except RuntimeError as error:
                        raise ValueError("the needle") from error
                else:
                    loss.backward()
            outcomes.append(attempt.succeeded)
    except Exception as error:
        outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.one_host("the next call finds the group aborted")
@pytest.mark.parametrize(
    ("moment", "outcomes"),
    [
        ("averaging", [True, True, "PeerLost"]),
        ("forward", [True, True, "PeerLost"]),
        ("own error", [True, True, "PeerLost"]),
        ("backward", [True, True, "PeerLost"]),
        ("wrapped", [True, True, "ValueError"]),
        ("caught", [True, True, False, "PeerLost"]),
    ],
)
def test_the_loss_of_a_peer_is_never_skipped(ranks, moment, outcomes):
    survivor, _ = ranks(2, skip_until_a_peer_is_killed, moment, check=False)
    if moment == "caught" and ranks.keywords["env"]["BACKEND"] == "hosts":
        # The group is known to be lost, which is all that its connections tell a second time.
        outcomes = [*outcomes[:-1], "GroupAborted"]
    assert survivor.value == outcomes


def skip_at_different_points(rank, world, wrapped):
    join_group()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = paceline.DistributedDataParallel(net)
    loss = model(torch.ones(2, 4)).sum()

    def differ():
        try:
            loss.backward() if rank else model(torch.ones(2, 4))
        except paceline.MismatchError as error:
            if wrapped:
                raise ValueError("the needle") from error
            raise

    expected = ValueError if wrapped else paceline.MismatchError
    with pytest.raises(expected), model.all_or_none("skip"):
        differ()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_mismatch_is_never_skipped(ranks, wrapped):
    ranks(2, skip_at_different_points, wrapped)


def skip_while_a_peer_stands_still(rank, world, done):
    join_group(timeout=datetime.timedelta(seconds=1.5))
    model = paceline.DistributedDataParallel(Fails(), on_error="skip")
    if rank == 1:
        while not os.path.exists(done):
            time.sleep(0.05)
        return None
    try:
        with model.all_or_none():
            model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        return error
    finally:
        with open(done, "w"):
            pass
    return None


def test_a_timeout_is_never_skipped(ranks, tmp_path):
    error, _ = ranks(2, skip_while_a_peer_stands_still, str(tmp_path / "done"))
    assert isinstance(error, paceline.CollectiveTimeout)


def raise_all(errors):
    raise ExceptionGroup("several", errors)


def raise_while_handling(error):
    try:
        raise error
    except BaseException:
        raise ValueError("while another error was handled") from None


def raise_from(cause):
    raise ValueError("wrapped") from cause


def raise_it(error):
    raise error


BEYOND_THE_STEP = [
    paceline.PeerLost("x"),
    paceline.GroupAborted("x"),
    paceline.CollectiveTimeout("x"),
    paceline.MismatchError("x"),
    paceline.NativeError("x"),
    paceline.ConfigError("x"),
    dist.DistBackendError("x"),
    dist.DistNetworkError("x"),
    dist.DistStoreError("x"),
    KeyboardInterrupt(),
    SystemExit(1),
]
OF_THE_STEP = [
    ValueError("x"),
    MemoryError("x"),
    TimeoutError("the user's own server"),
    ConnectionResetError("the user's own server"),
    torch.OutOfMemoryError("x"),
    paceline.StepError("x"),
]


def try_to_skip(rank, world):
    """Every rank raises; which errors end the block and which are skipped."""
    join_group()
    model = paceline.DistributedDataParallel(Fails(), on_error="skip")

    def is_skipped(action, *args):
        try:
            with model.all_or_none() as attempt:
                action(*args)
        except BaseException:
            return False
        assert not attempt.succeeded
        assert attempt.error is not None
        return True

    for error in BEYOND_THE_STEP:
        assert not is_skipped(raise_it, error), error
        assert not is_skipped(raise_from, error), error
        assert not is_skipped(raise_while_handling, error), error
        if isinstance(error, Exception):
            assert not is_skipped(raise_all, [ValueError("x"), ExceptionGroup("y", [error])])
    for error in OF_THE_STEP:
        assert is_skipped(raise_it, error), error
        assert is_skipped(raise_from, error), error
        assert is_skipped(raise_all, [ValueError("x"), error]), error
    # An error that was being handled before the block has nothing to do with the step.
    try:
        raise paceline.MismatchError("before")
    except paceline.MismatchError:
        assert is_skipped(raise_it, ValueError("x"))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("world", [1, 2])
def test_only_errors_of_the_step_are_skipped(ranks, world):
    ranks(world, try_to_skip)


def ask_for_an_unknown_policy(rank, world):
    join_group()
    model = paceline.DistributedDataParallel(Fails())
    with pytest.raises(paceline.ConfigError, match=r"on_error must be .* got 'ignore'"):
        model.all_or_none("ignore")


def test_an_unknown_policy_is_refused():
    run_ranks(1, ask_for_an_unknown_policy, env={"BACKEND": "gloo"})
