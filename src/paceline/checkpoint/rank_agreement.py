"""The agreement of all ranks about one call of `save` or `load`, through the group's store."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator

import torch.distributed as dist

from paceline._torch_internals import PrefixStore, default_store
from paceline.backend import PacelineGroup
from paceline.backend.host_engine import HostEngine
from paceline.core.store_exchange import exchange
from paceline.errors import (
    ConfigError,
    MismatchError,
    PacelineError,
    PeerLost,
    describe_exit,
)
from paceline.telemetry.recorder import group_number, recorder
from paceline.telemetry.status_page import Phase, WaitLabel

__all__ = ["RankAgreement"]

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


class RankAgreement:
    """What the ranks agree on in one call. A single process agrees with itself.

    Raises:
        ConfigError: `timeout` is no timedelta.
    """

    def __init__(self, verb: str, path: str, timeout: datetime.timedelta | None) -> None:
        if timeout is not None and not isinstance(timeout, datetime.timedelta):
            raise ConfigError(f"timeout must be a datetime.timedelta, found {timeout!r}")
        self._timeout = _DEFAULT_TIMEOUT if timeout is None else timeout
        self._call = f"paceline.{verb}({path!r})"
        self.rank, self._world_size, self._store = 0, 1, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self._world_size = dist.get_rank(), dist.get_world_size()
            self._store = PrefixStore("paceline/checkpoint", default_store())
            # The calls of each rank are numbered where the group is: all ranks make the same calls
            # in a group, whatever they called before it was made.
            number = self._store.add(f"calls/{self.rank}", 1)
            self._key = f"{verb}/{number}"

    def check_same_call(self, names: list[str]) -> None:
        """Wait until all ranks are in this call; raise `MismatchError` if they differ in the path
        or the names.
        """
        calls = self._exchange(
            "begin",
            f"{self._call} {json.dumps(names)}",
            "did not call it. Call it on every rank - only rank 0 writes - not inside "
            "`if rank == 0:` or `if paceline.is_main():`",
        )
        if len(set(calls)) > 1:
            table = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
            raise MismatchError(
                f"ranks disagree about the path or the names in a checkpoint:\n{table}",
                dict(enumerate(calls)),
            )

    @contextlib.contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Wait at the end of the block until all ranks have come to theirs. If the block failed on
        some ranks, the others raise a `PacelineError` that names them.
        """
        try:
            yield
        except Exception as error:
            # The peers wait for this rank: they must learn that there is nothing to wait for. If
            # they are gone themselves, what happened here is still what matters.
            with contextlib.suppress(PacelineError):
                self._share_failure(f"{type(error).__name__}: {error}")
            raise
        failures = self._share_failure("")
        if failures:
            rank, text = next(iter(failures.items()))
            others = f" (and on ranks {[*failures][1:]})" if len(failures) > 1 else ""
            raise PacelineError(f"{self._call} failed on rank {rank}{others}: {text}")

    def _share_failure(self, failure: str) -> dict[int, str]:
        """The failures of all ranks that failed; an empty text is none."""
        texts = self._exchange("end", failure, "have not come to its end. Raise its timeout")
        return {rank: text for rank, text in enumerate(texts) if text}

    def _exchange(self, moment: str, value: str, what_is_missing: str) -> list[str]:
        if self._store is None:
            return [value]
        label = WaitLabel(self._call, number=group_number(f"{self._key}/{moment}")).packed()
        with (
            recorder.during(Phase.SAVE),
            recorder.waiting(label, 1),
            self._explaining_lost_peer(
                f"and {what_is_missing}" if moment == "begin" else "before that was over"
            ),
        ):
            values = exchange(
                self._store,
                f"{self._key}/{moment}",
                self.rank,
                range(self._world_size),
                value,
                self._timeout,
                pids=_peers_on_this_host(),
                describe_missing=lambda missing: (
                    f"rank {self.rank} called {self._call} and waited "
                    f"{self._timeout.total_seconds():g} s, but ranks {missing} {what_is_missing}"
                ),
            )
        return list(values.values())

    @contextlib.contextmanager
    def _explaining_lost_peer(self, what_it_means: str) -> Iterator[None]:
        try:
            yield
        except PeerLost as lost:
            if lost.rank is None:
                raise
            raise PeerLost(
                f"rank {self.rank} called {self._call}, but rank {lost.rank} (pid {lost.pid}) "
                f"ended ({describe_exit(lost.exitcode)}) {what_it_means}",
                rank=lost.rank,
                pid=lost.pid,
                exitcode=lost.exitcode,
            ) from lost


def _peers_on_this_host() -> dict[int, int] | None:
    """The processes of the ranks, where these share memory."""
    group = dist.group.WORLD
    if isinstance(group, PacelineGroup) and isinstance(group.engine, HostEngine):
        return group.engine.comm.pids
    return None
