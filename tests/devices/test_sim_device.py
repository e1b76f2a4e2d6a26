"""The simulated device does what a device does: values, random numbers, memory, separate
devices.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import time

import pytest
import torch
from torch import nn

from tests.devices.machine import Machine
from tests.harness.build_cache import digest
from tests.sim import build

# name -> (module, input)
MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        lambda: torch.randn(6, 8),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: torch.randn(4, 3, 8, 8),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.GroupNorm(2, 4)),
        lambda: torch.randn(2, 3, 4, 4),
    ),
    "lstm": (lambda: nn.LSTM(8, 5, 2, bidirectional=True), lambda: torch.randn(3, 4, 8)),
    "lstm without bias": (lambda: nn.LSTM(8, 5, bias=False), lambda: torch.randn(3, 4, 8)),
    "gru": (lambda: nn.GRU(8, 5, 2), lambda: torch.randn(3, 4, 8)),
    "gru without bias": (lambda: nn.GRU(8, 5, bias=False), lambda: torch.randn(3, 4, 8)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: torch.randn(3, 4, 8),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3)),
        lambda: torch.randn(6, 8),
    ),
    "embedding": (lambda: nn.Embedding(10, 8), lambda: torch.randint(0, 10, (3, 4))),
    "sparse embedding": (
        lambda: nn.Embedding(10, 8, sparse=True),
        lambda: torch.randint(0, 10, (3, 4)),
    ),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


def trained(model: str, optimizer: str, device: str) -> list[torch.Tensor]:
    make, make_input = MODELS[model]
    torch.manual_seed(0)
    given = make_input()
    module, given = (
        make().double().to(device),
        (given.double() if given.is_floating_point() else given).to(device),
    )
    sparse = model == "sparse embedding"
    steps = (
        torch.optim.SparseAdam(list(module.parameters()))
        if sparse
        else OPTIMIZERS[optimizer](module.parameters())
    )
    torch.manual_seed(1)
    for _ in range(2):
        steps.zero_grad()
        output = module(given)
        output = output[0] if isinstance(output, tuple) else output
        output.square().mean().backward()
        steps.step()
    return [value.cpu() for value in module.state_dict().values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_values_of_the_cpu(sim_machine, optimizer):
    def body(machine: Machine) -> None:
        for model in MODELS:
            for found, expected in zip(
                trained(model, optimizer, "sim:2"), trained(model, optimizer, "cpu"), strict=True
            ):
                torch.testing.assert_close(
                    found, expected, rtol=1e-9, atol=1e-9, msg=lambda m, at=model: f"{at}: {m}"
                )

    sim_machine.on_devices(body)


def test_devices_are_kept_apart(sim_machine):
    def body(machine: Machine) -> None:
        zero, one, host = (torch.ones(2, device=device) for device in ("sim:0", "sim:1", "cpu"))
        with pytest.raises(RuntimeError, match="at least two devices, sim:0 and sim:1"):
            zero + one
        with pytest.raises(RuntimeError, match="at least two devices, sim:0 and cpu"):
            zero + host
        with pytest.raises(RuntimeError, match="at least two devices"):
            torch.cat([zero, one])
        with pytest.raises(RuntimeError, match="at least two devices"):
            nn.Linear(2, 2).to("sim:1")(zero.view(1, 2))
        with pytest.raises(RuntimeError, match="invalid device ordinal 7, there are 4"):
            torch.ones(1, device="sim:7")
        # what real devices do allow
        assert (zero + torch.tensor(1.0)).tolist() == [2, 2]
        assert one[torch.tensor([0])].tolist() == [1]
        assert zero.to("sim:1").device == one.device

    sim_machine.on_devices(body)


def test_every_device_has_its_own_random_numbers(sim_machine):
    def body(machine: Machine) -> None:
        torch.manual_seed(3)
        first, again = torch.randn(4, device="sim:0"), torch.randn(4, device="sim:0")
        assert first.tolist() != again.tolist()
        assert (
            torch.randn(4, device="sim:1").tolist() == first.tolist()
        )  # untouched by what sim:0 drew
        state = torch.sim.get_rng_state("sim:1")
        drawn = torch.rand(3, device="sim:1")
        torch.sim.set_rng_state(state, "sim:1")
        assert torch.rand(3, device="sim:1").tolist() == drawn.tolist()
        before = torch.get_rng_state()
        nn.functional.dropout(torch.ones(9, device="sim:1"), 0.5)
        assert torch.equal(torch.get_rng_state(), before)  # the CPU's generator is left alone
        own = torch.Generator("sim:1").manual_seed(5)
        assert torch.rand(2, device="sim:1", generator=own).tolist() == [
            *torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
        ]

    sim_machine.on_devices(body)


def test_memory_is_counted_per_device(sim_machine):
    def body(machine: Machine) -> None:
        accelerator = torch.accelerator
        kept = torch.empty(1000, device="sim:3")
        result = kept + 1
        assert [accelerator.memory_allocated(i) for i in range(4)] == [0, 0, 0, 8000]
        view = result[10:]
        del result
        assert accelerator.memory_allocated(3) == 8000
        del view
        assert accelerator.memory_allocated(3) == 4000
        assert accelerator.max_memory_allocated(3) == 8000
        accelerator.reset_peak_memory_stats(3)
        assert accelerator.max_memory_allocated(3) == 4000
        kept.resize_(2000)
        assert accelerator.memory_allocated(3) == 8000
        assert torch.empty(5, device="sim:3").isnan().all()  # fresh memory is poisoned

    sim_machine.on_devices(body)


def test_backward_runs_in_a_thread_per_device(sim_machine):
    def body(machine: Machine) -> None:
        from tests import sim

        layers = [nn.Linear(4, 4).to(f"sim:{i}") for i in range(4)]
        value = torch.ones(2, 4, device="sim:0")
        sim.forget_counts()
        for index, layer in enumerate(layers):
            value = layer(value.to(f"sim:{index}"))
        assert [sim.thread_count(i) for i in range(4)] == [1] * 4
        value.sum().backward()
        assert [sim.thread_count(i) for i in range(4)] == [2] * 4
        machine.assert_worked({0, 1, 2, 3})

    sim_machine.on_devices(body)


def test_autocast_chooses_precision_by_operator(sim_machine):
    def body(machine: Machine) -> None:
        layer, given = nn.Linear(8, 4).to("sim:1"), torch.randn(2, 8, device="sim:1")
        with torch.autocast("sim", dtype=torch.bfloat16):
            low = layer(given)
            high = low.softmax(1)
            both = torch.cat([low, high], 1)
            loss = nn.functional.mse_loss(low, torch.zeros_like(low))
        assert (low.dtype, high.dtype, both.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        loss.backward()
        assert loss.dtype == layer.weight.grad.dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert layer(given).dtype == torch.float32

    sim_machine.on_devices(body)


def test_gradient_scaling_sees_overflow(sim_machine):
    def body(machine: Machine) -> None:
        scaler, layer = torch.amp.GradScaler("sim"), nn.Linear(4, 2).to("sim:1")
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for factor, stepped in ((1.0, True), (float("inf"), False)):
            before = layer.weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(layer(torch.ones(2, 4, device="sim:1")).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert (not torch.equal(before, layer.weight)) is stepped

    sim_machine.on_devices(body)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_random_numbers(sim_machine, reentrant):
    def body(machine: Machine) -> None:
        module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("sim:1")
        given = torch.ones(2, 8, device="sim:1", requires_grad=True)
        torch.manual_seed(3)
        torch.utils.checkpoint.checkpoint(module, given, use_reentrant=reentrant).sum().backward()
        found = module[0].weight.grad.cpu()
        module.zero_grad()
        torch.manual_seed(3)
        module(given).sum().backward()
        assert torch.equal(found, module[0].weight.grad.cpu())

    sim_machine.on_devices(body)


def test_sparse_tensors(sim_machine):
    def body(machine: Machine) -> None:
        with torch.sparse.check_sparse_tensor_invariants():
            entries = torch.sparse_coo_tensor([[0, 1, 1], [0, 1, 1]], [1.0, 2.0, 3.0], (2, 2)).to(
                "sim:1"
            )
            assert entries.device == torch.device("sim:1")
            assert entries.coalesce()._nnz() == 2
            assert (entries + entries).mul_(2).to_dense().tolist() == [[4, 0], [0, 20]]
            dense = torch.zeros(2, 2, device="sim:1").add_(entries, alpha=-1)
            assert dense.tolist() == [[-1, 0], [0, -5]]
            assert entries.cpu().to_dense().tolist() == [[1, 0], [0, 5]]
            copy = entries.clone()
            copy.zero_()
            assert copy.to_dense().tolist() == [[0, 0], [0, 0]]
            assert entries.to_dense().tolist() == [[1, 0], [0, 5]]

    sim_machine.on_devices(body)


def test_an_event_is_pending_until_someone_waits_or_asks_twice(sim_machine):
    def body(machine: Machine) -> None:
        torch.ones(3, device="sim:0")
        event = torch.accelerator.current_stream(0).record_event()
        assert [event.query(), event.query()] == [False, True]
        torch.ones(3, device="sim:0")
        event = torch.accelerator.current_stream(0).record_event()
        event.synchronize()
        assert event.query()
        stream = torch.Stream("sim:1")
        with stream:
            torch.ones(3, device="sim:1")
        assert [stream.query(), stream.query()] == [False, True]

    sim_machine.on_devices(body)


def test_a_process_keeps_the_number_of_devices_it_started_with(sim_machine):
    def body(machine: Machine) -> None:
        from tests import sim

        sim.load(machine.count)
        with pytest.raises(RuntimeError, match="already has 4 simulated devices, not 2"):
            sim.load(2)

    sim_machine.on_devices(body)


# ---- building


def _slow_build(compiler: list[str], target: pathlib.Path) -> None:
    with open(target.with_name("builds"), "a") as log:
        log.write("one\n")
    time.sleep(0.5)
    target.write_bytes(b"a library")


def _ask(cache: str) -> str:
    os.environ["XDG_CACHE_HOME"] = cache
    build._build = _slow_build
    return str(build.library())


def test_processes_that_ask_at_once_build_once(tmp_path):
    with multiprocessing.get_context("forkserver").Pool(3) as pool:
        answers = pool.map(_ask, [str(tmp_path)] * 3, chunksize=1)
        pool.close()
        pool.join()
    assert len(set(answers)) == 1
    assert pathlib.Path(answers[0]).with_name("builds").read_text() == "one\n"


def test_without_a_compiler_the_reason_is_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        build.SimUnavailable, match=r"no C.. compiler: 'no-such-compiler' is not on PATH"
    ):
        build.library()


def test_a_compiler_that_fails_is_an_error_and_leaves_nothing_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="did not compile: false"):
        build.library()
    assert not list(tmp_path.rglob("libsim.so*"))


def test_a_change_of_the_sources_is_a_new_build(monkeypatch, tmp_path):
    compiler = build._compiler()
    before = digest(build._inputs(compiler))
    for path in build._SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    assert digest(build._inputs(compiler)) == before
    (tmp_path / "checker.cpp").write_text("// another\n")
    assert digest(build._inputs(compiler)) != before
