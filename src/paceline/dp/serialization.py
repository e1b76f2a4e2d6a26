"""Objects on their way between the main process and the workers it forked.

Classes and functions that pickle cannot find by name (local ones, lambdas, those of a notebook) are
referred to by address: a forked process has everything its parent had, at the same place. A worker
that was forked before the object existed raises `UnknownObject`; the main process then forks new
workers.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any, NamedTuple

from paceline._interpreter import live_objects
from paceline.errors import ConfigError

__all__ = ["ExceptionParts", "UnknownObject", "dump_exception", "dumps", "load_exception", "loads"]

_Reference = tuple[int, str]  # address, qualified name


class UnknownObject(Exception):
    """The object was created after this process was forked."""


class ExceptionParts(NamedTuple):
    """An exception that pickle cannot rebuild: its class may want other arguments than it keeps."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> ExceptionParts:
        """The parts of an exception, with the attributes that can be pickled."""
        attributes = {name: value for name, value in vars(error).items() if _can_be_pickled(value)}
        return cls(type(error), error.args, attributes)

    def rebuild(self) -> BaseException:
        """The exception, of its own class, without calling its `__init__`."""
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


def dump_exception(error: BaseException) -> bytes:
    """The exception itself, or its class, arguments and attributes, or empty if neither works."""
    for parts in (
        error,
        ExceptionParts.of(error),
        ExceptionParts(type(error), error.args, {}),
    ):
        try:
            data = dumps(parts)
            if type(load_exception(data)) is type(error):
                return data
        except Exception:
            continue
    return b""


def load_exception(data: bytes) -> BaseException:
    """Undo `dump_exception`, where it did not give up."""
    loaded: BaseException | ExceptionParts = loads(data)
    return loaded.rebuild() if isinstance(loaded, ExceptionParts) else loaded


def _can_be_pickled(value: Any) -> bool:
    try:
        loads(dumps(value))
    except Exception:
        return False
    return True


# Keeps what was referred to, and with it its address, alive.
_known_objects: dict[_Reference, Any] = {}


def dumps(value: Any) -> bytes:
    """Like pickle.dumps; for what only a fork can hand over, an address."""
    try:
        stream = io.BytesIO()
        _Pickler(stream, protocol=5).dump(value)
        return stream.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"DataParallel cannot send this to its workers: {error}. Pass tensors, containers and "
            "picklable objects; what cannot be pickled can be an attribute of the module, which "
            "workers inherit"
        ) from error


def loads(data: bytes | memoryview) -> Any:
    """Undo `dumps`, in this process or in one forked from it."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = _find  # type: ignore[method-assign]  # the documented way to set it
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> _Reference | None:
        if isinstance(value, type | types.FunctionType) and not _is_importable(value):
            reference = id(value), f"{value.__module__}.{value.__qualname__}"
            _known_objects[reference] = value
            return reference
        return None


def _is_importable(value: type | types.FunctionType) -> bool:
    if value.__module__ == "__main__":
        return False  # can be found by name in this process, but may be redefined in the other
    candidate: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        candidate = getattr(candidate, part, None)
    return candidate is value


def _find(reference: _Reference) -> Any:
    if reference not in _known_objects:
        address, name = reference
        for candidate in live_objects():
            if (
                id(candidate) == address
                and isinstance(candidate, type | types.FunctionType)
                and f"{candidate.__module__}.{candidate.__qualname__}" == name
            ):
                _known_objects[reference] = candidate
                break
        else:
            raise UnknownObject(name)
    return _known_objects[reference]
