"""`paceline run --elastic`: ranks die, stop, leave and come, and the job goes on - or ends as any
other job would, with nothing left behind.

The script stands in for one with `paceline.Training`: it says that it is ready, follows the
generations, and runs what a test gives it at every step.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from paceline._linux import is_running
from paceline.cli.chaos import _step_of, plan_faults
from paceline.cli.main import main
from paceline.launch.job_page import JobPage, find_job_pages
from tests.harness.launched import (
    launched,
    reserved_port,
    run_command,
    wait_for_files,
    write_script,
)

MEMBER = """
    import os, pathlib, signal, sys, time
    from paceline.launch.elastic_job import current_elastic_job

    job = current_elastic_job()
    me = job.member
    folder = pathlib.Path(sys.argv[1])
    end = folder / "end"
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    job.ready()
    generation = job.wait_beyond(-1, 30)
    while generation.rank_of(me) is None:
        generation = job.wait_beyond(generation.number, 30)
    step = 0

    while not end.exists():
        job.report_step(step)
        if asked and job.is_ending():
            sys.exit(0)
        if asked:
            job.leaving()
            asked.clear()
        if job.latest() > generation.number:
            generation = job.wait_beyond(generation.number, 1)
            if generation.rank_of(me) is None:
                (folder / f"left-{me}").write_text("yes")
                sys.exit(0)
        slots = "".join(str(each.slot) for each in generation.members)
        up = folder / f"up-{me}-{slots}"
        if not up.exists():  # once: whoever reads it must not find it empty
            up.write_text(str(os.getpid()))
        __STEP__
        step += 1
        time.sleep(0.005)
    print("done", me)
"""


def _script(folder, step="pass"):
    indent = " " * 8
    step = f"\n{indent}".join(step.strip().splitlines())
    return write_script(folder, MEMBER.replace("__STEP__", step))


def _command(folder, step="pass", *, elastic="1:2", options=()):
    command = run_command(
        _script(folder, step), str(folder), options=(f"--elastic={elastic}", *options)
    )
    at = command.index("-n")
    return [*command[:at], *command[at + 2 :]]


def _pid(path):
    wait_for_files(path)
    return int(path.read_text())


def _wait_until_ended(*pids):
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _finish(job, folder, code=0):
    (folder / "end").write_text("yes")
    found = job.wait()
    assert found == code, job.stderr
    assert job.left_after(5.0) == []


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(3)", "exited with code 3"),
    ],
)
def test_a_rank_that_dies_is_replaced(tmp_path, death, words):
    step = f"if me == 1 and step == 3: sys.stdout.write('half a line'); sys.stdout.flush(); {death}"
    with launched(_command(tmp_path, step)) as job:
        wait_for_files(tmp_path / "up-2-01")
        _finish(job, tmp_path)
    lines = [line for line in job.stderr.splitlines() if line.startswith("paceline:")]
    assert re.fullmatch(
        rf"paceline: rank 1 \(pid \d+\) {words} at step \d+: 1 rank goes on \(generation 1\)",
        lines[0],
    )
    assert re.fullmatch(
        r"paceline: rank 1 \(pid \d+\) joins: 2 ranks go on \(generation 2\)", lines[1]
    )
    assert len(lines) == 2
    assert sorted(job.stdout.splitlines()) == ["[0] done 0", "[1] done 2", "[1] half a line"]


def test_what_a_killed_rank_has_started_ends_with_it(tmp_path):
    step = """
if me == 1 and step == 3:
    import subprocess
    child = subprocess.Popen(["sleep", "300"])
    (folder / "child").write_text(str(child.pid))
    os.kill(os.getpid(), 9)
"""
    with launched(_command(tmp_path, step)) as job:
        child = _pid(tmp_path / "child")
        wait_for_files(tmp_path / "up-2-01")
        _wait_until_ended(child)
        _finish(job, tmp_path)


def test_all_ranks_killed_at_once_begin_again(tmp_path):
    with launched(_command(tmp_path, elastic="2:3")) as job:
        for member in range(3):
            os.kill(_pid(tmp_path / f"up-{member}-012"), signal.SIGKILL)
        wait_for_files(*(tmp_path / f"up-{member}-012" for member in (3, 4, 5)))
        _finish(job, tmp_path)


def test_a_rank_of_an_interpreter_of_its_own_is_replaced_as_well(tmp_path):
    step = "if me == 0 and step == 3: os.kill(os.getpid(), 9)"
    with launched(_command(tmp_path, step, options=("--start-method=spawn",))) as job:
        wait_for_files(tmp_path / "up-2-01")
        _finish(job, tmp_path)


def test_an_error_ends_the_job_as_it_ends_any_other(tmp_path):
    step = "if me == 1 and step == 3: raise KeyError('no such sample')"
    with launched(_command(tmp_path, step)) as job:
        assert job.wait() == 1
        assert job.left_after(5.0) == []
    assert "[1] Traceback (most recent call last):" in job.stderr
    assert re.search(
        r"paceline: rank 1 \(pid \d+\) failed first: KeyError: 'no such sample'; 1 other stopped$",
        job.stderr.strip(),
    )


def test_an_error_of_a_rank_that_does_not_end_stops_the_others_at_once(tmp_path):
    step = """
if me == 1 and step == 3:
    import atexit
    atexit.register(time.sleep, 60)
    sys.exit(7)
"""
    began = time.monotonic()
    with launched(_command(tmp_path, step)) as job:
        assert job.wait() == 7
    assert time.monotonic() - began < 40


def test_errors_are_survived_on_request_and_shown(tmp_path):
    step = "if me == 1 and step == 3: raise KeyError('no such sample')"
    with launched(_command(tmp_path, step, options=("--restart-on-error",))) as job:
        wait_for_files(tmp_path / "up-2-01")
        _finish(job, tmp_path)
    assert "[1] KeyError: 'no such sample'" in job.stderr
    assert "exited with code 1 at step" in job.stderr


def test_a_rank_that_fails_over_and_over_ends_the_job(tmp_path):
    step = "if job.slot == 1: raise KeyError('no such sample')\nif step: step -= 1"
    options = ("--restart-on-error", "--grace=5")
    with launched(_command(tmp_path, step, elastic="2:2", options=options)) as job:
        assert job.wait() == 1
        assert job.left_after(5.0) == []
    assert "paceline: giving up: 3 errors in a row, and no step completed in between" in job.stderr
    # One more if the other rank has completed its first step after the first of them.
    assert job.stderr.count("[1] KeyError: 'no such sample'") in (3, 4)
    assert "failed first: KeyError: 'no such sample'; 1 other stopped" in job.last_line


def test_errors_are_shown_by_a_launcher_that_was_late_for_them(tmp_path):
    """Those of three processes, one after the other on the same pipe, are there at once."""
    step = """
while me == 1 and not (folder / "is-stopped").exists():
    time.sleep(0.01)
if job.slot == 1:
    raise KeyError(f'no sample {me}')
if step:
    step -= 1
"""
    options = ("--restart-on-error", "--grace=5")
    with launched(_command(tmp_path, step, elastic="2:2", options=options)) as job:
        wait_for_files(tmp_path / "up-1-01")
        os.kill(job.process.pid, signal.SIGSTOP)
        (tmp_path / "is-stopped").touch()
        _wait_until_ended(_pid(tmp_path / "up-3-01"))
        os.kill(job.process.pid, signal.SIGCONT)
        assert job.wait() == 1
    shown = re.findall(r"\[1\] KeyError: 'no sample (\d)'", job.stderr)
    assert shown == ["1", "2", "3"]
    assert "failed first: KeyError: 'no sample 3'; 1 other stopped" in job.last_line


def test_without_restarts_the_job_goes_on_down_to_its_least_number(tmp_path):
    options = ("--max-restarts=0",)
    with launched(_command(tmp_path, elastic="2:3", options=options)) as job:
        os.kill(_pid(tmp_path / "up-1-012"), signal.SIGKILL)
        os.kill(_pid(tmp_path / "up-2-02"), signal.SIGKILL)
        assert job.wait() == 137
        assert job.left_after(5.0) == []
    assert "paceline: giving up: 0 ranks have been replaced, which is the limit" in job.stderr
    assert "rank 2" in job.last_line


def test_sigterm_to_a_rank_makes_it_leave_and_another_come(tmp_path):
    with launched(_command(tmp_path)) as job:
        os.kill(_pid(tmp_path / "up-1-01"), signal.SIGTERM)
        wait_for_files(tmp_path / "left-1", tmp_path / "up-2-01")
        _finish(job, tmp_path)
    assert re.search(r"rank 1 \(pid \d+\) leaves: 1 rank goes on", job.stderr)


def test_a_rank_that_is_stopped_for_too_long_is_killed_and_replaced(tmp_path):
    with launched(_command(tmp_path), env={"PACELINE_STOPPED_S": "0.2"}) as job:
        os.kill(_pid(tmp_path / "up-1-01"), signal.SIGSTOP)
        wait_for_files(tmp_path / "up-2-01")
        _finish(job, tmp_path)
    assert re.search(r"rank 1 \(pid \d+\) was stopped for 0.2 s at step \d+: 1 rank", job.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_launcher_end_the_job(tmp_path, number):
    with launched(_command(tmp_path)) as job:
        wait_for_files(tmp_path / "up-0-01", tmp_path / "up-1-01")
        job.process.send_signal(number)
        code = job.wait()
        assert job.left_after(5.0) == []
    name = signal.Signals(number).name
    assert f"paceline: stopped by {name}" in job.stderr
    # SIGTERM was handled by every rank, Ctrl-C by none.
    assert code == (0 if number == signal.SIGTERM else 130)


TRAINING = """
    import os, pathlib, sys, torch, paceline
    from torch.utils.data import TensorDataset

    paceline.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = paceline.DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
    training = paceline.Training(model, optimizer, loader, shards=2)
    for epoch in training.epochs(1_000_000):
        for batch in training.batches():
            for (x,) in batch.shards():
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if training.step == 5:
                pathlib.Path(sys.argv[1], f"up-{os.environ['RANK']}").write_text("yes")
    print("stopping:", training.stopping)
"""


def test_sigterm_to_the_launcher_ends_the_loops_of_training(tmp_path):
    """Also without a checkpoint, which would otherwise be what the signal is good for."""
    options = ("--elastic=1:2", "--preload=torch", "--grace=60")
    command = run_command(write_script(tmp_path, TRAINING), str(tmp_path), options=options)
    with launched(command) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0, job.stderr
        assert job.left_after(5.0) == []
    assert sorted(job.stdout.splitlines()) == ["[0] stopping: True", "[1] stopping: True"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_launcher_leaves_nothing_behind(tmp_path, number):
    with launched(_command(tmp_path)) as job:
        os.kill(_pid(tmp_path / "up-0-01"), signal.SIGKILL)
        pids = [_pid(tmp_path / "up-1-01"), _pid(tmp_path / "up-2-01")]
        if number == signal.SIGSTOP:
            os.kill(pids[0], signal.SIGSTOP)
        job.process.kill()
        job.process.wait()
        assert job.left_after(15.0) == []


def test_scale_and_ps_from_outside(tmp_path, capsys):
    command = _command(tmp_path, elastic="1:3", options=("-n2",))
    with launched(command) as job:
        pids = [_pid(tmp_path / f"up-{member}-01") for member in (0, 1)]
        name = _job_of(pids[0])
        assert main(["scale", name, "3"]) == 0
        assert capsys.readouterr().out == f"job {name[:8]}: from 2 to 3 ranks\n"
        pids.append(_pid(tmp_path / "up-2-012"))
        assert main(["scale", name, "1"]) == 0
        wait_for_files(tmp_path / "left-1", tmp_path / "left-2", tmp_path / "up-0-0")
        _wait_until_ended(*pids[1:])  # until then `ps` shows those that leave, too
        capsys.readouterr()
        assert main(["ps", name]) == 0
        shown = capsys.readouterr().out
        assert "1 rank (elastic 1:3)" in shown
        assert re.search(r"generation 1, \d+ s ago: ranks 0 1 2: rank 2 .* joins\n", shown)
        assert re.search(r"generation 2, \d+ s ago: ranks 0: .* leaves\n", shown)
        assert re.search(rf"0 +{pids[0]} ", shown)
        assert main(["ps", "--json", name]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        elastic = json.loads(line)["elastic"]
        assert [elastic[key] for key in ("min", "max", "target")] == [1, 3, 1]
        assert [each["ranks"] for each in elastic["generations"]] == [[0, 1], [0, 1, 2], [0]]
        assert "joins" in elastic["generations"][1]["reason"]
        assert main(["scale", name, "4"]) == 2
        assert "should be from 1 to 3 but is 4" in capsys.readouterr().err
        assert main(["scale", "no-such-job", "2"]) == 2
        assert "'no-such-job' is running on this host" in capsys.readouterr().err
        _finish(job, tmp_path)


def _job_of(*pids):
    pages = find_job_pages()
    (name,) = {page.job for page in pages if page.pid_in(0) in pids}
    for page in pages:
        page.close()
    return name


STORE = """
if "store" not in globals():
    import datetime, torch.distributed as dist
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=30))
    count = store.add("met", 1)
    (folder / f"met-{me}").write_text(str(count))
    if me == 1: os.kill(os.getpid(), 9)
"""


def test_replacements_find_the_store_the_others_use(tmp_path):
    with launched(_command(tmp_path, STORE, options=("--preload=torch",))) as job:
        wait_for_files(*(tmp_path / f"met-{member}" for member in (0, 1, 2)))
        _finish(job, tmp_path)
    assert sorted(int((tmp_path / f"met-{each}").read_text()) for each in (0, 1, 2)) == [1, 2, 3]


def test_the_end_of_the_store_process_ends_the_job(tmp_path):
    with launched(_command(tmp_path)) as job:
        ranks = {_pid(tmp_path / "up-0-01"), _pid(tmp_path / "up-1-01")}
        (store,) = set(_children_of_parent(min(ranks))) - ranks
        os.kill(store, signal.SIGKILL)
        assert job.wait() == 1
        assert job.left_after(5.0) == []
    assert f"the process that serves the job's store (pid {store}) killed" in job.stderr


def _children_of_parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return [int(child) for child in file.read().split()]


def test_a_script_without_training_runs_as_elsewhere(tmp_path):
    script = write_script(
        tmp_path, "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    )
    command = run_command(script, ranks=2, options=("--elastic=1:3",))
    with launched(command) as job:
        assert job.wait() == 0
    assert sorted(job.stdout.splitlines()) == ["[0] 0 3", "[1] 1 3"]


# -- several hosts: launchers of one machine that meet at an address of it ------------------------


@pytest.fixture
def start(tmp_path):
    """Starts a launcher of two ranks, that of the first host or another."""

    def start_host(step="pass", *, node_rank, hosts=2, elastic="1:4"):
        options = (
            "-n2",
            f"--nnodes={hosts}",
            f"--node-rank={node_rank}",
            f"--rdzv-endpoint=127.0.0.1:{port}",
        )
        return launched(_command(tmp_path, step, elastic=elastic, options=options))

    with reserved_port() as port:
        yield start_host


def _wait_for_members(folder, slots):
    """The processes that are in a generation of these slots."""
    deadline = time.monotonic() + 60
    while len(found := [*folder.glob(f"up-*-{slots}")]) < len(slots):
        assert time.monotonic() < deadline, [path.name for path in folder.iterdir()]
        time.sleep(0.02)
    return [_pid(path) for path in found]


def test_hosts_show_the_same_job_and_each_can_scale_it(tmp_path, start, capsys):
    with start(node_rank=0) as first, start(node_rank=1) as other:
        pids = _wait_for_members(tmp_path, "0123")
        name = _job_of(*pids)
        assert main(["scale", name, "3"]) == 0
        _wait_for_members(tmp_path, "012")
        capsys.readouterr()
        assert main(["ps", name]) == 0
        shown = capsys.readouterr().out
        assert "3 ranks on 2 hosts (elastic 1:4)" in shown
        assert "generation 0" in shown
        assert "ranks 0 1 on host 0, 2 3 on host 1: the job begins" in shown
        (tmp_path / "end").write_text("yes")
        _finish(first, tmp_path)
        _finish(other, tmp_path)
    assert "paceline: scaled from 4 to 3 ranks" in first.stderr
    assert "paceline: scaled from 4 to 3 ranks" in other.stderr
    assert "[2] done" in other.stdout


def test_the_fork_server_of_a_host_is_killed_and_another_host_joins(tmp_path, start):
    with start(node_rank=0) as first:
        with start(node_rank=1) as other:
            pids = _wait_for_members(tmp_path, "0123")
            here = [pid for pid in pids if pid in other.processes()]
            with open(f"/proc/{here[0]}/stat") as file:
                os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            _wait_for_members(tmp_path, "01")
            assert other.wait() == 137
            assert other.left_after(5.0) == []
        with start(node_rank=1) as other:
            deadline = time.monotonic() + 60
            while len([*tmp_path.glob("up-*-0123")]) < 6:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            _finish(first, tmp_path)
            _finish(other, tmp_path)
    assert re.search(r"host 1 \(.*\) with ranks 2, 3 was lost \(connection lost\)", first.stderr)
    assert re.search(r"host 2 \(.*\) joins the job", first.stderr)


def test_an_error_on_one_host_ends_the_job_on_all(tmp_path, start):
    step = "if job.slot == 3 and step == 3: raise KeyError('no such sample')"
    with start(step, node_rank=0) as first, start(step, node_rank=1) as other:
        assert other.wait() == 1
        assert first.wait() == 1
        assert first.left_after(5.0) == other.left_after(5.0) == []
    assert "failed first: KeyError: 'no such sample'" in other.last_line
    assert re.search(r"rank 3 failed.* on host 1 \(.*\): see its output there", first.last_line)


def test_sigterm_to_the_first_launcher_ends_the_job_on_all_hosts(tmp_path, start):
    with start(node_rank=0) as first, start(node_rank=1) as other:
        _wait_for_members(tmp_path, "0123")
        first.process.send_signal(signal.SIGTERM)
        assert (first.wait(), other.wait()) == (0, 0), (first.stderr, other.stderr)
        assert first.left_after(5.0) == other.left_after(5.0) == []
    for host in (first, other):
        assert "paceline: stopped by SIGTERM: all ranks exited with status 0" in host.stderr


def test_sigterm_to_another_launcher_lets_its_ranks_leave(tmp_path, start):
    with start(node_rank=0) as first, start(node_rank=1) as other:
        _wait_for_members(tmp_path, "0123")
        other.process.send_signal(signal.SIGTERM)
        assert other.wait() == 0, other.stderr
        assert other.left_after(5.0) == []
        _wait_for_members(tmp_path, "01")
        _finish(first, tmp_path)
    assert re.search(r"host 1 \(.*\) leaves the job", first.stderr)


def test_a_first_launcher_that_is_killed_ends_the_job_on_all_hosts(tmp_path, start):
    with start(node_rank=0) as first, start(node_rank=1) as other:
        _wait_for_members(tmp_path, "0123")
        first.process.kill()
        assert other.wait() == 1
        assert first.left_after(15.0) == other.left_after(5.0) == []
    assert "is gone: the job has ended. Start it again on all hosts" in other.last_line


def test_a_host_with_another_command_is_refused(tmp_path, start):
    with start(node_rank=0, hosts=1) as first:
        with start(node_rank=1, elastic="1:3") as other:
            assert other.wait() == 1
        _finish(first, tmp_path)
    assert "does not take this host: its --elastic is 1:3 and that of the job 1:4" in other.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--elastic=2"], "--elastic should be MIN:MAX"),
        (["--elastic=3:2"], "--elastic should be MIN:MAX"),
        (["--elastic=0:2"], "--elastic should be MIN:MAX"),
        (["--elastic=1:99999"], "should be at most 1024 but is 99999"),
        (["--elastic=2:3", "-n4"], "-n should be from 2 to 3, as --elastic 2:3 says, but is 4"),
        (["--elastic=2:3", "--max-restarts=many"], "--max-restarts should be a whole number"),
        (["--elastic=2:3", "--max-restarts=-1"], "--max-restarts should be 0 or more but is -1"),
        (["--elastic=2:3", "--nnodes=2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (["--max-restarts=1"], "--max-restarts needs --elastic MIN:MAX"),
        (["--restart-on-error"], "--restart-on-error needs --elastic MIN:MAX"),
    ],
)
def test_wrong_options_are_explained(tmp_path, capsys, options, message):
    script = write_script(tmp_path, "pass")
    assert main(["run", *options, str(script)]) == 2
    assert message in capsys.readouterr().err


# Trains nothing, but writes a digest for each step; newcomers go on after the last one written.
DIGESTS = """
    import json, os, pathlib, signal, sys, time
    from paceline.launch.elastic_job import current_elastic_job

    path = pathlib.Path(os.environ["PACELINE_DIGESTS"])
    job = current_elastic_job()

    def write(step, value):
        line = "paceline digest " + json.dumps({"step": step, "digests": {"weight": value}})
        with open(path, "a") as file:
            file.write(line + "\\n")

    def last_step():
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1][16:])["step"] if lines else 0

    if job is None:
        for step in range(1, 151):
            time.sleep(0.005)
            write(step, str(step))
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: job.leaving())
    job.ready()
    generation = job.wait_beyond(-1, 30)
    while generation.rank_of(job.member) is None:
        generation = job.wait_beyond(generation.number, 30)
    while (step := last_step() + 1) <= 150:
        if job.latest() > generation.number:
            generation = job.wait_beyond(generation.number, 30)
        if (rank := generation.rank_of(job.member)) is None:
            break
        if rank == 0:
            value = str(step) if step < int(sys.argv[1]) else "wrong"
            write(step, value)
        job.report_step(last_step())
        time.sleep(0.01)
"""


@pytest.mark.parametrize("wrong_from", [120, 1000])
def test_chaos_strikes_and_compares_every_step(tmp_path, capsys, wrong_from):
    script = write_script(tmp_path, DIGESTS)
    keep = tmp_path / "kept"
    options = ["--kills=8", "--seed=1", f"--keep={keep}", "--stopped=0.1"]
    code = main(["chaos", *options, "--preload=", "--", str(script), str(wrong_from)])
    shown = capsys.readouterr()
    log = (keep / "disturbed.log").read_text()
    assert code == (1 if wrong_from < 150 else 0), f"{shown}\n{log}"
    assert "150 steps in" in shown.out
    assert "killed (SIGKILL)" in shown.out
    assert re.search(r"^  rank \d .* at step \d+: ", shown.out, re.MULTILINE)  # as it happens
    if code:
        assert "step 120 is the first that differs, in 1:\n  weight: 120 and wrong" in shown.out
    else:
        assert "the same bits in 150 of 150 steps" in shown.out
        hashes = re.findall(r"the state after step 150, \w+: +([0-9a-f]{64})", shown.out)
        assert len(hashes) == 2
        assert len(set(hashes)) == 1


def test_chaos_does_not_count_the_steps_of_ranks_that_are_gone():
    page = JobPage.create("job", min_ranks=1, max_ranks=2)
    for slot, step in ((0, 170), (1, 174)):
        page.seat(slot, member=slot, pid=1000 + slot)
        page.set_step(slot, step)
    assert _step_of(page) == 174
    page.vacate(0)
    page.vacate(1)
    assert _step_of(page) == -1
    page.seat(0, member=2, pid=1002)
    page.set_step(0, 3)
    assert _step_of(page) == 3
    page.close()


def test_the_plan_of_faults_follows_from_the_seed():
    plan = plan_faults(20, steps=100, seed=7)
    assert plan == plan_faults(20, steps=100, seed=7) != plan_faults(20, steps=100, seed=8)
    assert [fault.step for fault in plan] == sorted(fault.step for fault in plan)
    assert len({fault.kind for fault in plan}) > 3
    assert max(fault.step for fault in plan) < 95


def test_chaos_says_what_is_missing(tmp_path, capsys):
    script = write_script(tmp_path, "pass")
    assert main(["chaos"]) == 2
    assert main(["chaos", "--preload=", "--", str(script)]) == 2
    message = "the undisturbed run wrote no digests: the script should train with paceline.Training"
    assert message in capsys.readouterr().err
    script.write_text("raise SystemExit('no data')")
    assert main(["chaos", "--preload=", "--", str(script)]) == 2
    error = capsys.readouterr().err
    assert "the undisturbed run exited with code 1. Its last lines:" in error
    assert "no data" in error
