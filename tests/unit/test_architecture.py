"""The shape of the code: imports point downwards, public names are declared, the C ABI is its
header.
"""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "paceline"

# Lowest first. A module may import from its own layer's package and from lower layers only.
LAYERS = [
    ["_version"],
    ["errors", "_linux", "_malloc", "_interpreter", "_pytree", "_state_dict", "_torch_internals"],
    ["telemetry"],
    ["rank_env", "failure_channel"],
    [
        "_backend_registration"
    ],  # reaches up to `backend` inside a function, when torch asks for a group
    ["core"],
    ["backend"],
    ["data"],
    ["ddp", "dp"],
    ["integrations"],
    ["diagnostics"],
    ["launch"],
    ["checkpoint", "ray"],
    ["bench"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: pathlib.Path, *, top_level_only: bool) -> set[str]:
    """Modules of the package that a file imports, at its top level or anywhere."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    nodes = list(_run_at_import(tree)) if top_level_only else list(ast.walk(tree))
    known = modules()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in known else node.module for name in names)
    return {name for name in found if name in known and name != "paceline"}


def _run_at_import(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)


def test_every_part_of_the_package_has_a_layer():
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts - {"__main__"} == set(LEVEL)


@pytest.mark.parametrize("name", sorted(set(modules()) - {"paceline", "paceline.__main__"}))
def test_imports_point_downwards(name):
    part = name.split(".")[1]
    for target in imports(modules()[name], top_level_only=part == "_backend_registration"):
        other = target.split(".")[1]
        assert other == part or LEVEL[other] < LEVEL[part], (
            f"{name} imports {target}, which is not below it"
        )


def test_no_import_cycles():
    graph = {name: imports(path, top_level_only=True) for name, path in modules().items()}
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


@pytest.mark.parametrize("name", sorted(modules()))
def test_all_equals_the_public_names(name):
    """`__all__` lists what a module defines without an underscore; a package lists what it offers."""
    tree = ast.parse(modules()[name].read_text())
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
    public = {n for n in defined if not n.startswith("_")}
    # `_torch_internals` offers torch's names under its own, as a package does its modules'.
    is_package = modules()[name].name == "__init__.py" or name == "paceline._torch_internals"
    if declared is None:
        assert not public or name.endswith(("__main__", "_version")), (
            f"{name} has no __all__ but defines {public}"
        )
        return
    assert len(declared) == len(set(declared))
    if is_package:
        assert public <= set(declared)
    else:
        assert set(declared) <= defined, f"{name}: __all__ names what it does not define"
        hidden = public - set(declared)
        assert not hidden, f"{name}: public but not in __all__: {sorted(hidden)}"


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
