"""The shape of the code: imports point downwards, public names are declared, the C ABI is its
header, and what needs care stands in one place.

Each rule is one test that reads the whole tree and lists every offender.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"

# Lowest first. A module may import from its own layer's package and from lower layers only.
LAYERS = [
    ["_version"],
    ["errors", "_linux", "_malloc", "_interpreter", "_state_dict", "_torch_internals"],
    ["_pytree"],
    ["telemetry"],
    ["rank_env", "failure_channel"],
    # Reaches up to `backend` inside a function, when torch asks for a group.
    ["_backend_registration"],
    ["core"],
    ["backend"],
    ["data"],
    ["ddp", "dp"],
    ["optim"],
    ["integrations"],
    ["diagnostics"],
    ["observe"],
    ["launch"],
    ["ray_workers"],
    ["ray_elastic"],
    ["checkpoint", "ray", "accelerate", "lightning"],
    ["training"],
    ["bench"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Fences: what may stand in one module only, where the reason for each use is written down.
TORCH_INTERNALS = "paceline._torch_internals"
INTERPRETER = "paceline._interpreter"
INTERPRETER_TRICKS = {
    "sys": {"_getframe", "_current_frames", "getrefcount", "setprofile", "settrace"},
    "gc": {"freeze", "get_objects", "get_referrers", "unfreeze"},
}

LINE_LENGTH = 100
# What a tool is told about a line does not count, as it does not for ruff.
PRAGMA = re.compile(r"  # (type: ignore|noqa).*$")
CODE_SUFFIXES = {".py", ".c", ".h", ".cpp"}


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def syntax_tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imports(name: str, *, top_level_only: bool) -> set[str]:
    """Modules of the package that a module imports, at its top level or anywhere."""
    tree = syntax_tree(name)
    found: set[str] = set()
    for node in _run_at_import(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules() else node.module for name in names)
    return {name for name in found if name in modules() and name != "paceline"}


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)


def assert_none(offenders: Iterable[str], rule: str) -> None:
    """Fails with every offender, so that one run shows all there is to do."""
    if lines := sorted(offenders):
        pytest.fail(f"{rule}:\n  " + "\n  ".join(lines), pytrace=False)


def every_line(offences: dict[str, list[str]]) -> Iterator[str]:
    """Offences of all files, which are lists by file."""
    return itertools.chain.from_iterable(offences.values())


def test_every_part_of_the_package_has_a_layer():
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts - {"__main__"} == set(LEVEL)


def test_imports_point_downwards():
    offenders = []
    for name in set(modules()) - {"paceline", "paceline.__main__"}:
        part = name.split(".")[1]
        for target in imports(name, top_level_only=part == "_backend_registration"):
            other = target.split(".")[1]
            if other != part and LEVEL[other] >= LEVEL[part]:
                offenders.append(f"{name} imports {target}")
    assert_none(offenders, "modules may only import from below themselves")


def test_no_import_cycles():
    graph = {name: imports(name, top_level_only=True) for name in modules()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in done:
            return
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        for target in graph[name]:
            # A package's __init__ gathers its own modules, which may name the package: that is no
            # cycle.
            if not name.startswith(target + "."):
                visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_a_module_name_exists_once():
    """So that a file is found, and talked about, by its name alone."""
    paths = collections.defaultdict(list)
    for path in modules().values():
        if path.stem not in ("__init__", "__main__"):
            paths[path.name].append(str(path.relative_to(PACKAGE)))
    doubled = {name: sorted(where) for name, where in paths.items() if len(where) > 1}
    assert_none(
        itertools.chain.from_iterable(doubled.values()), "file names that exist more than once"
    )


def _declared_and_defined(tree: ast.Module) -> tuple[list[str] | None, set[str]]:
    """`__all__`, if there is one, and the names that the module itself defines."""
    declared: list[str] | None = None
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id == "__all__":
                    declared = ast.literal_eval(node.value)
                elif isinstance(target, ast.Name):
                    defined.add(target.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
    return declared, defined


def _faults_of_all(name: str) -> Iterator[str]:
    declared, defined = _declared_and_defined(syntax_tree(name))
    public = {n for n in defined if not n.startswith("_")}
    if declared is None:
        if public and not name.endswith(("__main__", "_version")):
            yield f"{name} has no __all__ but defines {sorted(public)}"
        return
    if len(declared) != len(set(declared)):
        yield f"{name}: __all__ names something twice"
    if hidden := public - set(declared):
        yield f"{name}: public but not in __all__: {sorted(hidden)}"
    # `_torch_internals` offers torch's names under its own, as a package does its modules'.
    is_package = modules()[name].name == "__init__.py" or name == TORCH_INTERNALS
    if not is_package and (foreign := set(declared) - defined):
        yield f"{name}: __all__ names what it does not define: {sorted(foreign)}"


def test_all_equals_the_public_names():
    """`__all__` lists what a module defines without an underscore; a package what it offers."""
    assert_none(
        (fault for name in modules() for fault in _faults_of_all(name)), "__all__ is not right"
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _names_bound_to_torch(tree: ast.Module) -> set[str]:
    """Names that hold torch, one of its modules, or something imported from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(a.asname or "torch" for a in node.names if _is_torch(a.name))
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            names.update(a.asname or a.name for a in node.names)
    return names


def _root_name(node: ast.expr) -> str | None:
    """`a` of `a.b.c` and of `a.b().c[0]`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _has_private_part(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and _is_private(n.attr) for n in ast.walk(node))


def torch_internals_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each private name of torch.

    Sees imports, attributes of what was imported from torch, and `getattr` on it. What a variable
    holds is not known here: private methods of torch's objects go unseen.
    """
    from_torch = _names_bound_to_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name) and any(map(_is_private, alias.name.split("."))):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            module = node.module or ""
            for alias in node.names:
                if any(map(_is_private, (*module.split("."), alias.name))):
                    yield node.lineno, f"from {module} import {alias.name}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _root_name(node) in from_torch and not _has_private_part(node.value):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            holder, attribute = node.args[:2]
            name = attribute.value if isinstance(attribute, ast.Constant) else ""
            if _is_private(name) and _root_name(holder) in from_torch:
                yield node.lineno, ast.unparse(node)


def interpreter_tricks_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each reach into the interpreter's own workings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.lineno, "def __del__"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in INTERPRETER_TRICKS.get(node.value.id, ()):
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in INTERPRETER_TRICKS.get(node.module or "", ()):
                    yield node.lineno, f"from {node.module} import {alias.name}"


def offences_outside(home: str, find) -> dict[str, list[str]]:
    """What `find` yields for the syntax trees of all modules but one, by file."""
    offences = {}
    for name in set(modules()) - {home}:
        path = str(modules()[name].relative_to(PACKAGE))
        offences[path] = [f"{path}:{line}: {text}" for line, text in find(syntax_tree(name))]
    return offences


def test_private_names_of_torch_are_in_one_module():
    offences = offences_outside(TORCH_INTERNALS, torch_internals_used)
    rule = "private names of torch outside _torch_internals.py"
    assert_none(every_line(offences), rule)


def test_interpreter_tricks_are_in_one_module():
    offences = offences_outside(INTERPRETER, interpreter_tricks_used)
    rule = "interpreter tricks outside _interpreter.py"
    assert_none(every_line(offences), rule)


def test_the_fences_see_what_they_should():
    seen = torch_internals_used(
        ast.parse(
            "import torch, torch._dynamo\n"
            "import torch.distributed as dist\n"
            "from torch._C import Node\n"
            "from torch.utils import _pytree\n"
            "torch._C.Graph\n"
            "dist.new_group()._get_backend\n"
            "getattr(torch, '_foreach_add')\n"
            "torch.nn.Module.__init__\n"
            "self._own, paceline._linux\n"
        )
    )
    assert sorted(line for line, _ in seen) == [1, 3, 4, 5, 6, 7]
    seen = interpreter_tricks_used(
        ast.parse(
            "from sys import getrefcount\n"
            "sys._getframe(1)\n"
            "gc.get_objects()\n"
            "class A:\n"
            "    def __del__(self): pass\n"
            "gc.collect(), sys.exit()\n"
        )
    )
    assert sorted(line for line, _ in seen) == [1, 2, 3, 5]


def test_no_line_is_too_long():
    """Python, C and C++ alike; ruff looks at Python alone."""
    offences = collections.defaultdict(list)
    for folder in ("src", "csrc", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in CODE_SUFFIXES:
                continue
            name = str(path.relative_to(ROOT))
            for number, line in enumerate(path.read_text().splitlines(), 1):
                columns = len(PRAGMA.sub("", line))
                if columns > LINE_LENGTH:
                    offences[name].append(f"{name}:{number}: {columns} columns")
    assert_none(
        itertools.chain.from_iterable(offences.values()), f"lines over {LINE_LENGTH} columns"
    )


def test_every_public_name_resolves():
    import paceline

    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


def test_importing_paceline_does_not_import_torch():
    code = "import paceline, paceline.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("order", ["paceline, torch.distributed", "torch.distributed, paceline"])
def test_the_backend_is_registered_whichever_is_imported_first(order):
    code = f"import {order}; assert 'PACELINE' in torch.distributed.Backend._plugins"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_exported_symbols_equal_the_header():
    library = PACKAGE / "core" / "libpaceline_core.so"
    if not library.exists():
        pytest.skip("the native core is not built here")
    header = (ROOT / "csrc" / "include" / "paceline_core.h").read_text()
    declared = set(re.findall(r"PLC_API[^;(]*?\b(plc_\w+)\s*\(", header))
    table = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1].split("@")[0] for line in table.stdout.splitlines()}
    assert exported == declared
