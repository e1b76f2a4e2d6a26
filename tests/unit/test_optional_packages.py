"""Modules named after a package need it, and say how to get it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_without_the_package_the_error_names_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"paceline.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'paceline\[{name}\]'"):
        importlib.import_module(f"paceline.{name}")
