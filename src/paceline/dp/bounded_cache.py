"""A dict for what is remembered about calls."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["BoundedCache"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(dict[_Key, _Value]):
    """A dict that is emptied when it is full: shapes that change all the time fill no memory.

    Looking up is as fast as in any dict; entries are added with `add`.
    """

    LIMIT = 256

    def add(self, key: _Key, value: _Value) -> _Value:
        """Remember a value, and return it."""
        if len(self) >= self.LIMIT:
            self.clear()
        self[key] = value
        return value
