"""`save_requested()`: a signal to any rank becomes one answer that all ranks get at the same call.

    SIGUSR1   save and go on
    SIGTERM   save and stop: the machine is wanted back (Slurm, Kubernetes, spot instances)

How ranks agree without a collective per step. A signal only sets a flag here; a thread carries it
to the group's store and watches there for flags of others, so the usual call costs one attribute. A
rank that sees the flag in its k-th call waits in that call and posts k. When all ranks have posted,
the save belongs to call max(k): ranks that are there return the request now, the others return "no"
until they get there. No rank waits for one that is ahead of it, so this cannot deadlock as long as
all ranks make the same calls in the same order - which is what one training loop does.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import signal
import threading
from typing import Any

from paceline.errors import ConfigError
from paceline.launch.agreement import exchange

__all__ = ["SaveRequest", "save_requested", "stop_listening", "STOP_SIGNAL", "SAVE_SIGNAL"]

STOP_SIGNAL = signal.SIGTERM
SAVE_SIGNAL = signal.SIGUSR1
_POLL_S = 0.2
_AGREE_TIMEOUT_S = 120.0
_LEFT = "save/left"  # set by the first rank that stops listening


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """The answer of `save_requested()`: true if a save is due now; `stop` if the script should end
    after it.
    """

    due: bool = False
    stop: bool = False

    def __bool__(self) -> bool:
        return self.due


_NO = SaveRequest()


class _Listener:
    """Handlers for the two signals, and the thread that tells and asks the store."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.calls = 0
        self.requests = 0  # agreed so far: names the keys of the next one
        self.flag = threading.Event()
        self.due_at: int | None = None  # agreed call that is still ahead of this rank
        self.agreed = _NO
        self._stop_wanted = False
        self._signals = 0  # received here so far
        self._lock = threading.Lock()  # `requests` and `flag` change together
        self._done = threading.Event()
        self._before = {s: signal.signal(s, self._on_signal) for s in (STOP_SIGNAL, SAVE_SIGNAL)}
        self._store = _group_store()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(
                target=self._watch, name="paceline-save-request", daemon=True
            )
            self._thread.start()

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self.pid:  # a forked child that did not pass through `_forget`
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signals += 1
        self._stop_wanted = self._stop_wanted or number == STOP_SIGNAL
        self.flag.set()

    def _watch(self) -> None:
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        told = -1
        with contextlib.suppress(
            Exception
        ):  # the store ends with its server; a lost group is reported elsewhere
            while not self._done.wait(_POLL_S):
                number = self.requests
                if self.flag.is_set() and told != number:
                    told = number
                    store.set(f"save/{number}/wanted", "1")
                elif not self.flag.is_set() and store.check([f"save/{number}/wanted"]):
                    with self._lock:
                        if self.requests == number:  # not agreed in the meantime
                            self.flag.set()

    def agree(self, rank: int, world: int) -> None:
        """All ranks are waiting in a call of theirs: the save is due at the latest of these.

        If a rank has left for good - training ends just now - there is nothing left to save in the
        middle of.
        """
        signals, mine = self._signals, f"{self.calls} {int(self._stop_wanted)}"
        answers: list[str] | None = [mine]
        if self._store is not None:
            self._store.set(f"save/{self.requests}/wanted", "1")
            answers = exchange(
                self._store,
                f"save/{self.requests}",
                rank,
                world,
                mine,
                timeout_s=_AGREE_TIMEOUT_S,
                complain=lambda missing: (
                    f"a save was requested and rank {rank} waited {_AGREE_TIMEOUT_S:g} s for all ranks to call "
                    f"save_requested(), but ranks {missing} did not. Call it on every rank, once per step"
                ),
                unless=_LEFT,
            )
        if answers is not None:
            pairs = [tuple(map(int, answer.split())) for answer in answers]
            self.due_at = max(call for call, _ in pairs)
            self.agreed = SaveRequest(due=True, stop=any(stop for _, stop in pairs))
        with self._lock:
            self.requests += 1
            if self._signals == signals:  # one that came while agreeing is a request of its own
                self.flag.clear()
                self._stop_wanted = False

    def close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store's server may be gone already
                self._store.set(_LEFT, "1")
        self._done.set()
        if self._thread is not None:
            self._thread.join(5.0)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)


class _Process:
    """At most one listener per process: signal handlers are the process's."""

    listener: _Listener | None = None
    mask: set[signal.Signals | int] | None = (
        None  # while a fork is under way: the signal mask before it
    )


def save_requested() -> SaveRequest:
    """Whether all ranks should save now. Call it once per step, on every rank, in the main thread.

    The first call starts listening for SIGTERM and SIGUSR1. The result is true on all ranks at the
    same step, once per request; its `stop` says whether to end after saving:

        if request := paceline.save_requested():
            paceline.save("last.pt", model=model, optimizer=optimizer, step=step)
            if request.stop:
                break
    """
    listener = _Process.listener or _listen()
    listener.calls += 1
    if listener.due_at is None and listener.flag.is_set():
        import torch.distributed as dist

        joined = dist.is_available() and dist.is_initialized()
        listener.agree(dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1)
    if listener.due_at is None or listener.calls < listener.due_at:
        return _NO
    listener.due_at = None
    return listener.agreed


def _listen() -> _Listener:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "save_requested() listens for signals, which Python allows in the main thread only"
        )
    _register_once()
    _Process.listener = _Listener()
    return _Process.listener


def stop_listening() -> None:
    """Give the signals back; called by `destroy_process_group`."""
    if _Process.listener is not None:
        _Process.listener.close()
        _Process.listener = None


@functools.cache
def _register_once() -> None:
    atexit.register(stop_listening)
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget
    )


def _hold_signals() -> None:
    """Python drops signals that reach a child before it has set itself up: keep them waiting in the
    kernel.
    """
    if _Process.listener is not None:
        _Process.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (STOP_SIGNAL, SAVE_SIGNAL))


def _release_signals() -> None:
    if _Process.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _Process.mask)
        _Process.mask = None


def _forget() -> None:
    """In a forked child, such as a loader's worker: SIGTERM must end it, as whoever sends it
    expects.
    """
    if _Process.listener is not None:
        for number in (STOP_SIGNAL, SAVE_SIGNAL):
            signal.signal(number, signal.SIG_DFL)
        _Process.listener = None
    _release_signals()


def _group_store() -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return PrefixStore("paceline/requests", _get_default_store())
