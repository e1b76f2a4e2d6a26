"""`paceline run` when all goes well: the script is `__main__` as under python, ranks meet, output
is in order.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from tests.harness.launched import (
    launched,
    reserved_port,
    run_command,
    run_to_end,
    wait_for_files,
    write_script,
)

TORCH = "--preload=torch"


def _by_rank(job):
    lines = sorted(job.stdout.splitlines())
    return [line.partition("] ")[2] for line in lines]


LIKE_PYTHON = """
    import multiprocessing, os, pickle, sys, helper
    class Pickled: pass
    def work(queue): queue.put(__name__)
    if __name__ == "__main__":
        assert pickle.loads(pickle.dumps(Pickled())).__class__ is Pickled
        context = multiprocessing.get_context("spawn")     # imports this file again, by its path
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(queue,)); child.start(); child.join()
        script, folder = os.path.basename(sys.argv[0]), os.path.basename(sys.path[0])
        print(sys.argv[1:], script, folder, helper.WORD, queue.get())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_runs_as_python_would_run_it(tmp_path, method):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "helper.py").write_text("WORD = 'found'\n")
    script = write_script(folder, LIKE_PYTHON)
    job = run_to_end(
        run_command(script, "--lr", "-n", "0.1", options=(f"--start-method={method}",)),
        cwd=tmp_path,
    )
    assert _by_rank(job) == ["['--lr', '-n', '0.1'] train.py code found __mp_main__"] * 2


def test_a_module_runs_as_python_m_would_run_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import sys\nfrom . import __name__ as n\nprint(__name__, n, sys.argv[1:])\n"
    )
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--preload=",
        "-n2",
        "-m",
        "package.train",
        "-x",
    ]
    assert _by_rank(run_to_end(command, cwd=tmp_path)) == ["__main__ package ['-x']"] * 2


def test_ranks_differ_where_processes_do_and_agree_on_their_place(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, random, numpy
        print(*(os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")),
              random.random(), numpy.random.rand(), os.getpgrp() == os.getpid())
        """,
    )
    found = [
        line.split()
        for line in _by_rank(run_to_end(run_command(script, ranks=2, options=("--preload=numpy",))))
    ]
    assert [line[:4] for line in found] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert found[0][4] != found[1][4]
    assert found[0][5] != found[1][5]
    assert found[0][6] == "True"


MEET = """
    import sys, torch, torch.distributed as dist, paceline
    backend = sys.argv[1]
    if backend == "stock":
        dist.init_process_group("gloo")
    else:
        paceline.init_process_group(backend)
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    numbers = (paceline.rank(), paceline.world_size(), paceline.local_rank())
    print(value.item(), *numbers, torch.get_num_threads())
    if backend == "stock":
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["paceline", "gloo", "stock"])
def test_ranks_meet_and_leave_without_warnings(tmp_path, backend):
    job = run_to_end(
        run_command(write_script(tmp_path, MEET), backend, options=(TORCH,)),
        env={"PACELINE_THREADS": "1"},
    )
    assert _by_rank(job) == ["3.0 0 2 0 1", "3.0 1 2 1 1"]
    line = f"[0] paceline: 2 ranks (paceline run), {backend}, 1 thread per rank"
    assert job.stderr.splitlines() == ([] if backend == "stock" else [line])


def test_a_forked_child_that_exits_leaves_the_group_to_its_parent(tmp_path):
    """The child runs the exit handlers it inherited: it must not speak for its parent."""
    script = write_script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist, paceline
        paceline.init_process_group(quiet=True)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        value = torch.ones(1)
        dist.all_reduce(value)
        print(value.item(), os.path.exists(f"/proc/{child}"))
        """,
    )
    job = run_to_end(run_command(script, options=(TORCH,)))
    assert _by_rank(job) == ["2.0 False"] * 2
    assert job.stderr == ""


def test_two_jobs_at_once(tmp_path):
    command = run_command(write_script(tmp_path, MEET), "gloo", options=(TORCH,))
    jobs = []
    threads = [threading.Thread(target=lambda: jobs.append(run_to_end(command))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        assert [line.split()[0] for line in _by_rank(job)] == ["3.0", "3.0"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_two_hosts_meet_through_torch_s_rendezvous(tmp_path, kind):
    """Two launchers on this machine: two ranks on one, one on the other."""
    script = write_script(tmp_path, MEET)
    jobs = []

    def node(rank, ranks):
        place = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test")
        which = (f"--node-rank={rank}",) if kind == "static" else ()
        jobs.append(
            run_to_end(run_command(script, "gloo", ranks=ranks, options=(TORCH, *place, *which)))
        )

    threads = [threading.Thread(target=node, args=pair) for pair in ((0, 2), (1, 1))]
    with reserved_port() as port:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = sorted(
        (line.split() for job in jobs for line in _by_rank(job)), key=lambda line: line[1]
    )
    assert [line[:3] for line in lines] == [["6.0", "0", "3"], ["6.0", "1", "3"], ["6.0", "2", "3"]]
    assert sorted(line[3] for line in lines) == ["0", "0", "1"]


def test_much_output_of_many_ranks_is_never_torn(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        for i in range(2000):
            sys.stdout.write(f"{i}:" + "x" * 100 + "\\n")
        """,
    )
    job = run_to_end(run_command(script, ranks=3))
    for rank in range(3):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] {i}:" + "x" * 100 for i in range(2000)]


def test_quiet_ranks_and_logs(tmp_path):
    script = write_script(tmp_path, "import os\nprint('from', os.environ['RANK'])\n")
    job = run_to_end(
        run_command(script, options=("--quiet-ranks", f"--log-dir={tmp_path / 'logs'}"))
    )
    assert job.stdout == "[0] from 0\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "from 1\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_names_values_and_output_that_are_no_text(tmp_path, method):
    """Linux allows any bytes in names of files and directories, arguments and variables."""
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    script = write_script(
        folder,
        """
        import os, sys
        values = [*map(os.fsencode, sys.argv), os.environb[b"ODD"], os.path.basename(os.getcwdb())]
        sys.stdout.buffer.write(repr(values).encode() + b" raw \\xff\\n")
        """,
        os.fsdecode(b"s\xff.py"),
    )
    logs, traces = folder / os.fsdecode(b"l\xff"), folder / os.fsdecode(b"t\xff")
    options = (f"--start-method={method}", f"--log-dir={logs}", f"--trace={traces}")
    job = run_to_end(
        run_command(script.name, os.fsdecode(b"a\xff"), ranks=1, options=options),
        cwd=folder,
        env={"ODD": os.fsdecode(b"v\xff")},
        errors="surrogateescape",
    )
    line = rb"[b's\xff.py', b'a\xff', b'v\xff', b'd\xff'] raw " + b"\xff\n"
    assert os.fsencode(job.stdout) == b"[0] " + line
    assert (logs / "rank-0.log").read_bytes() == line
    assert (traces / "timeline.html").exists()


LOADER = """
    import os, pathlib, sys, time, torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 1000
        def __getitem__(self, i):
            time.sleep(0.01)
            return torch.full((10,), float(i))
    for i, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2)):
        if i == 1:
            pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).write_text(str(os.getpid()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_loader_workers_end_with_their_rank(tmp_path, victim):
    before = set(os.listdir("/dev/shm"))
    with launched(
        run_command(write_script(tmp_path, LOADER), str(tmp_path), options=(TORCH,))
    ) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        pid = job.process.pid if victim == "launcher" else int((tmp_path / "up-1").read_text())
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == (-9 if victim == "launcher" else 137)
        assert job.left_after(10.0) == []
    assert set(os.listdir("/dev/shm")) - before == set()


def test_errors_in_the_group_name_the_cause_not_the_consequence(tmp_path):
    script = write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist, paceline
        paceline.init_process_group()
        if paceline.rank() == 1:
            raise RuntimeError("the loss is nan")
        dist.all_reduce(torch.ones(1))
        """,
    )
    for backend in ("paceline", "gloo"):
        job = run_to_end(
            run_command(script, options=(TORCH,)), code=1, env={"PACELINE_BACKEND": backend}
        )
        assert "rank 1" in job.last_line
        assert "RuntimeError: the loss is nan" in job.last_line


def test_a_step_that_fails_on_one_rank_is_that_rank_s_failure(tmp_path):
    """The others raise a StepError about it, perhaps before that rank has reported its own."""
    script = write_script(
        tmp_path,
        """
        import torch, paceline
        paceline.init_process_group()
        model = paceline.DistributedDataParallel(torch.nn.Linear(10, 1))
        for step in range(6):
            width = 11 if paceline.rank() == 1 and step == 5 else 10
            model(torch.ones(4, width)).sum().backward()
        """,
    )
    job = run_to_end(run_command(script, options=(TORCH,)), code=1)
    assert "rank 1" in job.last_line, job.stderr
    assert "failed first: RuntimeError: mat1 and mat2 shapes" in job.last_line


def test_a_rank_that_raises_before_and_in_the_meeting(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, paceline
        if os.environ["RANK"] == "1":
            if sys.argv[1] == "before":
                raise RuntimeError("too early")
            os.environ["PACELINE_THREADS"] = "none"
        paceline.init_process_group()
        """,
    )
    for moment, message in (
        ("before", "RuntimeError: too early"),
        ("in", "ConfigError: PACELINE_THREADS"),
    ):
        job = run_to_end(run_command(script, moment, options=(TORCH,)), code=1)
        assert "rank 1" in job.last_line
        assert message in job.last_line
        assert job.stderr.count("  File ") == 1  # the script's own line


def test_the_image_is_shared_not_started_anew(tmp_path):
    """torch is loaded before the first line of the script, and no rank has more than one thread."""
    script = write_script(
        tmp_path,
        "import os, sys\n"
        "threads = len(os.listdir('/proc/self/task'))\n"
        "print('torch' in sys.modules, threads, os.getppid())\n",
    )
    lines = [line.split() for line in _by_rank(run_to_end(run_command(script, options=(TORCH,))))]
    assert [line[:2] for line in lines] == [["True", "1"]] * 2
    assert lines[0][2] == lines[1][2]
