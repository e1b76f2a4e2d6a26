"""Exchanges a short text between ranks through a torch store, within a time limit.

Not for the hot path - a store is usually a TCP server - but it works before a group exists and
when some ranks never call, which no collective survives. It carries text, never pickles.

One exchange has one collector, the first of its ranks. Every rank publishes its value under
`<topic>/<rank>`; the collector waits for all of them and publishes one outcome under
`<topic>/outcome`, which everybody returns or raises:

    values    what every rank published                   -> returned
    missing   the ranks absent when the time was up       -> CollectiveTimeout
    lost      a rank whose process ended meanwhile        -> PeerLost, within about a second

So n ranks cost 2n messages where everyone asking everyone would make n squared, and all ranks come
to the same conclusion. Should the collector itself be gone, the others notice: by its process where
that is known, else by the time limit, else because the store went with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from paceline._linux import exit_code_of, is_running
from paceline.errors import (
    CollectiveTimeout,
    GroupAborted,
    PacelineError,
    PeerLost,
    describe_exit,
)

__all__ = [
    "AbandonableStore",
    "Store",
    "exchange",
    "format_ranks",
    "wait_for_keys",
    "wait_for_peer",
]

_PROMPT_S = 0.5
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1
_READERS_LIMIT_S = 3.0
_CHECK_PROCESSES_EVERY_S = 0.5
_RANKS_SHOWN = 16


class Store(Protocol):
    """What we use of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


class AbandonableStore:
    """A store through which nobody waits any longer for a group that has become obsolete: every
    look at it raises `GroupAborted` from then on.
    """

    def __init__(self, store: Store, is_obsolete: Callable[[], bool]) -> None:
        self._store, self._is_obsolete = store, is_obsolete

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        if self._is_obsolete():
            raise GroupAborted("the ranks of this group have changed before it was complete")
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """As other stores, but in looks of its own: a store that waits cannot be interrupted."""
        deadline = time.monotonic() + timeout.total_seconds()
        pause_s = _SHORTEST_PAUSE_S / 8
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"no {keys} within {timeout.total_seconds():g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SHORTEST_PAUSE_S)


def exchange(
    store: Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    value: str,
    timeout: timedelta,
    *,
    pids: Mapping[int, int] | None = None,
    pid_in: Callable[[str], int | None] | None = None,
    describe_missing: Callable[[list[int]], str] | None = None,
    prompt: bool = False,
) -> dict[int, str]:
    """Every rank's `value`. All of `ranks` call it with the same `topic`, which is used once.

    Ranks whose process is known - from `pids`, or because `pid_in` finds it in their value - are
    watched: if one ends before all have come, the others raise `PeerLost`. On the time limit raises
    `CollectiveTimeout` with the text of `describe_missing(missing ranks)`. `prompt`: the others are
    about to call it as well (see `wait_for_keys`).
    """
    if len(ranks) == 1:
        return {rank: value}
    peers = _PeerProcesses(store, rank, pids or {}, pid_in, topic)
    attempt = _Exchange(store, topic, rank, ranks, timeout, peers, prompt)
    with _store_loss_as_peer_lost(rank):
        outcome = attempt.run(value)
    if outcome.lost is not None:
        raise _peer_lost(rank, *outcome.lost)
    if outcome.missing:
        message = (
            _describe_missing(outcome.missing, rank, len(ranks), timeout)
            if describe_missing is None
            else describe_missing(outcome.missing)
        )
        raise CollectiveTimeout(message, outcome.missing)
    return dict(zip(ranks, outcome.values, strict=True))


def wait_for_keys(
    store: Store,
    keys: list[str],
    deadline: float,
    give_up: Callable[[], bool] = lambda: False,
    *,
    prompt: bool = False,
) -> bool:
    """Wait until the store has all `keys`; False when `give_up()` is true or the deadline
    (time.monotonic) passed first.

    Polls instead of calling `store.wait`, which ignores Ctrl-C and logs a warning each time it runs
    out. The pauses grow with the time waited, so polling adds about a tenth to it. Where the keys
    are expected within milliseconds, `prompt` waits in the store for half a second at first, which
    is quicker.
    """
    began = time.monotonic()
    if prompt and _wait_in_store(store, keys, min(_PROMPT_S, deadline - began)):
        return True
    while not store.check(keys):
        now = time.monotonic()
        if now >= deadline or give_up():
            # They may have come in between, and then they count.
            return store.check(keys)
        pause = max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, (now - began) / 8))
        time.sleep(min(pause, deadline - now))
    return True


def _wait_in_store(store: Store, keys: list[str], seconds: float) -> bool:
    # Each store has its own type for a time-out. If it is none, the next call raises it again.
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
        return True
    return False


def wait_for_peer(
    store: Store,
    key: str,
    rank: int,
    peer: int,
    timeout: timedelta,
    pids: Mapping[int, int],
    purpose: str,
) -> str:
    """The text that one peer publishes under `key`. Raises `CollectiveTimeout` naming the `purpose`
    of it, or `PeerLost` if the peer's process, as in `pids`, ended without.
    """
    peers = _PeerProcesses(store, rank, pids)
    deadline = time.monotonic() + timeout.total_seconds()
    with _store_loss_as_peer_lost(rank):
        if wait_for_keys(
            store, [key], deadline, lambda: peers.first_ended([peer]) is not None, prompt=True
        ):
            return store.get(key).decode()
        if (ended := peers.first_ended([peer])) is not None:
            raise _peer_lost(rank, *ended)
    raise CollectiveTimeout(
        f"rank {rank} waited {timeout.total_seconds():g} s for {purpose}; see the output of rank "
        f"{peer} for the cause, or pass a longer timeout",
        missing=[peer],
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2", at most sixteen of them."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    if len(ranks) > _RANKS_SHOWN:
        shown += f" and {len(ranks) - _RANKS_SHOWN} more"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _describe_missing(missing: list[int], rank: int, size: int, timeout: timedelta) -> str:
    return (
        f"rank {rank}: {format_ranks(missing)} of {size} did not join the group within "
        f"{timeout.total_seconds():g} s; see {'its' if len(missing) == 1 else 'their'} output, and "
        f"check that all {size} ranks were started"
    )


def _peer_lost(rank: int, peer: int, pid: int) -> PeerLost:
    code = exit_code_of(pid, -1)
    return PeerLost(
        f"rank {peer} (pid {pid}) was lost ({describe_exit(code)}) while rank {rank} waited for it "
        "to join the group; see its output",
        rank=peer,
        pid=pid,
        exitcode=code,
    )


@contextlib.contextmanager
def _store_loss_as_peer_lost(rank: int) -> Iterator[None]:
    """A store raises some RuntimeError of torch's when the process that serves it is gone."""
    try:
        yield
    except PacelineError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise PeerLost(
            f"rank {rank} lost the store through which ranks meet: the process that serves it - "
            f"rank 0 or the launcher - ended ({reason}). See its output first"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What the collector publishes. Values mean success, missing ranks or a lost one failure."""

    values: list[str] = dataclasses.field(default_factory=list)
    missing: list[int] = dataclasses.field(default_factory=list)
    lost: tuple[int, int] | None = None  # rank and pid


class _Exchange:
    """One rank's part in one exchange."""

    def __init__(
        self,
        store: Store,
        topic: str,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        peers: _PeerProcesses,
        prompt: bool,
    ) -> None:
        self._store, self._rank, self._ranks, self._peers = store, rank, ranks, peers
        self._keys = {other: f"{topic}/{other}" for other in ranks}
        self._outcome_key = f"{topic}/outcome"
        self._prompt = prompt
        self._deadline = time.monotonic() + timeout.total_seconds()

    def run(self, value: str) -> _Outcome:
        self._store.set(self._keys[self._rank], value)
        if self._rank != self._ranks[0]:
            return self._receive()
        outcome = self._collect()
        self._store.set(self._outcome_key, json.dumps(dataclasses.asdict(outcome)))
        if not outcome.values:
            self._wait_for_readers(outcome)
        return outcome

    def _wait_for_readers(self, outcome: _Outcome) -> None:
        """This process may serve the store, and the error that follows may end it: the others get
        time to read.
        """
        lost = outcome.lost[0] if outcome.lost is not None else None
        marks = [
            self._mark_of(rank)
            for rank, key in self._keys.items()
            if rank not in (self._rank, lost) and self._store.check([key])
        ]
        deadline = time.monotonic() + _READERS_LIMIT_S
        while marks and not self._store.check(marks) and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE_S / 10)

    def _mark_of(self, rank: int) -> str:
        """The key by which a rank says that it has read of a failure."""
        return f"{self._keys[rank]}/read"

    def _collect(self) -> _Outcome:
        keys = list(self._keys.values())
        if self._wait(keys, self._deadline, self._ranks):
            return _Outcome(values=[self._store.get(key).decode() for key in keys])
        return self._failure(self._ranks)

    def _receive(self) -> _Outcome:
        collector = self._ranks[:1]
        # The collector's clock started at another time.
        if self._wait([self._outcome_key], self._deadline + 10 * _LONGEST_PAUSE_S, collector):
            outcome = _Outcome(**json.loads(self._store.get(self._outcome_key)))
            if not outcome.values:
                self._store.set(self._mark_of(self._rank), "")
        else:
            outcome = self._failure(collector)
        return outcome

    def _wait(self, keys: list[str], deadline: float, watched: Sequence[int]) -> bool:
        def is_over() -> bool:
            return self._peers.first_ended(watched) is not None

        return wait_for_keys(self._store, keys, deadline, is_over, prompt=self._prompt)

    def _failure(self, watched: Sequence[int]) -> _Outcome:
        """Why a wait was given up. If nobody is absent, the collector does not answer."""
        if (ended := self._peers.first_ended(watched)) is not None:
            return _Outcome(lost=ended)
        absent = [rank for rank, key in self._keys.items() if not self._store.check([key])]
        return _Outcome(missing=absent or [self._ranks[0]])


class _PeerProcesses:
    """The processes of the ranks we wait for, as far as they are known; looked at now and then."""

    def __init__(
        self,
        store: Store,
        rank: int,
        pids: Mapping[int, int],
        pid_in: Callable[[str], int | None] | None = None,
        topic: str = "",
    ) -> None:
        self._store, self._rank, self._topic, self._pid_in = store, rank, topic, pid_in
        self._pids: dict[int, int | None] = dict(pids)
        self._next_look = time.monotonic() + _CHECK_PROCESSES_EVERY_S
        self._ended: tuple[int, int] | None = None

    def first_ended(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Rank and pid of a process that has ended, if one has."""
        now = time.monotonic()
        if self._ended is None and now >= self._next_look:
            self._next_look = now + _CHECK_PROCESSES_EVERY_S
            self._ended = next(self._find_ended(ranks), None)
        return self._ended

    def _find_ended(self, ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for rank in ranks:
            pid = self._pid_of(rank)
            if rank != self._rank and pid is not None and not is_running(pid):
                yield rank, pid

    def _pid_of(self, rank: int) -> int | None:
        key = f"{self._topic}/{rank}"
        if rank not in self._pids and self._pid_in is not None and self._store.check([key]):
            self._pids[rank] = self._pid_in(self._store.get(key).decode())
        return self._pids.get(rank)
