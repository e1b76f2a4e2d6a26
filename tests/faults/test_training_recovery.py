"""`paceline.Training` in a job whose ranks are killed, leave and come: the bytes of an undisturbed
run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest

from paceline.cli.main import main
from tests.harness.launched import Launched, launched, run_command, wait_for_files, write_script

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
    from paceline.optim import shared_step
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
    around(generations, "_packed", "giving the state", rank=None)
    around(Generations, "recover", "recovering", rank=None)
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
    # In an elastic job replicas stay apart, however small parameters that are shared may be.
    shared_step._WORTH_SHARING_BYTES = 0
    optimizer = paceline.optim.AdamW(model.parameters(), lr=0.01)
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
    evaluation = paceline.Evaluation(Data(), batch_size=16)

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
    assert optimizer._shared is None
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
    "giving the state",
    "forming",
    "recovering",
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


# Everything that a training may have at once; what happens to it is a list of events, each once in
# the life of the job: [from which step on, what, to which rank of how many; 0: however many]. Ranks
# wait for those that have to come, so that there are steps left for all events.
RICH = """
    import collections, datetime, hashlib, json, os, pathlib, signal, sys, time
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    import paceline
    from paceline.launch.elastic_job import current_elastic_job, request_line

    folder, epochs, events = pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    name, workers = sys.argv[4], int(sys.argv[5])
    job = current_elastic_job()

    class Words(torch.utils.data.Dataset):
        def __init__(self):
            generator = torch.Generator().manual_seed(1)
            self.words = torch.randint(0, 40, (70, 6), generator=generator)
            self.labels = torch.randint(0, 4, (70,), generator=generator)

        def __len__(self):
            return 70

        def __getitem__(self, index):
            return self.words[index], self.labels[index], torch.randn(8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.EmbeddingBag(40, 8, sparse=True)
            self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))

        def forward(self, words, noise):
            return self.head(self.embedding(words) + 0.1 * noise)

    paceline.init_process_group(quiet=True)
    torch.manual_seed(0)
    model = Model()
    sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01)
    dense = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    training = paceline.Training(
        model,
        [sparse, dense],
        paceline.DataLoader(Words(), batch_size=12, shuffle=True, seed=5, num_workers=workers),
        shards=4,
        state={"scaler": scaler},
        checkpoint=folder / name,
        save_every=datetime.timedelta(seconds=0.2),
        audit_every=3,
    )
    evaluation = paceline.Evaluation(Words(), batch_size=16)

    def members():
        return len(job.wait_beyond(job.latest() - 1, 1.0).members)

    def is_next(number):
        return number == 0 or (folder / f"event-{number - 1}").exists()

    def happen():
        if not job:
            time.sleep(0.02)  # a request to stop is served within 0.25 s: there are steps left then
        for number, (step, what, rank, ranks) in enumerate(events):
            done = folder / f"event-{number}"
            if training.step < step or not is_next(number) or done.exists():
                continue
            # Those that have come join after this batch, and those that leave do so.
            deadline = time.monotonic() + 60.0
            while job and members() == paceline.world_size() < ranks:
                assert time.monotonic() < deadline, f"{ranks} ranks should be there for {what}"
                time.sleep(0.005)
            if ranks and paceline.world_size() != ranks:
                time.sleep(0.02)
                return
            if paceline.rank() == rank:
                done.write_text("yes")
                act(what)
            return

    def act(what):
        if isinstance(what, int):
            os.write(job._requests_fd, request_line("scale", ranks=what))
        elif what == "all":
            for slot in [*{0, 1, 2, 3} - {job.slot}, job.slot]:
                if slot < job.max_ranks and (pid := job._page.pid_in(slot)):
                    os.kill(pid, signal.SIGKILL)
        else:
            os.kill(os.getpid(), getattr(signal, what))

    def evaluate():
        model.eval()
        for words, labels, noise in evaluation:
            with torch.no_grad():
                loss = cross_entropy(model(words, 0 * noise), labels, reduction="none")
            evaluation.add(loss=loss)
        model.train()
        return evaluation.result().mean("loss")

    for epoch in training.epochs(epochs):
        for batch in training.batches():
            for words, labels, noise in batch.shards():
                loss = cross_entropy(model(words, noise), labels)
                scaler.scale(loss).backward()
                batch.log(loss=loss)
            scaler.step(sparse)
            scaler.step(dense)
            scaler.update()
            model.zero_grad()
            happen()
        if not training.stopping:
            loss = evaluate()
    if not training.stopping:
        lines = training.digest() + str(loss) + str(training.metrics)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        (folder / f"digest-{name}-{os.getpid()}").write_text(digest)
"""


EPOCHS = 6


def arguments(
    folder: pathlib.Path, name: str, events: list[object], epochs: int, workers: int = 0
) -> list[str]:
    return [str(folder), str(epochs), json.dumps(events), name, str(workers)]


@functools.cache
def digest_alone(epochs: int) -> str:
    """What a single process comes to, undisturbed."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        script = write_script(folder, RICH)
        command = [sys.executable, script, *arguments(folder, "alone", [], epochs)]
        subprocess.run(command, check=True, timeout=180)
        (digest,) = written(folder, "digest").values()
    return digest


def check_the_same_bits(
    folder: pathlib.Path, events: list[object], epochs: int, job: Launched
) -> None:
    happened = len(list(folder.glob("event-*")))
    assert happened == len(events), (happened, job.stderr)
    found = set(written(folder, "digest").values())
    assert found == {digest_alone(epochs)}, (found, job.stderr)
    assert job.left_after(5.0) == []


def train_elastically(
    folder: pathlib.Path,
    events: list[object],
    *,
    epochs: int,
    elastic: str,
    start: int,
    workers: int,
) -> None:
    script = write_script(folder, RICH)
    command = run_command(
        script,
        *arguments(folder, "elastic", events, epochs, workers),
        ranks=start,
        options=("--elastic", elastic),
    )
    command.remove("--preload=")
    with launched(command) as job:
        assert job.wait(timeout=150) == 0, job.stderr
        check_the_same_bits(folder, events, epochs, job)


def test_workers_sparse_gradients_audits_scaler_and_timed_saves_survive(tmp_path):
    events = [
        [2, "SIGKILL", 0, 3],
        [4, "SIGTERM", 1, 3],
        [6, "SIGSEGV", 2, 3],
        [8, "SIGTERM", 0, 3],
        [10, "SIGKILL", 2, 3],
        [10, "SIGKILL", 0, 0],
        [14, "all", 1, 3],
    ]
    train_elastically(tmp_path, events, epochs=EPOCHS, elastic="1:3", start=3, workers=1)


@pytest.mark.slow
def test_twenty_changes_of_the_number_of_ranks(tmp_path):
    sizes = [2, *[4, 1, 3, 2, 1, 4, 3, 1, 2, 4] * 2]
    events = [[2, after, 0, before] for before, after in itertools.pairwise(sizes)]
    train_elastically(tmp_path, events, epochs=20, elastic="1:4", start=2, workers=0)


def test_a_killed_launcher_is_started_again_and_goes_on(tmp_path):
    script = write_script(tmp_path, RICH)
    options = ("--elastic", "1:2")
    # When a rank has been killed, the launcher is, too.
    events = [[9, "SIGKILL", 0, 2]]
    command = run_command(script, *arguments(tmp_path, "elastic", events, EPOCHS), options=options)
    command.remove("--preload=")
    with launched(command) as job:
        wait_for_files(tmp_path / "event-0", timeout=90)
        job.process.kill()
        job.process.wait()
        assert job.left_after(15.0) == []
    with launched(command) as job:
        assert job.wait(timeout=90) == 0, job.stderr
        check_the_same_bits(tmp_path, events, EPOCHS, job)


def test_torchrun_restarts_from_the_checkpoint(tmp_path):
    script = write_script(tmp_path, RICH)
    events = [[9, "SIGKILL", 1, 2], [15, "SIGKILL", 0, 2]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1"]
    command = [*torchrun, *options, str(script), *arguments(tmp_path, "torchrun", events, EPOCHS)]
    with launched(command, env={"PYTHONWARNINGS": "ignore"}) as job:
        assert job.wait(timeout=150) == 0, job.stderr
        check_the_same_bits(tmp_path, events, EPOCHS, job)


def slurm_variables(rank: int, ranks: int, folder: pathlib.Path) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "TMPDIR": str(folder),
    }


@contextlib.contextmanager
def slurm_step(command: list[str], ranks: int, folder: pathlib.Path):
    """The tasks of a job step, as `srun` starts them."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(launched(command, env=slurm_variables(rank, ranks, folder)))
            for rank in range(ranks)
        ]


def test_a_requeued_slurm_job_goes_on_from_its_checkpoint(tmp_path):
    """Preempted with SIGTERM on two ranks, killed on three, then run to the end on one."""
    script = write_script(tmp_path, RICH)
    events = [[6, "SIGTERM", 0, 2], [14, "SIGKILL", 1, 3]]
    command = [sys.executable, str(script), *arguments(tmp_path, "slurm", events, EPOCHS)]
    with slurm_step(command, 2, tmp_path) as tasks:
        for task in tasks:
            assert task.wait(timeout=90) == 0, task.stderr
    assert not written(tmp_path, "digest"), "SIGTERM to one task ends the loops of all"
    with slurm_step(command, 3, tmp_path) as tasks:
        assert tasks[1].wait(timeout=90) == -signal.SIGKILL
        for task in (tasks[0], tasks[2]):
            assert task.wait(timeout=90) == 1
            assert "PeerLost" in task.stderr
    with slurm_step(command, 1, tmp_path) as (task,):
        assert task.wait(timeout=90) == 0, task.stderr
        check_the_same_bits(tmp_path, events, EPOCHS, task)


@pytest.mark.slow
def test_the_benchmark_measures_cost_and_recovery(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    options = ["--models=mlp-64", "--rounds=1", "--steps=30", "--kills=1", f"--json={figures}"]
    assert main(["bench", "elastic", *options]) == 0
    assert "mlp-64" in capsys.readouterr().out
    found = json.loads(figures.read_text())["figures"]["mlp-64"]
    assert 0 < found["next step"] <= found["whole again"]
    assert found["ratio"] == found["elastic"] / found["plain"]
