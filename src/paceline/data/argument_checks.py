"""What arguments must be, with errors that name the argument and what was given.

A size that is text or has a fraction would otherwise fail far from the call, or not at all.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from paceline.errors import ConfigError

__all__ = ["check_flag", "check_whole_number"]


def check_whole_number(name: str, value: Any) -> int:
    """The value as an int, if it is a whole number of any kind, NumPy's and torch's included;
    raises `ConfigError` otherwise. True and False are none.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, found {value!r}") from None


def check_flag(name: str, value: Any) -> bool:
    """The value as a bool, if it is one or 0 or 1; raises `ConfigError` otherwise. Other objects
    have a truth value as well, but "no" is true.
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, found {value!r}")
