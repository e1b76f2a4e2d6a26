"""These tests need packages of an extra of their own, which `make test-integrations` installs."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]
