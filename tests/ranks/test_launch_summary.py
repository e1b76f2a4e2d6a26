"""What `paceline run` sums up at the end, `paceline top` while it runs, and its line prefixes: with
real jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.harness.launched import launched, run_command, run_to_end, wait_for_files, write_script

TORCH = "--preload=torch,torch.distributed"
TRAIN = """
    import os, pathlib, signal, sys, time
    import torch, paceline

    paceline.init_process_group()
    rank = paceline.rank()
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(40, 4))
    step = 0
    for x, in paceline.DataLoader(data, batch_size=4):
        model(x).square().mean().backward()
        optimizer.step()
        step += 1
        __STEP__
    paceline.destroy_process_group()
    print("done", flush=True)
"""


def _script(folder, step="pass"):
    return write_script(folder, TRAIN.replace("__STEP__", step))


def _card(job):
    """The lines of the card, by their labels."""
    lines = job.stderr.splitlines()
    at = next(index for index, line in enumerate(lines) if " after " in line)
    rows = dict(line.strip().split(maxsplit=1) for line in lines[at + 1 :])
    return lines[at], rows


def test_a_training_ends_with_a_card(tmp_path):
    file, trace = tmp_path / "run.json", tmp_path / "trace"
    options = (TORCH, f"--summary-json={file}", f"--trace={trace}", "--log-prefix={rank}> ")
    job = run_to_end(run_command(_script(tmp_path), options=options))
    assert sorted(job.stdout.splitlines()) == ["0> done", "1> done"]
    head, rows = _card(job)
    assert head == "paceline: train.py finished after 10 steps on 2 ranks"
    assert list(rows) in (
        ["speed", "time", "waiting", "timeline"],
        ["speed", "time", "waiting", "optimizer", "timeline"],
    )
    assert re.fullmatch(r"\d+\.\d s, \d+\.\d\d ms a step, [\d,]+ samples per second", rows["speed"])
    # Who is late, and how much, is up to the machine as well.
    assert re.match(r"\d+% of the ranks' time; (?:rank [01] is slower|no rank is)", rows["waiting"])
    assert rows["timeline"] == str(trace / "timeline.html")
    assert job.stderr.isascii()
    found = json.loads(file.read_text())
    assert [found[key] for key in ("steps", "samples", "outcome", "world")] == [
        10,
        40,
        "finished",
        2,
    ]
    assert found["optimizer"]["facts"]["name"] == "SGD"
    # The same run, from what its ranks recorded.
    command = [sys.executable, "-m", "paceline", "compare", "--json", str(file), str(trace)]
    both = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert both["second"]["steps"] == 10


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_that_is_killed_leaves_its_figures_behind(tmp_path, method):
    step = "step == 7 and rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    options = (TORCH, f"--start-method={method}")
    job = run_to_end(run_command(_script(tmp_path, step), options=options), 128 + signal.SIGKILL)
    lines = job.stderr.splitlines()
    failed = next(index for index, line in enumerate(lines) if "failed first" in line)
    head, rows = _card(job)
    assert lines.index(head) == failed + 1
    assert head == "paceline: train.py failed after 7 steps on 2 ranks"
    assert list(rows) == ["speed"]  # the error is what matters


def test_ctrl_c_says_how_far_the_training_came(tmp_path):
    step = "step == 5 and (pathlib.Path(sys.argv[1], str(rank)).write_text('5'), time.sleep(60))"
    command = run_command(_script(tmp_path, step), str(tmp_path), options=(TORCH,))
    with launched(command) as job:
        wait_for_files(tmp_path / "0", tmp_path / "1")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
    head, _ = _card(job)
    assert head == "paceline: train.py was stopped after 5 steps on 2 ranks"


def test_a_script_that_does_not_train_sees_nothing_new(tmp_path):
    script = write_script(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    file = tmp_path / "run.json"
    options = ("--log-prefix=", f"--summary-json={file}")
    job = run_to_end(run_command(script, ranks=1, options=options))
    assert (job.stdout, job.stderr) == ("out\n", "err\n")
    assert json.loads(file.read_text())["steps"] == 0


def test_no_summary_turns_the_card_off(tmp_path):
    trace = tmp_path / "trace"
    options = (TORCH, "--no-summary", f"--trace={trace}")
    job = run_to_end(run_command(_script(tmp_path), ranks=1, options=options))
    assert f"paceline: timeline: {trace / 'timeline.html'}\n" in job.stderr
    assert " after " not in job.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "--log-prefix={pid}",
            "--log-prefix '{pid}' has the field {pid}, but may have only {rank}",
        ),
        ("--summary-json=/nowhere/run.json", "--summary-json should be a file that can be written"),
    ],
)
def test_wrong_options_are_refused_before_the_job_starts(tmp_path, option, words):
    script = write_script(tmp_path, "print('started')")
    job = run_to_end(run_command(script, options=(option,)), 2)
    assert words in job.stderr
    assert job.stdout == ""


def test_the_card_of_an_elastic_job_counts_its_ranks(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys
        import torch, paceline

        paceline.init_process_group()
        killed = pathlib.Path(sys.argv[1], "killed")
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.ones(160, 4))
        loader = paceline.DataLoader(data, batch_size=8)
        training = paceline.Training(model, optimizer, loader, shards=4)
        for epoch in training.epochs(1):
            for batch in training.batches():
                for x, in batch.shards():
                    model(x).square().mean().backward()
                optimizer.step()
                if batch.step == 5 and paceline.rank() == 1 and not killed.exists():
                    killed.write_text("yes")
                    os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    options = (TORCH, "--elastic=1:2")
    command = run_command(script, str(tmp_path), options=options)
    job = run_to_end(command)
    head, rows = _card(job)
    assert head == "paceline: train.py finished after 20 steps on 2 ranks"
    # The replacement may come when the job is over.
    assert re.fullmatch(r"[23] generations; 1 rank lost, [01] joined", rows["elastic"])


@pytest.mark.slow
def test_each_of_several_launchers_speaks_of_its_own_ranks(tmp_path):
    script = _script(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = (TORCH, "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test")
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                launched(run_command(script, ranks=ranks, options=(*place, f"--node-rank={node}")))
            )
            for node, ranks in ((0, 2), (1, 1))
        ]
        assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.stderr for job in jobs)
    ranks = [_card(job)[0].partition(" on ")[2] for job in jobs]
    assert ranks == ["2 of 3 ranks", "1 of 3 ranks"]


# -- paceline top ----------------------------------------------------------------------------------


def _top(*arguments):
    return [sys.executable, "-m", "paceline", "top", *arguments]


@pytest.fixture
def running_job(tmp_path):
    """The id of a job that trains until the test is over."""
    # Only once: a file is empty for a moment whenever it is written anew.
    step = (
        "up = pathlib.Path(sys.argv[1], f'up-{rank}'); "
        "up.exists() or up.write_text(os.environ['PACELINE_RUN_ID'])"
    )
    endless = TRAIN.replace("for x, in paceline.DataLoader(data, batch_size=4):", "while True:")
    endless = endless.replace("model(x)", "model(torch.ones(2, 4))").replace("__STEP__", step)
    script = write_script(tmp_path, endless)
    with launched(run_command(script, str(tmp_path), options=(TORCH,))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        yield (tmp_path / "up-0").read_text()
        job.process.send_signal(signal.SIGINT)
        job.wait()


def test_top_shows_running_jobs_in_plain_text_where_there_is_no_terminal(running_job):
    once = subprocess.run(
        _top(running_job, "--once"), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert re.search(rf"train.py  job {running_job[:8]}  2 ranks  running for \d+ s\n", once)
    assert re.search(r"[\d,.]+ steps/s, waiting \d+%\n", once)
    assert "\x1b" not in once
    with launched(_top(running_job, "--interval=0.1")) as top:
        for _ in range(2):
            # Each ends with an empty line.
            look = "".join(iter(top.process.stdout.readline, "\n"))
            assert "train.py" in look
        top.process.send_signal(signal.SIGINT)
        assert top.wait() == 0
    assert top.stderr == ""
    nobody = subprocess.run(_top("nobody", "--once"), capture_output=True, text=True, check=True)
    assert nobody.stdout == "none of your ranks are running on this host\n"
    wrong = subprocess.run(_top("--interval=0"), capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--interval should be a number of seconds above 0 but is '0'" in wrong.stderr


def test_top_fits_a_narrow_terminal_and_gives_it_back(running_job):
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "40", "rows", "20"], stdin=theirs, check=True)
    env = {"TERM": "xterm"}
    with launched(_top(running_job), env, stdin=theirs, stdout=theirs, stderr=theirs) as top:
        os.close(theirs)
        shown = b""
        while shown.count(b"phase") < 2:  # two looks
            shown += os.read(ours, 4096)
        top.process.send_signal(signal.SIGINT)
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # nobody has the other end any more
                break
        assert top.process.wait(60) == 0
    os.close(ours)
    assert b"Traceback" not in shown
    assert b"\x1b[?1049h" in shown
    assert shown.rfind(b"\x1b[?1049l") > shown.rfind(b"\x1b[?1049h")
    text = re.sub(rb"\x1b\[[?\d;]*[A-Za-z]", b"\n", shown).decode()
    assert max(len(line) for line in text.replace("\r", "\n").split("\n")) <= 40
    assert "where" not in text
