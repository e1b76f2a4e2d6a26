"""`paceline.Training` in an elastic job whose ranks are killed: the bytes of an undisturbed run."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from tests.harness.launched import launched, run_command, write_script

# A rank is killed at named places, each once in the life of the job. A place is a function that is
# called there: before it, after it, or in the middle of what it does.
SCRIPT = """
    import collections, hashlib, json, os, pathlib, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    import paceline
    from paceline.core.communicator import Communicator
    from paceline.launch.elastic_job import current_elastic_job
    from paceline.training import checkpoint_directory, generations, training as training_module
    from paceline.training.elastic_exchange import ElasticExchange
    from paceline.training.generations import Generations

    ranks, folder = 3, pathlib.Path(sys.argv[1])
    epochs, passes = int(sys.argv[2]), int(sys.argv[3])
    # Name of the place -> from which step on.
    places = json.loads(sys.argv[4])
    job = current_elastic_job()
    is_new = job is not None and job.member >= ranks
    state = collections.defaultdict(int)

    def pending():
        return [name for name in places if not (folder / name.replace(" ", "-")).exists()]

    def die_at(name, rank=0):
        # `rank` is the rank that dies, while there are as many as there should be; None: any.
        if job is None or name not in places:
            return
        if state["step"] < places[name] or not (rank is None or is_whole_and(rank)):
            return
        try:
            os.close(os.open(folder / name.replace(" ", "-"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_replacements():
        # There must be steps left for them.
        deadline = time.monotonic() + 30.0
        while job is not None and pending() and time.monotonic() < deadline:
            if len(job.wait_beyond(job.latest() - 1, 1.0).members) >= ranks:
                break
            time.sleep(0.01)

    def is_whole_and(rank):
        is_whole = dist.is_initialized() and dist.get_world_size() == ranks
        return is_whole and dist.get_rank() == rank

    def around(owner, method, before=None, after=None, rank=0):
        original = getattr(owner, method)

        def wrapped(*args, **kwargs):
            if before:
                die_at(before, rank)
            result = original(*args, **kwargs)
            if after:
                die_at(after, rank)
            return result

        setattr(owner, method, wrapped)

    around(ElasticExchange, "gather", "gather", "after gather", 1)
    around(ElasticExchange, "average_nodes", "average", "after average", 2)
    around(checkpoint_directory, "write_archive", "save")
    around(Generations, "_hand_over", "hand over", rank=None)
    around(Communicator, "join", "forming", rank=None)
    around(Generations, "gather_parts", "evaluation's end", "after evaluation", 2)
    if is_new:
        around(Communicator, "join", "new forming", "new formed", None)
        around(Generations, "_hand_over", "new handed over to", rank=None)

    class Data(torch.utils.data.Dataset):
        def __init__(self):
            generator = torch.Generator().manual_seed(1)
            self.inputs = torch.randn(70, 6, generator=generator)
            self.labels = torch.randint(0, 4, (70,), generator=generator)

        def __len__(self):
            return 70

        def __getitem__(self, index):
            die_at("loader", 1)
            return self.inputs[index], self.labels[index]

    paceline.init_process_group(quiet=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    model[0].register_forward_pre_hook(lambda *_: die_at("forward"))
    model[0].weight.register_hook(lambda gradient: die_at("backward", 2))
    optimizer.register_step_post_hook(lambda *_: die_at("optimizer step", 1))
    training = paceline.Training(
        model,
        optimizer,
        paceline.DataLoader(Data(), batch_size=24, shuffle=True, seed=5),
        shards=6,
        seed=3,
        state={"scheduler": scheduler},
        checkpoint=folder / f"checkpoints-{job is not None}",
        save_every=5,
    )
    # One by one: rows of batches of another size may have other bits.
    evaluation = paceline.Evaluation(Data(), batch_size=1)

    def evaluate():
        model.eval()
        for inputs, labels in evaluation:
            die_at("evaluation", 1)
            with torch.no_grad():
                evaluation.add(loss=cross_entropy(model(inputs), labels, reduction="none"))
        model.train()
        return evaluation.result().mean("loss")

    for epoch in training.epochs(epochs):
        for batch in training.batches():
            for _ in range(passes):
                for inputs, labels in batch.shards():
                    loss = cross_entropy(model(inputs), labels)
                    loss.backward()
                    batch.log(loss=loss)
                die_at("two, one of them", 0)
                die_at("two, the other", 2)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["step"] = training.step
            wait_for_replacements()
            die_at("between batches")
        loss = evaluate()
    digest = hashlib.sha256(training.digest().encode()).hexdigest()
    (folder / f"digest-{job.member if job else 'alone'}").write_text(digest)
    (folder / f"loss-{job.member if job else 'alone'}").write_text(str(loss))
"""

PLACES = [
    "loader",
    "forward",
    "backward",
    "gather",
    "after gather",
    "average",
    "after average",
    "optimizer step",
    "between batches",
    "hand over",
    "forming",
    "save",
    "evaluation",
    "evaluation's end",
    "after evaluation",
]
PLACES_OF_NEWCOMERS = ["new forming", "new formed", "new handed over to"]


def written(folder: pathlib.Path, what: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob(f"{what}-*")}


def train(folder: pathlib.Path, places: dict[str, int], *, epochs: int, passes: int) -> None:
    script = write_script(folder, SCRIPT)
    arguments = [str(folder), str(epochs), str(passes), json.dumps(places)]
    subprocess.run([sys.executable, script, *arguments], check=True, timeout=90)
    options = ("--elastic", "1:3", "--max-restarts", "100")
    command = run_command(script, *arguments, ranks=3, options=options)
    command.remove("--preload=")  # replacements are quicker if paceline is there already
    with launched(command) as job:
        code = job.wait(timeout=180)
        left = job.left_after(5.0)
    killed = {path.name for path in folder.iterdir()}
    assert code == 0, job.stderr
    assert {name.replace(" ", "-") for name in places} <= killed, job.stderr
    found = written(folder, "digest")
    # Newcomers that nobody could hand the state over to any more have none.
    assert len(found) >= 2, (found, job.stderr)
    assert len(set(found.values())) == 1, (found, job.stderr)
    losses = written(folder, "loss")
    assert len(set(losses.values())) == 1, (losses, job.stderr)
    assert left == []


def test_ranks_killed_at_any_place_cost_neither_a_sample_nor_a_bit(tmp_path: pathlib.Path) -> None:
    places = {name: 2 + 2 * number for number, name in enumerate(PLACES)}
    newcomers = dict.fromkeys(PLACES_OF_NEWCOMERS, 0)
    train(tmp_path, {**places, **newcomers}, epochs=20, passes=2)


def test_two_ranks_killed_in_one_step(tmp_path: pathlib.Path) -> None:
    train(tmp_path, {"two, one of them": 3, "two, the other": 3}, epochs=8, passes=1)
