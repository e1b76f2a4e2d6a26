"""The options of one call on a group, however torch's calling conventions pass them.

torch reaches a group's methods in three ways: its Python front passes an options object
(`AllreduceOptions`), its own bindings have short forms with keywords (`op=`, `root=`, `timeout=`),
and the same short forms take the operation or the root as a positional argument in the place of the
options. `parse_options` reads all of them once; `torch_options` makes the options object that a
backend of another device expects.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from paceline.backend.engine import SUM, Reduction
from paceline.backend.work import timeout_to_ns
from paceline.core.dtypes import Op

__all__ = ["REDUCTIONS", "CallOptions", "TorchOptions", "parse_options", "torch_options"]

# One of torch's options objects, or what the short forms pass in its place: an operation or a root.
# Their common attributes are declared nowhere.
TorchOptions: TypeAlias = Any

REDUCTIONS = {code: Reduction(code) for code in range(Op.PREMUL_SUM)}

_Options = TypeVar("_Options")


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call was asked to do. `wait`: run to the end before returning."""

    wait: bool
    timeout_ns: int
    reduction: Reduction = SUM
    root: int = 0


def parse_options(
    opts: TorchOptions,
    default_timeout_ns: int,
    *,
    op: Any = None,
    root: int | None = None,
    timeout: timedelta | None = None,
) -> CallOptions:
    """The options of a call, given as torch's object or as the arguments of a short form.

    A call in a short form returns a `Work` to wait for; one with an options object says whether it
    is asynchronous.
    """
    if opts is not None and hasattr(opts, "asyncOp"):
        chosen = getattr(opts, "reduceOp", None)
        return CallOptions(
            wait=not opts.asyncOp,
            timeout_ns=_limit(opts.timeout, default_timeout_ns),
            reduction=SUM if chosen is None else _reduction(chosen),
            root=getattr(opts, "rootRank", 0),
        )
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    return CallOptions(
        wait=False,
        timeout_ns=_limit(timeout, default_timeout_ns),
        reduction=SUM if op is None else _reduction(op),
        root=root or 0,
    )


def torch_options(
    options: _Options,
    opts: TorchOptions,
    *,
    op: Any = None,
    root: int | None = None,
    timeout: timedelta | None = None,
) -> _Options:
    """torch's own object for the same call: the one given, or `options`, new, filled in."""
    if opts is not None and hasattr(opts, "asyncOp"):
        given: _Options = opts
        return given
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    fields = {"reduceOp": op, "rootRank": root, "timeout": timeout}
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _limit(timeout: timedelta | None, default_timeout_ns: int) -> int:
    ns = timeout_to_ns(timeout)
    return ns if ns > 0 else default_timeout_ns


def _reduction(op: Any) -> Reduction:
    code = int(getattr(op, "op", op))
    return REDUCTIONS[code] if code != Op.PREMUL_SUM else Reduction(code, op.factor)
