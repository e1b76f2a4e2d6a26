"""`PacelineStrategy` and `PacelineFabricStrategy` do what Lightning's own strategies do."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.programs import PACELINE_RUN, TORCHRUN, run

pytestmark = [pytest.mark.timeout(900)]

# BatchNorm, accumulation, clipping, validation, a checkpoint that is resumed; then by hand.
TRAINER = """
import sys
import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self, by_hand):
        super().__init__()
        torch.manual_seed(3)
        layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        self.net = torch.nn.Sequential(*layers)
        self.spare = torch.nn.Linear(8, 1)  # unused
        self.automatic_optimization = not by_hand

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def strategy():
    if which == "stock":
        return "ddp_find_unused_parameters_true"
    from paceline.lightning import PacelineStrategy
    return PacelineStrategy()


def fit(model, epochs, path=None, **options):
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )
    loaders = DataLoader(dataset, batch_size=8), DataLoader(dataset, batch_size=8)
    trainer.fit(model, *loaders, ckpt_path=path)
    return trainer


which, out = sys.argv[1:]
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(60, 8), torch.randn(60, 1))
found = {}
for by_hand in (False, True):
    model = Regression(by_hand)
    options = {} if by_hand else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer = fit(model, 1, **options)
    trainer.save_checkpoint(f"{out}-{by_hand}.ckpt")
    trainer = fit(Regression(by_hand), 2, f"{out}-{by_hand}.ckpt", **options)
    found[by_hand] = trainer.lightning_module.state_dict(), trainer.callback_metrics
if trainer.is_global_zero:
    torch.save((dist.get_backend(), found), out)
"""

FABRIC = """
import sys
import lightning as L
import torch
import torch.distributed as dist
import paceline
from paceline.lightning import PacelineFabricStrategy

strategy = "ddp" if sys.argv[1] == "stock" else PacelineFabricStrategy(average="ranks")
fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
torch.manual_seed(fabric.global_rank)
for step in range(4):
    with fabric.no_backward_sync(model, enabled=step % 2 == 0):
        fabric.backward(model(torch.randn(4, 8)).square().mean())
    if step % 2:
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
fabric.barrier()
fabric.load("fabric.ckpt", {"model": model, "optimizer": optimizer})
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum")
assert total == 1
if fabric.global_rank == 0:
    wrapped = model._forward_module
    assert isinstance(wrapped, paceline.DistributedDataParallel) == (sys.argv[1] == "paceline")
    torch.save((dist.get_backend(), model.state_dict()), sys.argv[2])
"""


def both(program, tmp_path):
    """What the program saves with torch's class and with ours."""
    (tmp_path / "train.py").write_text(program)
    run(TORCHRUN, tmp_path, "train.py", "stock", "stock.pt")
    run(PACELINE_RUN, tmp_path, "train.py", "paceline", "ours.pt")
    stock, ours = (torch.load(tmp_path / name) for name in ("stock.pt", "ours.pt"))
    assert (stock[0], ours[0]) == ("gloo", "paceline")
    return stock[1], ours[1]


def test_the_trainer(tmp_path):
    stock, ours = both(TRAINER, tmp_path)
    torch.testing.assert_close(ours, stock, atol=1e-6, rtol=0)


def test_fabric(tmp_path):
    stock, ours = both(FABRIC, tmp_path)
    torch.testing.assert_close(ours, stock, atol=1e-6, rtol=0)
