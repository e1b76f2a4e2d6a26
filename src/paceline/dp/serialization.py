"""Objects on their way between the main process and workers it forked.

Classes and functions that pickle cannot find by name (local ones, lambdas, those of a notebook) are
referred to by address: a forked process has everything its parent had, at the same place. `Unknown`
is raised by a worker that was forked before the thing existed; the main process then forks anew.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
import types
from typing import Any, NamedTuple

from paceline.errors import ConfigError

__all__ = ["Bare", "Unknown", "dumps", "loads", "rebuilt"]


class Unknown(Exception):
    """The object came into being after this process was forked."""


class Bare(NamedTuple):
    """An exception that pickle cannot put together again: its class may want other arguments than
    it keeps.
    """

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Bare:
        """Its attributes as far as they can be handed over."""
        return cls(
            type(error),
            error.args,
            {name: value for name, value in vars(error).items() if _can_go(value)},
        )


def rebuilt(thing: Any) -> Any:
    """The exception, of its own class; its `__init__` is not called."""
    if not isinstance(thing, Bare):
        return thing
    error = thing.kind.__new__(thing.kind, *thing.args)
    error.args = thing.args
    vars(error).update(thing.attributes)
    return error


def _can_go(value: Any) -> bool:
    try:
        loads(dumps(value))
    except Exception:
        return False
    return True


_found: dict[tuple[int, str], Any] = {}


def dumps(thing: Any) -> bytes:
    """Like pickle.dumps; for what only fork can hand over, an address."""
    try:
        stream = io.BytesIO()
        _Pickler(stream, protocol=5).dump(thing)
        return stream.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"DataParallel cannot hand this to its workers: {error}. Pass tensors, containers and picklable objects; "
            "what cannot be pickled can be an attribute of the module, which workers inherit"
        ) from error


def loads(data: bytes | memoryview) -> Any:
    """The thing again."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = _find  # type: ignore[method-assign]  # the documented way to set it
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> tuple[int, str] | None:
        if isinstance(thing, type | types.FunctionType) and not _importable(thing):
            name = f"{thing.__module__}.{thing.__qualname__}"
            _found[id(thing), name] = thing  # keeps it, and its address, alive
            return id(thing), name
        return None


def _importable(thing: Any) -> bool:
    if thing.__module__ == "__main__":
        return False  # found by name in this process, but perhaps redefined in the other
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def _find(reference: tuple[int, str]) -> Any:
    if reference not in _found:
        address, name = reference
        for thing in gc.get_objects():
            if (
                id(thing) == address
                and isinstance(thing, type | types.FunctionType)
                and f"{thing.__module__}.{thing.__qualname__}" == name
            ):
                _found[reference] = thing
                break
        else:
            raise Unknown(name)
    return _found[reference]
