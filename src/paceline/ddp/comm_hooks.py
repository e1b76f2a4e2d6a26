"""Communication hooks: a caller's own way of averaging, with the bucket object torch's hooks are
written for.

A `HookSpec` is what the caller registered, and can be pickled as far as the caller's own hook can;
a `CommHook` is that hook at work in one reducer. Every new reducer gets one from the same spec.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline._torch_internals import (
    BuiltinCommHookType,
    FutureBase,
    GradBucket,
    apply_optimizer_hook,
)
from paceline.ddp.buckets import Bucket, DenseBucket, SparseBucket
from paceline.ddp.group_calls import all_reduce
from paceline.errors import ConfigError

__all__ = ["CommHook", "Hook", "HookBucket", "HookSpec", "builtin_hook", "check_hook"]

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class HookBucket:
    """What a hook sees of a bucket: the methods of `torch.distributed.GradBucket`, which Python
    cannot create.
    """

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        if isinstance(bucket, DenseBucket):
            self._buffer = bucket.wire()
        else:
            assert isinstance(bucket, SparseBucket)
            assert bucket.value is not None
            self._buffer = bucket.value

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of the buffer, so that a hook may write them."""
        if not isinstance(self._bucket, DenseBucket):
            return [self._buffer]
        bucket = self._bucket
        return [
            self._buffer[start : start + length].view(parameter.shape)
            for start, length, parameter in zip(
                bucket.offsets, bucket.lengths, bucket.parameters, strict=True
            )
        ]


@dataclasses.dataclass(frozen=True)
class HookSpec:
    """A registered hook: a caller's own, one of torch's built-in two, or the optimizer that torch
    runs inside backward.
    """

    name: str
    state: Any = None
    hook: Hook | None = None
    builtin: str | None = None  # the name of a BuiltinCommHookType, which cannot be pickled
    steps_optimizer: bool = False

    @classmethod
    def of_caller(cls, state: Any, hook: Hook) -> HookSpec:
        return cls(getattr(hook, "__qualname__", type(hook).__qualname__), state, hook)

    @classmethod
    def of_builtin(cls, kind: BuiltinCommHookType) -> HookSpec:
        if not isinstance(kind, BuiltinCommHookType):
            raise TypeError(f"a built-in hook is a BuiltinCommHookType, got {kind!r}")
        return cls(str(kind), builtin=kind.name)

    @classmethod
    def of_optimizer(cls) -> HookSpec:
        return cls("optimizer in backward", steps_optimizer=True)

    def create(
        self, model: torch.nn.Module, group: dist.ProcessGroup, *, gradients_are_views: bool
    ) -> CommHook:
        """The hook for a new reducer of `model`, a DistributedDataParallel."""
        if self.builtin is not None:
            kind = getattr(BuiltinCommHookType, self.builtin)
            return CommHook(None, builtin_hook(kind, group))
        if self.steps_optimizer:
            hook = apply_optimizer_hook(gradients_are_views)
            return CommHook(weakref.ref(model), hook, steps_optimizer=True)
        assert self.hook is not None
        return CommHook(self.state, self.hook)


class CommHook:
    """A hook at work, and the futures it owes."""

    def __init__(self, state: Any, hook: Hook, *, steps_optimizer: bool = False) -> None:
        self._state, self._hook = state, hook
        # The hook has stepped and cleared the gradients when it has finished.
        self.steps_optimizer = steps_optimizer
        self._owed: list[tuple[torch.futures.Future[Any], Bucket]] = []

    def start(self, bucket: Bucket, *, is_last: bool) -> None:
        future = self._hook(self._state, HookBucket(bucket, is_last))
        if not isinstance(future, FutureBase):
            raise ConfigError(
                f"DistributedDataParallel's communication hook "
                f"{getattr(self._hook, '__name__', self._hook)!r}: the callback must return a "
                f"torch.futures.Future object, but got {type(future).__name__}"
            )
        self._owed.append((future, bucket))

    def finish(self) -> None:
        """Wait for all futures and put what they hold into the buckets."""
        owed, self._owed = self._owed, []
        for future, bucket in owed:
            result = future.wait()
            if isinstance(result, list | tuple):
                (result,) = result
            if isinstance(bucket, DenseBucket):
                if bucket.flat.is_complex() and not result.is_complex():
                    result = torch.view_as_complex(result.view(*bucket.flat.shape, 2))
                bucket.replace(result)
            elif isinstance(bucket, SparseBucket):
                bucket.value = result


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a hook, with torch's types of error."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None:
        raise ConfigError(f"a communication hook takes (state, bucket), this one {signature}")
    if bucket.annotation not in (inspect.Parameter.empty, GradBucket, "dist.GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"a communication hook takes (state, bucket), this one {signature}"
        ) from error
    expected = (
        inspect.Signature.empty,
        torch.futures.Future[torch.Tensor],
        "torch.futures.Future[torch.Tensor]",
    )
    if signature.return_annotation not in expected:
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def builtin_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> Hook:
    """Torch's two built-in hooks."""
    world = group.size()

    def allreduce(_: Any, bucket: Any) -> torch.futures.Future[Any]:
        return all_reduce(group, bucket.buffer().div_(world)).get_future()

    def fp16_compress(_: Any, bucket: Any) -> torch.futures.Future[Any]:
        small = bucket.buffer().to(torch.float16).div_(world)
        future = all_reduce(group, small).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    if kind == BuiltinCommHookType.ALLREDUCE:
        return allreduce
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return fp16_compress
    raise ConfigError(f"unknown built-in communication hook {kind}")
