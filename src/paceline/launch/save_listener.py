"""Turns a signal to any rank into one answer that all ranks get at the same call of
`save_requested()`.

A signal only sets a flag; the rank's next call takes it to the register that the ranks share. See
`paceline.launch.save_agreement` for why they all answer in the same call, and why none of them
waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, PeerLost
from paceline.launch.save_agreement import NO_REQUEST, Pace, SaveAgreement, SaveRequest

if TYPE_CHECKING:
    import torch.distributed as dist

    from paceline._torch_internals import Store

__all__ = ["SAVE_SIGNAL", "STOP_SIGNAL", "SaveListener", "SharedAnswers"]

STOP_SIGNAL = signal.SIGTERM
SAVE_SIGNAL = signal.SIGUSR1


class SaveListener:
    """Handlers for the two signals, and this rank's part in the agreement of its default group."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "save_requested() listens for signals, which Python allows in the main thread only"
            )
        self._pid = os.getpid()
        self._is_asked = self._is_asked_to_stop = False
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._shared: SharedAnswers | None = None  # None: alone
        self._mask: set[signal.Signals | int] | None = None  # while a fork is under way
        self._before = {s: signal.signal(s, self._on_signal) for s in (STOP_SIGNAL, SAVE_SIGNAL)}

    def next_call(self) -> SaveRequest:
        """The answer to this rank's next call of `save_requested()`."""
        # In every call: ranks count their calls from the first one with the group on.
        group = _default_group()
        if group is not self._group():
            self._follow(group)
        wanted = self.asked
        answer = wanted if self._shared is None else self._shared.next_call(wanted)
        if wanted.due or answer.due:
            self._forget_what_is_served(answer)
        return answer

    @property
    def asked(self) -> SaveRequest:
        """What signals have asked this rank for, where ranks agree in another way."""
        return SaveRequest(True, self._is_asked_to_stop) if self._is_asked else NO_REQUEST

    def forget(self) -> None:
        """What was asked for is served."""
        self._is_asked = self._is_asked_to_stop = False

    def _follow(self, group: dist.ProcessGroup | None) -> None:
        """The default group of this process is another one than in the call before."""
        self._group = (lambda: None) if group is None else weakref.ref(group)
        is_alone = group is None or group.size() == 1
        self._shared = None if group is None or is_alone else SharedAnswers(group.rank())

    def _forget_what_is_served(self, answer: SaveRequest) -> None:
        if self._shared is not None and self._shared.is_over:
            self.forget()
        elif answer.due and (answer.stop or not self._is_asked_to_stop):
            # One save serves every signal that came before it.
            self.forget()

    def _on_signal(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a forked child whose fork no handler saw
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._is_asked_to_stop = self._is_asked_to_stop or number == STOP_SIGNAL
        self._is_asked = True

    def close(self) -> None:
        """Give the signals back, and let the others know."""
        if self._shared is not None:
            self._shared.leave()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def hold_signals(self) -> None:
        """Before a fork: Python drops signals that reach a child before it has set itself up, so
        they wait in the kernel.
        """
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (STOP_SIGNAL, SAVE_SIGNAL))

    def release_signals(self) -> None:
        """After a fork, in both processes."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def abandon_signals(self) -> None:
        """In a forked child, such as a loader's worker: SIGTERM ends it, as its sender expects."""
        for number in (STOP_SIGNAL, SAVE_SIGNAL):
            signal.signal(number, signal.SIG_DFL)


class SharedAnswers:
    """The agreement of one group's ranks, through the store of that group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._agreement = SaveAgreement()
        self._pace = Pace()
        self._store_error: RuntimeError | None = None
        self._store = _open_store()

    @property
    def is_over(self) -> bool:
        """Whether a rank has left the loop, so that there is nothing left to save in the middle
        of.
        """
        return self._agreement.is_over

    def next_call(self, wanted: SaveRequest) -> SaveRequest:
        """The answer to this rank's next call; `wanted` is what a signal has asked it for."""
        agreement = self._agreement
        if agreement.needs_look or wanted.due:
            return self._look(wanted)
        agreement.begin_call()
        return agreement.answer() if agreement.is_closed else NO_REQUEST

    def _look(self, wanted: SaveRequest) -> SaveRequest:
        agreement = self._agreement
        agreement.begin_call()
        if self._store_error is not None:
            return self._without_store(wanted)
        calls_ahead = self._pace.calls_ahead(agreement.calls, time.monotonic())
        try:
            while (proposal := agreement.proposal(wanted, calls_ahead)) is not None:
                self._compare_and_set(proposal)
        except RuntimeError as error:
            self._store_error = error
            return self._without_store(wanted)
        return agreement.answer()

    def _without_store(self, wanted: SaveRequest) -> SaveRequest:
        """The process that serves the store has ended: no rank can be asked any more. That a group
        is lost is reported elsewhere.
        """
        if not wanted.due:
            return NO_REQUEST
        reason = str(self._store_error).strip().partition("\n")[0]
        raise PeerLost(
            f"rank {self._rank} was sent a signal to save, but cannot agree on a step with the "
            "other ranks: the process that serves their store - rank 0 or the launcher - has ended "
            f"({reason}). See its output first"
        ) from self._store_error

    def _compare_and_set(self, proposal: str) -> None:
        agreement = self._agreement
        key = str(agreement.number)
        agreement.learn(self._store.compare_set(key, agreement.known, proposal).decode())

    def leave(self) -> None:
        """This rank will make no more calls."""
        with contextlib.suppress(RuntimeError):  # the store's server may be gone already
            while (proposal := self._agreement.proposal_to_leave()) is not None:
                self._compare_and_set(proposal)


def _default_group() -> dist.ProcessGroup | None:
    """The default group, if there is one. Costs less than torch's own questions about it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return None
    group: dist.ProcessGroup | None = distributed.group.WORLD
    return group


def _open_store() -> Store:
    """The part of the default group's store for these agreements."""
    from paceline._torch_internals import PrefixStore, default_store

    store = PrefixStore("paceline/requests", default_store())
    # A connection of its own: on the group's own one another thread may be waiting for a peer.
    return store.clone() if hasattr(store, "clone") else store
