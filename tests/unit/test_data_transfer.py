"""Batches on their way to an accelerator: one ahead, waited for, and not freed too early.

The device here records the calls it gets; `tests/devices` runs the same on devices with streams.
"""

from __future__ import annotations

import collections
import dataclasses
import types

import torch

from paceline._pytree import tensors_in
from paceline.data import device_prefetch


class RecordingStream:
    """Logs what is asked of a stream."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.log.append(f"leave {self.name}")

    def record_event(self):
        self.log.append(f"event on {self.name}")
        return f"event {sum(entry.startswith('event') for entry in self.log)}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class Batch(torch.Tensor):
    """A tensor that logs what is done to it, and claims to be on the device."""

    log: list[str]
    number: int
    device = torch.device("cuda", 0)

    def to(self, device, non_blocking):
        self.log.append(f"copy {self.number} ahead={non_blocking}")
        return self

    def record_stream(self, stream):
        self.log.append(f"{stream.name} uses {self.number}")


def batch(log, number):
    tensor = torch.zeros(1).as_subclass(Batch)
    tensor.log, tensor.number = log, number
    return tensor


def test_the_next_copy_is_under_way_when_a_batch_is_yielded(monkeypatch):
    log: list[str] = []
    device = torch.device("cuda", 0)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: RecordingStream(log, "compute")
    )
    monkeypatch.setattr(torch, "Stream", lambda device: RecordingStream(log, "copies"))
    for (received,) in device_prefetch.prefetch_to_device(
        ([batch(log, number)] for number in range(3)), device
    ):
        log.append(f"step {received.number}")

    def copied(number):
        return ["enter copies", f"copy {number} ahead=True", "event on copies", "leave copies"]

    def used(number):
        return [f"compute waits for event {number + 1}", f"compute uses {number}", f"step {number}"]

    assert log == copied(0) + copied(1) + used(0) + copied(2) + used(1) + used(2)


def test_auto_is_the_rank_s_current_device(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert device_prefetch.resolve_device("auto") == torch.device("cuda", 3)
    assert device_prefetch.is_accelerator(torch.device("cuda", 1))
    assert not device_prefetch.is_accelerator(torch.device("cpu"))


def test_every_kind_of_container_is_moved():
    class Samples(list):
        pass

    @dataclasses.dataclass
    class Fields:
        x: torch.Tensor
        name: str

    tensor = torch.ones(2)
    batch = {
        "dict": {"a": tensor},
        "ordered": collections.OrderedDict(a=tensor),
        "mapping": types.MappingProxyType({"a": [tensor]}),
        "list of its own kind": Samples([tensor]),
        "dataclass": Fields(tensor, "text"),
        "packed": torch.nn.utils.rnn.pack_sequence([tensor]),
        "text": "text",
    }
    (moved,) = device_prefetch.prefetch_to_device([batch], torch.device("meta"))
    assert {t.device.type for t in tensors_in({**moved, "packed": moved["packed"].data})} == {
        "meta"
    }
    assert {name: type(part) for name, part in moved.items()} == {
        **{name: type(part) for name, part in batch.items()},
        "mapping": dict,
    }
    assert (moved["dataclass"].name, moved["text"]) == ("text", "text")
