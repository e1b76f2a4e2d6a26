"""`paceline.accelerate.Accelerator` does what Accelerate's own class does."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.programs import PACELINE_RUN, TORCHRUN, run

pytestmark = [pytest.mark.timeout(900)]

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import accelerate
import paceline.accelerate
from accelerate.utils import DistributedDataParallelKwargs

which, out = sys.argv[1:]
kind = accelerate.Accelerator if which == "stock" else paceline.accelerate.Accelerator
accelerator = kind(
    cpu=which == "stock",
    gradient_accumulation_steps=2,
    mixed_precision="bf16",
    kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)],
)
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(50, 8), torch.randn(50, 1))
loader = DataLoader(dataset, batch_size=4)
layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
assert isinstance(model, paceline.DistributedDataParallel) == (which == "paceline")
assert accelerator.prepare_model(model) is model


def train():
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


train()
accelerator.save_state(f"{out}-state")
train()
accelerator.load_state(f"{out}-state")  # the second epoch is taken back
train()
with accelerator.no_sync(model):
    first, second = (model(torch.ones(2, 8)).sum() for _ in range(2))
accelerator.backward(first)
with accelerator.trigger_sync_in_backward(model):
    accelerator.backward(second)
gradient = model.module[0].weight.grad.clone()
gathered = [accelerator.gather_for_metrics(y) for _, y in loader]
assert sum(map(len, gathered)) == 50
bare = accelerator.unwrap_model(model)
assert isinstance(bare, torch.nn.Sequential)
if accelerator.is_main_process:
    torch.save((dist.get_backend(), bare.state_dict(), gradient), out)
accelerator.end_training()
"""


def test_training_with_everything_around_it(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    run(TORCHRUN, tmp_path, "train.py", "stock", "stock.pt")
    run(PACELINE_RUN, tmp_path, "train.py", "paceline", "ours.pt")
    stock, ours = (torch.load(tmp_path / name) for name in ("stock.pt", "ours.pt"))
    assert (stock[0], ours[0]) == ("gloo", "paceline")
    torch.testing.assert_close(ours[1:], stock[1:], atol=1e-6, rtol=0)
