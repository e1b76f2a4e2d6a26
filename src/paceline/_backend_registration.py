"""Registers the `paceline` backend with torch.distributed, without importing torch.

Called by `import paceline` and, through an entry point in the group `torch.backends`, by `import
torch`: a program that does not import this package can use the backend too. So it has to be cheap,
and nothing that goes wrong in here may end the import.

If torch.distributed is loaded already, the backend is registered at once. If not, a finder on
`sys.meta_path` registers it when torch's module is imported, and removes itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # importlib.abc brings importlib.resources and tempfile along: finders and loaders need no base
    # class.
    import importlib.abc
    import importlib.machinery

__all__ = ["BACKEND_NAME", "register_backend"]

BACKEND_NAME = "paceline"
_C10D = "torch.distributed.distributed_c10d"


def register_backend() -> None:
    """Make `torch.distributed.init_process_group("paceline")` work, now or as soon as torch is
    imported.
    """
    module = sys.modules.get(_C10D)
    if module is not None and hasattr(module, "Backend"):
        _register_in(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_in(c10d: ModuleType) -> None:
    try:
        if BACKEND_NAME.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(
                BACKEND_NAME, _create_group, extended_api=True, devices=["cpu"]
            )
    except Exception as error:
        import logging

        logging.getLogger("paceline").warning(
            "the backend %s is not available: torch %s did not take it (%s: %s). Use another "
            "version of torch, or another backend.",
            BACKEND_NAME,
            getattr(sys.modules.get("torch"), "__version__", "of an unknown version"),
            type(error).__name__,
            error,
        )


def _create_group(options: Any, backend_options: Any) -> Any:
    from paceline.backend import create_group

    return create_group(options, backend_options)


class _AfterImport:
    """Registers the backend right after torch's own module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)  # type: ignore[assignment]  # a loader by its methods
        return spec


class _RegisteringLoader:
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register_in(module)

    def __getattr__(self, name: str) -> Any:  # get_source and friends, for tracebacks and inspect
        return getattr(self._inner, name)
