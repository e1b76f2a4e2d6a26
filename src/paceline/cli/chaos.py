"""`paceline chaos`: train twice, undisturbed and under faults, and compare the bits of every step.

The undisturbed run is an ordinary one. It tells how many steps there are and how long one takes, so
that faults can be spread over the disturbed run, an elastic one, to strike at any moment of a step:
a rank is killed, crashes, is stopped or asked to leave, or the number of ranks changes.
`paceline.Training` writes a line of digests for every step to the file that PACELINE_DIGESTS names.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.cli.scale import send_scale_request
from paceline.diagnostics.digest_log import Digests, differing_names, read_digests
from paceline.errors import ConfigError, PacelineError, describe_exit
from paceline.launch.job_page import JobPage, Word, find_job_page_below

__all__ = ["PlannedFault", "add_arguments", "plan_faults", "run"]

_DIGESTS = "PACELINE_DIGESTS"
_POLL_S = 0.002
_SHOWN = 5
_FROM_LAUNCHER = "paceline: "
_TAIL_LINES = 30
# What is left of the last steps: a rank that ends there has nobody left to hand its work to.
_STRUCK_PART = 0.95
_NO_STATE = -1


class _Kind(enum.Enum):
    KILL = "killed (SIGKILL)"
    CRASH = "crashed (SIGSEGV)"
    STOP = "stopped (SIGSTOP)"
    LEAVE = "asked to leave (SIGTERM)"
    SCALE = "number of ranks changed"


_SIGNALS = {
    _Kind.KILL: signal.SIGKILL,
    _Kind.CRASH: signal.SIGSEGV,
    _Kind.STOP: signal.SIGSTOP,
    _Kind.LEAVE: signal.SIGTERM,
}
_WEIGHTS = {_Kind.KILL: 4, _Kind.CRASH: 2, _Kind.STOP: 1, _Kind.LEAVE: 2, _Kind.SCALE: 2}


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """A fault that strikes when the job has completed `step`, after a part of the next one."""

    kind: _Kind
    step: int
    part: float
    choice: float  # which of the ranks there are then, or how many there shall be


def plan_faults(count: int, steps: int, seed: int) -> list[PlannedFault]:
    """Faults at random moments of a training of so many steps, in the order of their steps."""
    rng = random.Random(seed)
    kinds = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    last = max(1, int(steps * _STRUCK_PART))
    moments = sorted(rng.randrange(last) for _ in range(count))
    return [
        PlannedFault(kind, step, rng.random(), rng.random())
        for kind, step in zip(kinds, moments, strict=True)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline chaos [options] [--] train.py [arguments]"
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="faults (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument(
        "--elastic", default="1:3", metavar="MIN:MAX", help="of the disturbed run (default: 1:3)"
    )
    parser.add_argument(
        "--spare-last", action="store_true",
        help="strike only while another rank can go on: what is shown is how survivors do, not how "
        "all begin again",
    )  # fmt: skip
    parser.add_argument(
        "--stopped", type=float, default=1.0, metavar="SECONDS",
        help="after which a stopped rank is killed (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS",
        help="give up when no step is completed for so long (default: 120)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=pathlib.Path, metavar="DIR", help="keep output and digests of both runs"
    )
    parser.add_argument("--preload", metavar="MODULES", help="as in `paceline run`; of both runs")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    script = options.command_line[options.command_line[:1] == ["--"] :]
    if not script:
        raise ConfigError("nothing to run: give a script (paceline chaos train.py)")
    common = [] if options.preload is None else [f"--preload={options.preload}"]
    if options.kills < 0:
        raise ConfigError(f"--kills should be 0 or more but is {options.kills}")
    with contextlib.ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        undisturbed = _Trial(folder, "undisturbed")
        print("undisturbed run ...", flush=True)
        undisturbed.run(["-n1", *common, "--", *script])
        expected = dict(undisturbed.digests())
        faults = plan_faults(options.kills, len(expected), options.seed)
        print(
            f"  {len(expected)} steps in {undisturbed.seconds:.1f} s\n"
            f"disturbed run, --elastic {options.elastic}, {len(faults)} faults ...",
            flush=True,
        )
        disturbed = _Trial(folder, "disturbed", {"PACELINE_STOPPED_S": str(options.stopped)})
        step_s = undisturbed.seconds / len(expected)
        elastic = [f"--elastic={options.elastic}", f"--max-restarts={10 * len(faults) + 10}"]
        with disturbed.running([*elastic, *common, "--", *script]) as process:
            adversary = _Adversary(
                process,
                faults,
                step_s,
                options.patience,
                disturbed.show_events,
                least_left=1 if options.spare_last else 0,
            )
            adversary.strike_until_over()
        disturbed.show_events()
        print(f"  {disturbed.seconds:.1f} s\n{adversary.table()}")
        return _compare(expected, disturbed.digests())


class _Trial:
    """One run of the script, its output in files."""

    def __init__(
        self, folder: pathlib.Path, name: str, variables: dict[str, str] | None = None
    ) -> None:
        self._name = name
        self._output, self._digests = folder / f"{name}.log", folder / f"{name}.digests"
        self._digests.unlink(missing_ok=True)
        self._variables = {**(variables or {}), _DIGESTS: str(self._digests.resolve())}
        self._shown_bytes = 0
        self.seconds = 0.0

    def run(self, arguments: Sequence[str]) -> None:
        with self.running(arguments):
            pass

    @contextlib.contextmanager
    def running(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """The process of the run, from which an exception leaves nothing behind. Afterwards it has
        ended well.
        """
        command = [sys.executable, "-m", "paceline", "run", *arguments]
        environ = {**os.environ, **self._variables}
        began = time.monotonic()
        with self._output.open("wb") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.seconds = time.monotonic() - began
        if process.returncode != 0:
            lines = self._output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            raise PacelineError(
                f"the {self._name} run {describe_exit(process.returncode)}. Its last lines:\n"
                + "\n".join(lines)
            )

    def show_events(self) -> None:
        """Print what the launcher has told of its ranks since the last call."""
        with self._output.open("rb") as output:
            output.seek(self._shown_bytes)
            unread = output.read()
        whole = unread[: unread.rfind(b"\n") + 1]
        self._shown_bytes += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(_FROM_LAUNCHER):
                print(f"  {line.removeprefix(_FROM_LAUNCHER)}", flush=True)

    def digests(self) -> list[tuple[int, Digests]]:
        if not self._digests.exists():
            raise ConfigError(
                f"the {self._name} run wrote no digests: the script should train with "
                "paceline.Training"
            )
        return read_digests(self._digests, may_be_cut_off=True)


@dataclasses.dataclass
class _Strike:
    """A fault that has struck, and how long it took until the next step was completed."""

    kind: _Kind
    step: int
    when: float
    seconds: float | None = None


class _Adversary:
    """Disturbs one elastic job."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        faults: Sequence[PlannedFault],
        step_s: float,
        patience_s: float,
        show_events: Callable[[], None],
        least_left: int = 0,
    ) -> None:
        self._process = process
        self._show_events = show_events
        self._planned = collections.deque(faults)
        self._step_s = step_s
        self._patience_s = patience_s
        self._least_left = least_left  # ranks that can go on after a fault
        self._strikes: list[_Strike] = []
        self._struck_pids: set[int] = set()
        self._generations = 0
        self._times_all_lost = 0

    def strike_until_over(self) -> None:
        page = self._find_page()
        if page is None:
            return
        try:
            self._strike_until_over(page)
        finally:
            page.close()

    def _find_page(self) -> JobPage | None:
        """That of the fork server below the launcher; None if the launcher ended before."""
        while self._process.poll() is None:
            if (page := find_job_page_below(self._process.pid)) is not None:
                return page
            time.sleep(0.05)
        return None

    def _strike_until_over(self, page: JobPage) -> None:
        step, since = _NO_STATE, time.monotonic()
        while self._process.poll() is None:
            now, reached = time.monotonic(), _step_of(page)
            # Nobody has a state while all are lost, nor when all have ended after the last step.
            if reached not in {step, _NO_STATE}:
                if reached < step - 1:  # no two ranks are further apart
                    self._note_restart(reached)
                step, since = reached, now
                self._note_progress(step, now)
                self._show_events()
            elif now - since > self._patience_s:
                raise PacelineError(
                    f"the disturbed run completed no step for {self._patience_s:g} s after step "
                    f"{step}; the last fault: {self._last_fault()}"
                )
            self._generations = int(page.words[Word.LATEST]) + 1
            is_due = self._planned and step >= self._planned[0].step
            if is_due and self._may_strike(page):
                fault = self._planned.popleft()
                time.sleep(fault.part * self._step_s)
                self._strike(fault, page)
            time.sleep(_POLL_S)

    def _note_restart(self, step: int) -> None:
        """All ranks were lost, and those after them have begun again at an earlier step."""
        self._times_all_lost += 1
        for strike in self._strikes:
            if strike.seconds is None:
                strike.step = step

    def _note_progress(self, step: int, now: float) -> None:
        for strike in self._strikes:
            if strike.seconds is None and step > strike.step:
                strike.seconds = now - strike.when

    def _last_fault(self) -> str:
        return self._strikes[-1].kind.value if self._strikes else "none"

    @property
    def _is_recovering(self) -> bool:
        return any(strike.seconds is None for strike in self._strikes)

    def _may_strike(self, page: JobPage) -> bool:
        """Whether as many ranks as wanted can go on after one more fault."""
        if not self._least_left:
            return True
        return not self._is_recovering and len(self._unharmed_pids(page)) > self._least_left

    def _unharmed_pids(self, page: JobPage) -> list[int]:
        """Ranks that train: neither newcomers, nor ranks that leave or will soon be gone."""
        published, trained = page.latest_published(), _ranks_with_state(page)
        members = published[-1].generation.members if published else ()
        pids = [page.pid_in(member.slot) for member in members if member.slot in trained]
        return [pid for pid in pids if pid is not None and pid not in self._struck_pids]

    def _strike(self, fault: PlannedFault, page: JobPage) -> None:
        kind = fault.kind
        # Crash after crash without progress looks like an error of the script, and ends the job.
        if kind is _Kind.CRASH and self._is_recovering:
            kind = _Kind.KILL
        if kind is _Kind.SCALE:
            low = max(int(page.words[Word.MIN_RANKS]), self._least_left + 1)
            high = page.max_ranks
            with contextlib.suppress(PacelineError, OSError):
                send_scale_request(page, low + int(fault.choice * (high - low + 1)))
        else:
            pids = [pid for slot in range(page.max_ranks) if (pid := page.pid_in(slot)) is not None]
            if self._least_left:
                pids = self._unharmed_pids(page)
            if not pids:
                return
            struck = pids[int(fault.choice * len(pids))]
            self._struck_pids.add(struck)
            with contextlib.suppress(ProcessLookupError):
                os.kill(struck, _SIGNALS[kind])
        self._strikes.append(_Strike(kind, _step_of(page), time.monotonic()))

    def table(self) -> str:
        """What was done, and how long it took until the next completed step."""
        lines = [f"  {'fault':<26}{'times':>6}{'next step after: median':>25}{'longest':>10}"]
        for kind in _Kind:
            strikes = [strike for strike in self._strikes if strike.kind is kind]
            times = [strike.seconds for strike in strikes if strike.seconds is not None]
            if strikes:
                median = f"{statistics.median(times):.2f} s" if times else "-"
                longest = f"{max(times):.2f} s" if times else "-"
                lines.append(f"  {kind.value:<26}{len(strikes):>6}{median:>25}{longest:>10}")
        lines.append(f"  {self._generations} generations")
        if self._times_all_lost:
            often = "once" if self._times_all_lost == 1 else f"{self._times_all_lost} times"
            lines.append(f"  all ranks were lost {often}: those after them began again")
        if self._planned:
            lines.append(f"  {len(self._planned)} faults were not reached: the run was over before")
        return "\n".join(lines)


def _step_of(page: JobPage) -> int:
    """How far the job is; `_NO_STATE` if no rank has one."""
    return max(_ranks_with_state(page).values(), default=_NO_STATE)


def _ranks_with_state(page: JobPage) -> dict[int, int]:
    """Slot -> step. A slot keeps the step of the process that was in it, which counts no more:
    those after it may have begun again.
    """
    return {
        slot: step
        for slot in range(page.max_ranks)
        if page.member_in(slot) is not None and (step := page.step_in(slot)) is not None
    }


def _compare(expected: dict[int, Digests], found: list[tuple[int, Digests]]) -> int:
    for step, digests in sorted(found, key=lambda entry: entry[0]):
        if different := differing_names(expected.get(step, {}), digests):
            print(f"step {step} is the first that differs, in {len(different)}:")
            for name in different[:_SHOWN]:
                one, other = expected.get(step, {}).get(name, "missing"), digests.get(name)
                print(f"  {name}: {one} and {other or 'missing'}")
            return 1
    steps, last = {step for step, _ in found}, max(expected)
    if last not in steps:
        print(f"the disturbed run ended at step {max(steps)}, the undisturbed one at {last}")
        return 1
    after_last = dict(found)[last]
    print(f"the state after step {last}, undisturbed: {_sha256(expected[last])}")
    print(f"the state after step {last}, disturbed:   {_sha256(after_last)}")
    print(f"the same bits in {len(steps)} of {len(expected)} steps")
    return 0


def _sha256(digests: Digests) -> str:
    """One number for all parameters, buffers and states."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
