"""Whatever goes wrong under `paceline run`: the right exit code, the right last line, no process
left.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from paceline._linux import read_stat
from tests.harness.launched import (
    launched,
    reserved_port,
    run_command,
    wait_for_files,
    write_script,
)


def _run(script, *arguments, **options):
    with launched(run_command(script, *arguments, **options)) as job:
        code = job.wait()
        left = job.left_after(5.0)
    assert left == []
    return code, job


RAISES = """
    import os, time
    if os.environ["RANK"] == "1":
        def deep():
            raise ValueError("no such sample")
        deep()
    time.sleep(60)
"""


def test_a_rank_that_raises_is_last_on_screen_and_the_others_stop(tmp_path):
    began = time.monotonic()
    code, job = _run(write_script(tmp_path, RAISES), ranks=3)
    assert code == 1
    assert time.monotonic() - began < 30
    lines = job.stderr.strip().splitlines()
    assert lines[-1].startswith("paceline: rank 1 (pid ")
    assert lines[-1].endswith("failed first: ValueError: no such sample; 2 others stopped")
    assert lines[-2] == "[1] ValueError: no such sample"
    assert "[1] Traceback (most recent call last):" in lines
    assert not any("paceline/launch" in line for line in lines), (
        "frames of the launcher are not shown to the user"
    )


def test_the_first_in_time_is_named_although_it_ends_last(tmp_path):
    script = write_script(
        tmp_path,
        """
        import atexit, os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_failing = pathlib.Path(sys.argv[1], "failing")
        if os.environ["RANK"] == "0":
            atexit.register(time.sleep, 1.0)   # for example the group's clean-up
            atexit.register(is_failing.touch)  # first: the error is known by then
            raise KeyError("the cause")
        while not is_failing.exists():
            time.sleep(0.01)
        raise ConnectionError("peer closed the connection")
        """,
    )
    code, job = _run(script, str(tmp_path))
    assert code == 1
    assert "rank 0" in job.last_line
    assert "KeyError: 'the cause'" in job.last_line
    assert "failed later: ConnectionError: peer closed" in job.stderr


@pytest.mark.parametrize(
    ("ending", "code"), [("os._exit(3)", 3), ("sys.exit(7)", 7), ("sys.exit('no data')", 1)]
)
def test_the_exit_code_is_kept(tmp_path, ending, code):
    script = write_script(
        tmp_path, f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(60)\n"
    )
    found, job = _run(script)
    assert found == code
    assert "rank 1" in job.last_line
    if "no data" in ending:
        assert "no data" in job.last_line


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(7)", 7), ("raise KeyError(1)", 1)])
def test_a_rank_that_failed_first_and_is_stopped_while_it_ends_keeps_its_code(
    tmp_path, ending, code
):
    """Rank 0 fails first, and is still ending when rank 1 fails, ends, and has all others asked to
    end. The code is that of the failure, not of the signal we sent.
    """
    script = write_script(
        tmp_path,
        f"""
        import atexit, os, pathlib, sys, time
        failed = pathlib.Path(sys.argv[1], "failed")
        if os.environ["RANK"] == "0":
            atexit.register(time.sleep, 60)
            atexit.register(failed.write_text, "yes")
            {ending}
        while not failed.exists():
            time.sleep(0.01)
        os._exit(9)
        """,
    )
    found, job = _run(script, str(tmp_path))
    assert found == code, job.stderr
    assert "rank 0" in job.last_line


def test_a_killed_rank_gives_128_plus_the_signal(tmp_path):
    script = write_script(
        tmp_path,
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "time.sleep(60)\n",
    )
    code, job = _run(script)
    assert code == 137
    assert "rank 1" in job.last_line
    assert "killed by SIGKILL" in job.last_line


def test_a_crash_shows_the_python_line_it_happened_in(tmp_path):
    script = write_script(
        tmp_path, "import ctypes\ndef into_nowhere():\n    ctypes.string_at(0)\ninto_nowhere()\n"
    )
    code, job = _run(script, ranks=1)
    assert code == 128 + signal.SIGSEGV
    assert "into_nowhere" in job.stderr
    assert "killed by SIGSEGV" in job.last_line


# Each rank starts a well-behaved child, and one that left its session, as daemons do.
WITH_CHILDREN = """
    import os, pathlib, subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(300)
"""


@pytest.fixture
def busy(tmp_path):
    """A job of two ranks, each with two children, that would run for minutes."""
    script = write_script(tmp_path, WITH_CHILDREN)
    with launched(
        run_command(script, str(tmp_path), options=("--grace=5",)), start_new_session=True
    ) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        job.rank_pids = [int((tmp_path / f"up-{rank}").read_text()) for rank in (0, 1)]
        # Launcher, reaper, fork server, two ranks with two children each.
        assert len(job.processes()) == 9
        yield job


def _parent_of(pid):
    return read_stat(pid).parent


def _fork_server(job):
    return _parent_of(job.rank_pids[0])


def test_kill_9_of_the_launcher_leaves_nothing(busy):
    os.kill(busy.process.pid, signal.SIGKILL)
    assert busy.left_after(10.0) == []
    assert busy.wait() == -signal.SIGKILL


def _kill_at_once(*pids):
    """Stopped first, so that none of them can do anything about the death of another."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_kill_9_of_launcher_and_fork_server_at_once_leaves_nothing(busy):
    _kill_at_once(busy.process.pid, _fork_server(busy))
    assert busy.left_after(10.0) == []


def test_kill_9_of_launcher_and_reaper_at_once_leaves_nothing(busy):
    _kill_at_once(busy.process.pid, _parent_of(_fork_server(busy)))
    assert busy.left_after(10.0) == []


def test_kill_9_of_the_reaper_is_not_the_end_of_the_job(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        folder = pathlib.Path(sys.argv[1])
        (folder / ("up-" + os.environ["RANK"])).write_text(str(os.getpid()))
        while not (folder / "go").exists():
            time.sleep(0.05)
        """,
    )
    with launched(run_command(script, str(tmp_path))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(_parent_of(_parent_of(int((tmp_path / "up-0").read_text()))), signal.SIGKILL)
        (tmp_path / "go").write_text("go")
        assert job.wait() == 0
        assert job.left_after(0.0) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_however_the_fork_server_ends_the_launcher_says_so(busy, number):
    server = _fork_server(busy)
    os.kill(server, number)
    assert busy.wait() == 128 + number
    assert f"the fork server (pid {server}) failed (killed by {number.name})" in busy.last_line
    assert busy.left_after(5.0) == []


@pytest.mark.slow
def test_ctrl_c_on_a_node_that_waits_for_another_one(tmp_path):
    """Its ranks are done, and it only keeps the rendezvous open."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        folder = pathlib.Path(sys.argv[1])
        (folder / ("up-" + os.environ["RANK"])).write_text("up")
        while os.environ["RANK"] == "0" and not (folder / "go").exists():
            time.sleep(0.05)
        """,
    )
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        place = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}")
        nodes = [
            stack.enter_context(
                launched(
                    run_command(
                        script,
                        str(tmp_path),
                        ranks=1,
                        options=("--preload=torch", *place, f"--node-rank={node}"),
                    )
                )
            )
            for node in (0, 1)
        ]
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        deadline = time.monotonic() + 60
        while len(nodes[1].processes()) > 3 and time.monotonic() < deadline:
            time.sleep(0.05)  # launcher, reaper and fork server are left
        time.sleep(0.5)
        nodes[1].process.send_signal(signal.SIGINT)
        assert nodes[1].process.wait(20) == 130
        (tmp_path / "go").write_text("go")
        assert nodes[0].wait() == 0


def test_kill_9_of_the_whole_group_leaves_nothing(busy):
    os.killpg(busy.process.pid, signal.SIGKILL)
    assert busy.left_after(10.0) == []
    assert busy.wait() == -signal.SIGKILL


def test_kill_9_of_a_rank_takes_its_children_along(busy):
    os.kill(busy.rank_pids[1], signal.SIGKILL)
    assert busy.wait() == 137
    assert busy.left_after(0.0) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_everything_once_is_enough(busy, number, code):
    os.kill(busy.process.pid, number)
    assert busy.wait() == code
    assert busy.last_line == f"paceline: stopped by {number.name}"
    assert busy.left_after(0.0) == []
    if number == signal.SIGINT:
        assert "rank 0 was interrupted at" in busy.stderr
        assert "KeyboardInterrupt" not in busy.stderr


STUBBORN = """
    import os, pathlib, signal, sys, time
    def write(name):
        pathlib.Path(sys.argv[1], name + os.environ["RANK"]).write_text("yes")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: write("asked-"))
    write("up-")
    time.sleep(300)
"""


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_time(tmp_path):
    script = write_script(tmp_path, STUBBORN)
    with launched(run_command(script, str(tmp_path), options=("--grace=0.5",))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 143
        assert job.left_after(0.0) == []


def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(tmp_path):
    script = write_script(tmp_path, STUBBORN)
    with launched(run_command(script, str(tmp_path), options=("--grace=300",))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGINT)
        wait_for_files(tmp_path / "asked-0", tmp_path / "asked-1")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130
        assert job.left_after(0.0) == []


def test_interrupted_while_torch_is_being_imported(tmp_path):
    """A slow module stands for torch: it marks when its import has begun."""
    up = tmp_path / "up"
    text = f"import pathlib, time\npathlib.Path({str(up)!r}).write_text('up')\ntime.sleep(300)"
    write_script(tmp_path, text, "slow.py")
    script = write_script(tmp_path, "print('never')")
    with launched(run_command(script, options=("--preload=slow",))) as job:
        wait_for_files(up)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130
        assert job.left_after(2.0) == []


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("nosuch", 2, "--preload should name modules, but 'nosuch' cannot be imported"),
        ("nosuch.part", 2, "ModuleNotFoundError: No module named 'nosuch'"),
        (".part", 1, "'.part' cannot be imported: TypeError"),
        ("broken", 1, "'broken' cannot be imported: ValueError: half a module"),
        ("leaves", 1, "'leaves' cannot be imported: SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_loaded_before_the_ranks(tmp_path, module, code, message):
    write_script(tmp_path, "raise ValueError('half a module')", "broken.py")
    write_script(tmp_path, "raise SystemExit(3)", "leaves.py")
    found, job = _run(write_script(tmp_path, "print('never')"), options=(f"--preload={module}",))
    assert found == code
    assert message in job.last_line
    assert ("Traceback" in job.stderr) == (code == 1)  # where the module itself fails is shown


@pytest.mark.parametrize("forks", [0, 2])
def test_a_limit_of_processes_that_is_too_low_is_one_sentence(tmp_path, forks):
    """The fork server's forks fail from some number on: its reaper's, then those of the ranks."""
    write_script(
        tmp_path,
        f"""
        import errno, os
        def fork(fork=os.fork, left=[{forks}]):
            left[0] -= 1
            if left[0] < 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return fork()
        os.fork = fork
        """,
        "sitecustomize.py",
    )
    command = run_command(write_script(tmp_path, "print('never')"), ranks=3)
    with launched(command, env={"PYTHONPATH": str(tmp_path)}) as job:
        assert job.wait() == 2
        assert job.left_after(5.0) == []
    what = "no process could" if forks == 0 else "rank 1 of 3 could not"
    assert job.stderr.splitlines() == [
        f"paceline: {what} be started: Resource temporarily unavailable. Start fewer "
        "ranks, or raise the limits of processes and open files (ulimit -u, -n)"
    ]


def test_a_limit_of_open_files_that_is_too_low_is_one_sentence(tmp_path):
    command = " ".join(run_command(write_script(tmp_path, "print('never')"), ranks=8))
    with launched(["bash", "-c", f"ulimit -n 40; exec {command}"]) as job:
        assert job.wait() == 2
    assert len(job.stderr.splitlines()) == 1
    assert "8 ranks need" in job.stderr
    assert "(ulimit -n): start fewer ranks, or raise the limit" in job.stderr


def test_sigterm_gives_ranks_time_to_end_well(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        done = []
        signal.signal(signal.SIGTERM, lambda *_: done.append(1))
        pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).write_text("up")
        while not done:
            time.sleep(0.05)
        print("saved", flush=True)
        """,
    )
    with launched(run_command(script, str(tmp_path))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 0
        assert sorted(job.stdout.split("\n")[:2]) == ["[0] saved", "[1] saved"]
        assert job.last_line == "paceline: stopped by SIGTERM: all ranks exited with status 0"


def test_a_request_to_save_ends_no_rank_that_does_not_listen_yet(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
        got = []
        if rank == "1":
            signal.signal(signal.SIGUSR1, lambda *_: got.append("signal"))
        (folder / ("up-" + rank)).write_text("up")
        while not (folder / "go").exists():
            time.sleep(0.02)
            if got:
                (folder / "go").write_text("go")
        print(*got)
        """,
    )
    with launched(run_command(script, str(tmp_path))) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGUSR1)
        assert job.wait() == 0, job.stderr
        assert sorted(job.stdout.splitlines()) == ["[0] ", "[1] signal"]


HELLO = "import os, sys\nprint('hello', sys.stdin.read() if os.environ['RANK'] == '0' else '')\n"


def test_closed_standard_streams(tmp_path):
    script = write_script(tmp_path, HELLO)
    command = " ".join(run_command(script, options=(f"--log-dir={tmp_path}/logs",)))
    with launched(["sh", "-c", f"{command} <&- >&- 2>&-"]) as job:
        assert job.wait() == 0
        assert job.left_after(0.0) == []
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text().startswith("hello")


def test_rank_0_gets_the_standard_input(tmp_path):
    with launched(run_command(write_script(tmp_path, HELLO)), stdin=subprocess.PIPE) as job:
        job.process.stdin.write("typed")
        assert job.wait() == 0
        assert "[0] hello typed" in job.stdout


def test_a_reader_that_has_seen_enough(tmp_path):
    script = write_script(
        tmp_path, "import itertools\nfor i in itertools.count():\n    print(i, flush=True)\n"
    )
    command = " ".join(run_command(script, options=("--grace=2",)))
    with launched(["bash", "-c", f"{command} | head -n 3; echo ${{PIPESTATUS[0]}}"]) as job:
        assert job.wait() == 0
        assert job.stdout.split()[-1] == "141"
        assert job.left_after(0.0) == []


# Far more than a pipe and the launcher take while nobody reads.
MUCH_OUTPUT = """
    import os, pathlib, sys, time
    stream = getattr(sys, sys.argv[2])
    pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).write_text("up")
    for number in range(30000):
        stream.write(f"{{number:0100}}\\n")
    stream.flush()
    {ending}
"""


@contextlib.contextmanager
def _paused_reader(tmp_path, stream, ending, **options):
    """A job whose output nobody reads, once its ranks have begun to write."""
    script = write_script(tmp_path, MUCH_OUTPUT.format(ending=ending))
    ours, theirs = os.pipe()
    with launched(run_command(script, str(tmp_path), stream, **options), **{stream: theirs}) as job:
        os.close(theirs)
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        time.sleep(0.5)
        try:
            yield job, ours
        finally:
            os.close(ours)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path, stream, number, code):
    """A paused pager, Ctrl-S, a stuck log collector."""
    with _paused_reader(tmp_path, stream, "time.sleep(600)", options=("--grace=20",)) as (job, _):
        began = time.monotonic()
        job.process.send_signal(number)
        assert job.process.wait(60) == code
        assert time.monotonic() - began < 15  # not the grace time
        assert job.left_after(0.0) == []


def test_a_signal_after_the_job_ends_the_wait_for_the_reader(tmp_path):
    """The ranks are done, and what they wrote waits in the launcher."""
    script = write_script(
        tmp_path,
        """
        import pathlib, sys
        print("x" * 300_000, flush=True)
        pathlib.Path(sys.argv[1], "done").write_text("done")
        """,
    )
    ours, theirs = os.pipe()
    with launched(run_command(script, str(tmp_path), ranks=1), stdout=theirs) as job:
        os.close(theirs)
        wait_for_files(tmp_path / "done")
        deadline = time.monotonic() + 60
        while len(job.processes()) != 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 143
        assert "bytes of output were not shown" in job.process.stderr.read()
    os.close(ours)


def test_a_killed_rank_is_noticed_while_nobody_reads(tmp_path):
    with _paused_reader(tmp_path, "stdout", "time.sleep(600)") as (job, ours):
        pids = [pid for pid in job.processes() if pid != job.process.pid]
        ranks = [pid for pid in pids if os.getpgid(pid) == pid != os.getsid(pid)]
        os.kill(ranks[0], signal.SIGKILL)
        line = job.process.stderr.readline()
        assert "failed first: killed by SIGKILL" in line
        os.set_blocking(ours, False)
        deadline = time.monotonic() + 60
        while job.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):  # the reader goes on
                os.read(ours, 1 << 20)
            time.sleep(0.001)
        assert job.process.returncode == 137


def test_nothing_is_lost_when_the_reader_goes_on(tmp_path):
    with _paused_reader(tmp_path, "stdout", "pass") as (job, ours):
        data = b"".join(iter(lambda: os.read(ours, 1 << 16), b""))
        assert job.process.wait(60) == 0
    lines = data.decode().splitlines()
    for rank in (0, 1):
        found = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert found == [f"[{rank}] {number:0100}" for number in range(30000)]


def test_a_full_disk_ends_no_job(tmp_path):
    """/dev/full stands for it: standard output, and the log of one rank."""
    script = write_script(tmp_path, "print('hello')")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-1.log").symlink_to("/dev/full")
    with open("/dev/full", "w") as full:
        command = run_command(script, options=(f"--log-dir={logs}",))
        with launched(command, stdout=full) as job:
            assert job.wait() == 0
    assert (logs / "rank-0.log").read_text() == "hello\n"
    assert "standard output is not written any more: No space left on device" in job.stderr
    assert "rank-1.log is not written any more: No space left on device" in job.stderr


def test_in_the_background_with_hangups_ignored(tmp_path):
    """nohup: a signal that was ignored from the start stays ignored."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        folder = pathlib.Path(sys.argv[1])
        (folder / ("up-" + os.environ["RANK"])).write_text("up")
        while not (folder / "go").exists():
            time.sleep(0.05)
        """,
    )
    command = run_command(script, str(tmp_path))
    with launched([sys.executable, "-c", _IGNORING.format(command=command)]) as job:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.kill(job.process.pid, signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "go").write_text("go")
        assert job.wait() == 0


_IGNORING = (
    "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    "os.execv({command!r}[0], {command!r})"
)


def test_a_closed_terminal_ends_everything(tmp_path):
    script = write_script(tmp_path, WITH_CHILDREN)
    ours, theirs = pty.openpty()
    become_leader = (
        "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); {}"
    )
    command = run_command(script, str(tmp_path), options=("--grace=2",))
    start = become_leader.format(f"os.execv({command[0]!r}, {command!r})")
    with launched([sys.executable, "-c", start], stdin=theirs, stdout=theirs, stderr=theirs) as job:
        os.close(theirs)
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.close(ours)  # the window is closed: SIGHUP, and writing fails from now on
        assert job.process.wait(60) == 129
        assert job.left_after(0.0) == []


def test_ctrl_c_typed_in_a_terminal(tmp_path):
    script = write_script(tmp_path, WITH_CHILDREN)
    ours, theirs = pty.openpty()
    command = run_command(script, str(tmp_path), options=("--grace=5",))
    start = (
        "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        f"os.execv({command[0]!r}, {command!r})"
    )
    with launched([sys.executable, "-c", start], stdin=theirs, stdout=theirs, stderr=theirs) as job:
        os.close(theirs)
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        os.write(ours, b"\x03")
        assert job.process.wait(60) == 130
        assert job.left_after(0.0) == []
        os.close(ours)


def test_children_that_outlive_a_successful_rank_are_ended(tmp_path):
    script = write_script(
        tmp_path,
        "import subprocess, sys\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "subprocess.Popen(command, start_new_session=True)\n",
    )
    code, _ = _run(script)
    assert code == 0
