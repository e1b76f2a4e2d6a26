"""Broadcast over all ranks of several hosts.

What fits into one message goes with the header that shows what call a host makes: from the root to
the ranks of its host, from the first of these to the first of each other host, and from there to
the others. What does not, between two hosts, goes straight from the root's tensor to that of the
other host's first rank, in chunks that this one hands on while the next is on its way, once all are
known to make this call. Between more hosts all of them send pieces to each other
(`hierarchical_move`).
"""

from __future__ import annotations

import ctypes as C

import torch

from paceline.backend.hierarchical_move import as_bytes, broadcast_in_pieces, lanes_to_move
from paceline.backend.hierarchical_reduce import is_short
from paceline.backend.host_placement import Placement
from paceline.backend.lane import message_capacity
from paceline.backend.multi_host_call import MultiHostCall
from paceline.backend.straight_transfer import StraightTransfer
from paceline.core.abi import Kind, Request
from paceline.core.dtypes import BYTES

__all__ = ["broadcast", "broadcast_is_brief", "broadcast_lanes"]

_CHUNK_BYTES = 4 << 20
# What one message has room for between two hosts.
_MESSAGE_BYTES = message_capacity(2)


def broadcast_is_brief(placement: Placement, nbytes: int) -> bool:
    """Whether it needs no more than one message: whoever waits for that gets signals."""
    # The root's link carries a message to every host: with several, pieces are quicker.
    return nbytes <= _MESSAGE_BYTES if placement.hosts == 2 else is_short(nbytes, placement.hosts)


def broadcast_lanes(placement: Placement, nbytes: int) -> int:
    """How many lanes it speaks on."""
    if placement.hosts == 2 or broadcast_is_brief(placement, nbytes):
        return 1
    return lanes_to_move(placement, nbytes)


def broadcast(call: MultiHostCall, tensor: torch.Tensor, root: int) -> None:
    """Give every rank the bytes that rank `root` has."""
    placement = call.placement
    if broadcast_is_brief(placement, tensor.nbytes):
        _broadcast_message(call, tensor, root)
    elif placement.hosts == 2:
        _broadcast_straight(call, as_bytes(tensor), root)
    else:
        broadcast_in_pieces(call, as_bytes(tensor), root)


# --- in one message -------------------------------------------------------------------------------
def _broadcast_message(call: MultiHostCall, tensor: torch.Tensor, root: int) -> None:
    if call.placement.host == call.placement.host_of[root]:
        _send_message(call, tensor, root)
    else:
        _receive_message(call, tensor, root)


def _send_message(call: MultiHostCall, tensor: torch.Tensor, root: int) -> None:
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    call.run_first_local(_on_host(address, nbytes, call.placement.local.index(root)))
    if call.speaks:
        lane = call.links.lane
        message = lane.outgoing(call.header, call.left())
        C.memmove(message.address, address, nbytes)
        lane.send(message, nbytes, call.placement.other_hosts)
        call.receive_first()
        call.received()
    call.confirm()


def _receive_message(call: MultiHostCall, tensor: torch.Tensor, root: int) -> None:
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    call.run_first_local(Request(kind=Kind.BARRIER, dtype=BYTES, root=-1))
    if call.speaks:
        call.send_header()
        source = call.placement.other_hosts.index(call.placement.host_of[root])
        C.memmove(address, call.receive_first()[source].address, nbytes)
        call.received()
    if not call.all_speak:
        call.run_local(_on_host(address, nbytes, 0))


# --- straight, between two hosts ------------------------------------------------------------------
def _broadcast_straight(call: MultiHostCall, data: torch.Tensor, root: int) -> None:
    with StraightTransfer(call) as transfer:
        if call.placement.host == call.placement.host_of[root]:
            _send_chunks(call, transfer, data, root)
        else:
            _receive_chunks(call, transfer, data, root)


def _send_chunks(
    call: MultiHostCall, transfer: StraightTransfer, data: torch.Tensor, root: int
) -> None:
    placement = call.placement
    if placement.rank == root:
        transfer.send(data.split(_CHUNK_BYTES), placement.members[placement.other_hosts[0]][0])
    call.agree()
    if len(placement.local) > 1:
        call.run_local(_on_host(data.data_ptr(), len(data), placement.local.index(root)))
    transfer.finish()


def _receive_chunks(
    call: MultiHostCall, transfer: StraightTransfer, data: torch.Tensor, root: int
) -> None:
    is_first, chunks = call.placement.local_index == 0, data.split(_CHUNK_BYTES)
    if is_first:
        transfer.receive(chunks, root)
    call.agree()
    for chunk in chunks:
        if is_first:
            transfer.await_next(root)
        if len(call.placement.local) > 1:
            call.run_local(_on_host(chunk.data_ptr(), len(chunk), 0))
    transfer.finish()


def _on_host(address: int, nbytes: int, local_root: int) -> Request:
    """From one rank of this host to the others."""
    request = Request(kind=Kind.BROADCAST, dtype=BYTES, root=local_root, count=nbytes)
    request.input = request.output = address or None
    return request
