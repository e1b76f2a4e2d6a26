"""The default process group of a rank in an elastic job: one after the other, a generation each.

`init_process_group()` forms none: a replacement would wait for ranks that are in their loops. Who
trains (`paceline.Training`) says that it is ready, and enters generation after generation. A group
is formed only as long as it is of use: when a newer generation has been published, or a member has
ended, everybody who waits for the others stops at once and goes to the next one.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import TYPE_CHECKING

from paceline.errors import GroupAborted, NativeError, PeerLost
from paceline.launch.elastic_job import ElasticJob
from paceline.launch.generation import Generation

if TYPE_CHECKING:
    from paceline._torch_internals import Store

__all__ = ["ElasticGroup"]

# Within this time the launcher has noticed that a rank ended.
_NOTICE_S = 2.0


class ElasticGroup:
    """Enters and leaves the generations of a job.

    Args:
        job: that of this process.
        store: of the job, served as long as it runs.
        timeout: of collective calls; None for torch's.
        wait_s: how long to wait for a generation, at most.
    """

    def __init__(
        self, job: ElasticJob, store: Store, timeout: datetime.timedelta | None, wait_s: float
    ) -> None:
        from torch.distributed.distributed_c10d import default_pg_timeout

        self.job = job
        self._store, self._wait_s = store, wait_s
        self._timeout = timeout or default_pg_timeout
        self._generation: Generation | None = None
        self.has_left = False  # this process was asked to leave, and the job goes on without it

    @property
    def number(self) -> int:
        """The generation that this process is in, or was in last; -1 before the first."""
        return -1 if self._generation is None else self._generation.number

    @property
    def generation(self) -> Generation:
        """The generation that this process is in, or was in last; there has been one."""
        assert self._generation is not None
        return self._generation

    @property
    def newest(self) -> int:
        """The newest generation there is."""
        return self.job.latest()

    def enter_first(self) -> None:
        """Ask to be counted in, and join the first generation that does so.

        Raises:
            CollectiveTimeout: there was none in time.
        """
        self.job.ready()
        while not self.enter_next():
            pass
        self.has_left = False

    def enter_next(self) -> bool:
        """Leave the current generation and join the newest one after it; False if that one goes on
        without this process.

        Raises:
            CollectiveTimeout: there was none in time.
        """
        while True:
            self.leave()
            self._ask_for_next()
            self._generation = self.job.wait_beyond(self.number, self._wait_s)
            rank = self._generation.rank_of(self.job.member)
            if rank is None:
                self.has_left = True
                return False
            if self._form(self._generation, rank):
                return True

    def leave(self) -> None:
        """Destroy the group of the current generation, which may have lost ranks."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        generation = self._generation
        if generation is not None and generation.spans_hosts and self.job.has_broken(generation):
            # What was sent to a lost host will never arrive: nobody waits for it.
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()
        dist.destroy_process_group()

    def _ask_for_next(self) -> None:
        """Between hosts connections can be lost though nobody has ended: then nobody else sees a
        reason for another generation.
        """
        generation = self._generation
        if generation is None or not generation.spans_hosts:
            return
        if generation.rank_of(self.job.member) is not None and not self.becomes_obsolete():
            self.job.disconnected(generation)

    def becomes_obsolete(self) -> bool:
        """Whether the current generation has lost a member or been replaced, or will have been as
        soon as the launcher notices.
        """
        deadline = time.monotonic() + _NOTICE_S
        while not self._is_obsolete():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def _is_obsolete(self) -> bool:
        assert self._generation is not None
        return self.job.latest() > self.number or self.job.has_lost(self._generation)

    def _form(self, generation: Generation, rank: int) -> bool:
        """Make the default group with all members; False if the generation has become obsolete."""
        import torch.distributed as dist

        from paceline._torch_internals import PrefixStore
        from paceline.backend.create import GroupWatch, form_group

        store = PrefixStore(generation.store_prefix, self._store)
        size = len(generation.members)
        try:
            watch = GroupWatch(self._is_obsolete, is_broken=lambda: self.job.has_broken(generation))
            formed = form_group(store, rank, size, self._timeout, watch)
        except (PeerLost, GroupAborted):
            return False
        except NativeError:
            # The shared memory of a rank that has just ended, or an error of this machine's.
            if not self.becomes_obsolete():
                raise
            return False
        hook = sys.excepthook
        dist.init_process_group(
            "paceline",
            store=store,
            rank=rank,
            world_size=size,
            timeout=self._timeout,
            pg_options=formed,
        )
        # Torch adds a hook of its own each time, and removes none of them.
        sys.excepthook = hook
        return True
