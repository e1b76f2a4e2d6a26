"""Groups that span several hosts: shared memory inside each host, Gloo between them.

Reductions are in `hierarchical_reduce`, what only moves data is in `hierarchical_move`. A call runs
as a `MultiHostCall`, on the group's own thread (`call_thread`) or, if it is short, on that of the
caller. Messages of single ranks go over Gloo as they are.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from paceline._torch_internals import PrefixStore, Store, Work
from paceline.backend.call_thread import CallThread, GivingUp
from paceline.backend.engine import Reduction, Ticket
from paceline.backend.group_options import GroupOptions
from paceline.backend.hierarchical_broadcast import (
    broadcast,
    broadcast_is_brief,
    broadcast_lanes,
)
from paceline.backend.hierarchical_exchange import (
    all_to_all,
    exchange_is_brief,
    gather,
    scatter,
)
from paceline.backend.hierarchical_move import (
    all_gather,
    is_brief,
    lanes_to_move,
)
from paceline.backend.hierarchical_offer import NumberTable, Offer, exchange_numbers
from paceline.backend.hierarchical_reduce import (
    ReducePlan,
    is_short,
    reduce_hierarchically,
    wire_dtype_of,
)
from paceline.backend.hierarchical_reduce_scatter import PartReduction
from paceline.backend.host_engine import DTYPE_CODES, core_dtype, dtype_label
from paceline.backend.lane import FIRST_RESERVED_TAG
from paceline.backend.link_speed import LinkSpeed, measure_link
from paceline.backend.multi_host_call import (
    LOOK_FOR_LOSS_S,
    Links,
    MultiHostCall,
    is_timeout,
)
from paceline.core.abi import ANY_SOURCE, CallRecord, Kind
from paceline.core.dtypes import BYTES
from paceline.errors import (
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    PacelineError,
    PeerLost,
)

__all__ = ["MultiHostEngine"]

# How long a call may take to notice that the group was aborted.
_ABORT_LIMIT_S = 2.0
# Tells an exchange of numbers from an all-gather.
_NUMBERS = 1 << 32


class MultiHostEngine:
    """One rank of a group on several hosts, with its links to the others. `is_broken` tells whether
    the group is known to have lost ranks: nobody waits in it from then on.
    """

    def __init__(
        self,
        store: Store,
        links: Links,
        timeout: timedelta,
        group_options: GroupOptions,
        is_broken: Callable[[], bool] | None = None,
    ) -> None:
        self._links, self._placement = links, links.placement
        self.rank, self.size = self._placement.rank, self._placement.size
        self._timeout = timeout
        self._wire_dtype = group_options.wire_dtype
        self._sequence = 0  # of the call that ran last
        self._link_speed: LinkSpeed | None = None  # measured by the first call that needs it
        self._signals = PrefixStore("signals/", store)
        self._is_broken = is_broken
        giving_up = GivingUp(self._why_give_up, self.abort)
        if is_broken is None:
            giving_up.look_s = LOOK_FOR_LOSS_S
        self._calls = CallThread("paceline-hosts", giving_up, runs_here=is_broken is None)

    # --- collectives ------------------------------------------------------------------------------
    def allreduce(
        self, tensor: torch.Tensor, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        header = self._header(Kind.ALLREDUCE, core_dtype(tensor), tensor.numel(), op=op.code)
        return self._reduce(header, tensor, op, wait, timeout_ns)

    def allreduce_when_known(
        self, tensor: torch.Tensor, op_of: Callable[[], Reduction | None], *, timeout_ns: int
    ) -> Ticket:
        """Start a call whose operation is asked for when it is its turn, when the calls before it
        have ended. None, on all ranks: there is no such call.
        """
        lanes = self._lanes_to_reduce(tensor.nbytes)

        def operate() -> None:
            op = op_of()
            if op is not None:
                header = self._header(
                    Kind.ALLREDUCE, core_dtype(tensor), tensor.numel(), op=op.code
                )
                self._operate(
                    header, lambda call: self._run_reduction(call, tensor, op), timeout_ns, lanes
                )

        return self._calls.start(operate)

    def can_offer(self, tensor: torch.Tensor) -> bool:
        """Whether `exchange_numbers` takes it."""
        return is_short(tensor.nbytes, self._placement.hosts)

    def name_exchange(self, key: str, description: str) -> int:
        """A label for exchanges of numbers, the same on all ranks that give this key, so that they
        are not taken for others; and what those are called in messages.
        """
        label = _NUMBERS | zlib.crc32(key.encode())
        self._links.exchange_names[label] = description
        return label

    def exchange_numbers(
        self,
        row: Sequence[float],
        offer: Offer | None,
        label: int = _NUMBERS,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> tuple[NumberTable, Ticket | None]:
        """Give every rank everybody's row of numbers, and sum what all offer, if these allow it."""
        table = NumberTable(self.size, len(row))
        table.put(self.rank, row, 0 if offer is None else offer.tensor.nbytes)
        header = self._header(
            Kind.ALLGATHER, DTYPE_CODES[torch.float64], self.size * len(row), label=label
        )
        run = functools.partial(exchange_numbers, table=table, offer=offer)
        return table, self._start(header, run, wait, timeout_ns, lanes=1, is_brief=True)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Reduction, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        dtype = core_dtype(tensor)
        header = self._header(Kind.REDUCE, dtype, tensor.numel(), op=op.code, root=root)
        return self._reduce(header, tensor, op, wait, timeout_ns, root)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Reduction,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        self._check_one_per_rank("reduce_scatter", inputs)
        counts = [tensor.numel() for tensor in inputs]
        if counts[self.rank] != output.numel():
            raise ConfigError(
                f"rank {self.rank}: reduce_scatter: the output has {output.numel()} elements, this "
                f"rank's input {counts[self.rank]}"
            )
        header = self._header(
            Kind.REDUCE_SCATTER,
            core_dtype(output),
            sum(counts),
            op=op.code,
            label=zlib.crc32(repr(counts).encode()),  # how the whole is divided
        )
        nbytes = sum(counts) * output.element_size()
        in_parts = self._placement.is_even and not self._is_short(nbytes)

        def run(call: MultiHostCall) -> None:
            if in_parts:
                PartReduction(call, output, inputs, op, self._wire_dtype_of(output, op)).run()
                return
            whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._run_reduction(call, whole, op)
            output.copy_(whole.split(counts)[self.rank].view_as(output))

        lanes, brief = self._lanes_to_reduce(nbytes), self._is_short(nbytes)
        return self._start(header, run, wait, timeout_ns, lanes, is_brief=brief)

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        nbytes = tensor.nbytes
        header = self._header(Kind.BROADCAST, BYTES, nbytes, root=root, label=dtype_label(tensor))
        run = functools.partial(broadcast, tensor=tensor, root=root)
        lanes = broadcast_lanes(self._placement, nbytes)
        brief = broadcast_is_brief(self._placement, nbytes)
        return self._start(header, run, wait, timeout_ns, lanes, is_brief=brief)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, wait: bool, timeout_ns: int
    ) -> Ticket | None:
        self._check_one_per_rank("all_gather", outputs)
        if outputs[self.rank].numel() != tensor.numel():
            raise ConfigError(
                f"rank {self.rank}: all_gather: the input has {tensor.numel()} elements, this "
                f"rank's output {outputs[self.rank].numel()}"
            )
        sizes = [output.numel() for output in outputs]
        total = sum(sizes) * tensor.element_size()
        # In the place of an operation, which this has not: how the whole is divided.
        header = self._header(
            Kind.ALLGATHER,
            BYTES,
            total,
            op=zlib.crc32(repr(sizes).encode()),
            label=dtype_label(tensor),
        )
        run = functools.partial(all_gather, outputs=outputs, tensor=tensor)
        return self._move(header, run, total, wait, timeout_ns)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        if outputs is not None:
            self._check_one_per_rank("gather", outputs)
        header = self._header(Kind.GATHER, BYTES, 0, root=root, label=dtype_label(tensor))
        run = functools.partial(gather, outputs=outputs, tensor=tensor, root=root)
        return self._exchange(header, run, wait, timeout_ns)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        if inputs is not None:
            self._check_one_per_rank("scatter", inputs)
        label = dtype_label(output)
        header = self._header(Kind.SCATTER, BYTES, output.numel(), root=root, label=label)
        run = functools.partial(scatter, output=output, inputs=inputs, root=root)
        return self._exchange(header, run, wait, timeout_ns)

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        self._check_one_per_rank("all_to_all", outputs)
        self._check_one_per_rank("all_to_all", inputs)
        header = self._header(Kind.ALLTOALL, BYTES, 0, label=dtype_label(inputs[0]))
        run = functools.partial(all_to_all, outputs=outputs, inputs=inputs)
        return self._exchange(header, run, wait, timeout_ns)

    def barrier(self, *, wait: bool, timeout_ns: int) -> Ticket | None:
        header = self._header(Kind.BARRIER, BYTES, 0)
        return self._start(header, MultiHostCall.agree, wait, timeout_ns, lanes=1, is_brief=True)

    # --- messages ---------------------------------------------------------------------------------
    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        work = self._links.all_ranks.send([tensor], peer, self._slot(tag))
        name = functools.partial(self._name_of, "send to", peer, tag)
        return _GlooTicket(work, tensor, timeout_ns, name)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int, *, timeout_ns: int) -> Ticket:
        gloo = self._links.all_ranks
        if peer == ANY_SOURCE:
            work = gloo.recv_anysource([tensor], self._slot(tag))
        else:
            work = gloo.recv([tensor], peer, self._slot(tag))
        name = functools.partial(self._name_of, "recv from", peer, tag)
        return _GlooTicket(work, tensor, timeout_ns, name)

    def _slot(self, tag: int) -> int:
        """Gloo's number for a tag."""
        if abs(tag) >= FIRST_RESERVED_TAG:
            raise ConfigError(
                f"rank {self.rank}: tag {tag} belongs to the collectives between hosts; give one "
                f"below {FIRST_RESERVED_TAG} (2**30)"
            )
        return abs(tag)

    def _name_of(self, call: str, peer: int, tag: int) -> str:
        who = "any rank" if peer == ANY_SOURCE else f"rank {peer}"
        return f"rank {self.rank}: {call} {who} (tag {tag})"

    # Through the store: Gloo closes its connections when a receive is given up.
    def post_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        self._signals.set(f"{self.rank}/{peer}/{number}", "")

    def await_signal(self, peer: int, number: int, timeout_ns: int) -> None:
        limit = timedelta(milliseconds=max(timeout_ns // 1_000_000, 1))
        try:
            self._signals.wait([f"{peer}/{self.rank}/{number}"], limit)
        except Exception as error:  # each store has its own type for a timeout
            raise CollectiveTimeout(
                f"rank {self.rank}: rank {peer} sent no monitored_barrier signal within "
                f"{limit.total_seconds():g} s",
                missing=[peer],
            ) from error

    # --- life -------------------------------------------------------------------------------------
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._links.set_timeout(timeout)

    def abort(self) -> None:
        """End every wait of this rank's calls, and of those that wait for it."""
        self._links.local.abort()
        self._links.disconnect()

    def close(self) -> None:
        self._calls.close()
        self._links.local.close()
        self._links.close()

    def _why_give_up(self) -> Exception | None:
        if self._is_broken is not None and self._is_broken():
            return GroupAborted("the ranks of this group have changed during a call")
        return self._links.loss()

    # --- steps ------------------------------------------------------------------------------------
    def _reduce(
        self,
        header: CallRecord,
        tensor: torch.Tensor,
        op: Reduction,
        wait: bool,
        timeout_ns: int,
        root: int | None = None,
    ) -> Ticket | None:
        return self._start(
            header,
            lambda call: self._run_reduction(call, tensor, op, root),
            wait,
            timeout_ns,
            lanes=self._lanes_to_reduce(tensor.nbytes),
            is_brief=self._is_short(tensor.nbytes),
        )

    def _is_short(self, nbytes: int) -> bool:
        """Whether a reduction is one message of each host. A long one is several, even where hosts
        of one rank have a single lane.
        """
        return is_short(nbytes, self._placement.hosts)

    def _lanes_to_reduce(self, nbytes: int) -> int:
        return 1 if self._is_short(nbytes) else self._placement.lanes

    def _run_reduction(
        self, call: MultiHostCall, tensor: torch.Tensor, op: Reduction, root: int | None = None
    ) -> None:
        count, element_bytes = tensor.numel(), tensor.element_size()
        lanes, hosts = self._placement.lanes, self._placement.hosts
        if self._link_speed is None and not self._is_short(tensor.nbytes):
            call.agree()
            self._link_speed = measure_link(call)
        wire_dtype = self._wire_dtype_of(tensor, op)
        plan = ReducePlan.of(
            count, element_bytes, wire_dtype.itemsize, lanes, hosts, self._link_speed
        )
        reduce_hierarchically(call, tensor, op, plan, wire_dtype, root)

    def _wire_dtype_of(self, tensor: torch.Tensor, op: Reduction) -> torch.dtype:
        return wire_dtype_of(tensor, op, op.wire_dtype or self._wire_dtype)

    def _exchange(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        brief = exchange_is_brief(self._placement)
        return self._start(header, run, wait, timeout_ns, lanes=1, is_brief=brief)

    def _move(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        nbytes: int,
        wait: bool,
        timeout_ns: int,
    ) -> Ticket | None:
        lanes = lanes_to_move(self._placement, nbytes)
        brief = is_brief(self._placement, nbytes)
        return self._start(header, run, wait, timeout_ns, lanes, is_brief=brief)

    @staticmethod
    def _header(
        kind: int, dtype: int, count: int, *, op: int = 0, root: int = -1, label: int = 0
    ) -> CallRecord:
        return CallRecord(kind=kind, dtype=dtype, op=op, root=root, count=count, label=label)

    def _start(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        wait: bool,
        timeout_ns: int,
        lanes: int,
        *,
        is_brief: bool,
    ) -> Ticket | None:
        """Run a call when it is its turn; its first `lanes` are spoken on. `is_brief`: it waits
        where signals are handled, so that it may run on the thread that makes it.
        """
        operate = functools.partial(self._operate, header, run, timeout_ns, lanes)
        if wait and is_brief and self._run_here(lambda: operate(on_callers_thread=True)):
            return None
        ticket = self._calls.start(operate)
        if not wait:
            return ticket
        try:
            ticket.wait()
        except BaseException:
            if not ticket.done():
                # What a signal handler raised. The call may not go on without its caller, whose
                # memory it writes to.
                self.abort()
                ticket.has_ended(_ABORT_LIMIT_S)
            raise
        return None

    def _operate(
        self,
        header: CallRecord,
        run: Callable[[MultiHostCall], None],
        timeout_ns: int,
        lanes: int,
        *,
        on_callers_thread: bool = False,
    ) -> None:
        """Run a call: it is its turn."""
        # Counted here: whether there is a call at all may be known no sooner.
        self._sequence += 1
        header.sequence = self._sequence
        limit_ns = timeout_ns if timeout_ns >= 0 else int(self._timeout.total_seconds() * 1e9)
        call = MultiHostCall(
            self._placement,
            self._links,
            header,
            limit_ns,
            lanes,
            on_callers_thread=on_callers_thread,
        )
        with call.failing_together():
            run(call)

    def _run_here(self, operate: Callable[[], None]) -> bool:
        """Run a short call on the thread that makes it, if it is its turn."""
        try:
            return self._calls.run_here(operate)
        except PacelineError:
            raise
        except BaseException:  # what a signal handler raised
            self.abort()
            raise

    def _check_one_per_rank(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size:
            raise ConfigError(
                f"rank {self.rank}: {call} needs one tensor for each of the {self.size} ranks, "
                f"got {len(tensors)}"
            )


# --- messages -------------------------------------------------------------------------------------
class _GlooTicket:
    """A message in progress. Gloo gives a time limit to the wait, not to the message."""

    def __init__(
        self, work: Work, keep: torch.Tensor, timeout_ns: int, name: Callable[[], str]
    ) -> None:
        self._work, self._keep, self._timeout_ns, self._name = work, keep, timeout_ns, name

    def wait(self, timeout_ns: int = -1) -> bool:
        limit_ns = timeout_ns if timeout_ns > 0 else self._timeout_ns
        try:
            if limit_ns > 0:
                self._work.wait(timedelta(microseconds=limit_ns / 1000))
            else:
                self._work.wait()
        except RuntimeError as error:
            kind = CollectiveTimeout if is_timeout(str(error)) else PeerLost
            raise kind(f"{self._name()} over Gloo failed: {error}") from error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed())

    @property
    def source(self) -> int:
        return int(self._work._source_rank())
