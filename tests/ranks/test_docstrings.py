"""Every public name says what it takes and gives, and shows it in an example that runs."""

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import re
import textwrap
import traceback

import torch

import paceline
import paceline.diagnostics
from tests.harness import run_ranks

PACKAGE = pathlib.Path(paceline.__file__).parent
MODULES = (paceline, paceline.optim, paceline.diagnostics, paceline.ray)
# Need a package that is not installed everywhere: their documentation is read from the source.
OF_OTHER_PACKAGES = ("accelerate.py", "lightning.py")
NOT_RUN = {"paceline.ray.launch"}  # starts a cluster; tests of its own do
EXAMPLE = re.compile(r"^Example:\n    ```python\n(.*?)^    ```", re.DOTALL | re.MULTILINE)


def public_names():
    """Names and the classes or functions behind them, each once."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(value, f"{module.__name__}.{name}")
    return {name: value for value, name in found.items()}


def faults_of(name, value):
    text = inspect.getdoc(value) or ""
    if not EXAMPLE.search(text):
        yield f"{name}: no example"
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    described = re.search(r"^Args.*?:\n(.*?)(?=^\S|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    for parameter in own_parameters(value):
        if described is None or not re.search(rf"\b{parameter}\b.*:", described[1]):
            yield f"{name}: nothing about its argument {parameter}"
    gives_nothing = inspect.signature(value).return_annotation in {None, "None"}
    if inspect.isfunction(value) and not gives_nothing and "\nReturns:\n" not in text:
        yield f"{name}: nothing about what it returns"
    if inspect.isfunction(value):
        yield from unnamed_errors(name, value, text)
    else:
        yield from faults_of_methods(name, value)


def own_parameters(value):
    """Those that torch's class of the same name does not have; what it means by the others is in
    its documentation. Not all of them are there in the oldest torch.
    """
    spots = (torch.nn, torch.nn.parallel, torch.optim, torch.utils.data)
    stock = next(
        (getattr(spot, value.__name__) for spot in spots if hasattr(spot, value.__name__)), None
    )
    theirs = {} if stock is None else inspect.signature(stock).parameters
    for parameter in inspect.signature(value).parameters.values():
        is_collected = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        may_be_torchs = stock is not None and parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.name not in theirs and not is_collected and not may_be_torchs:
            yield parameter.name


def faults_of_methods(name, cls):
    for method, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        text = inspect.getdoc(getattr(cls, method)) or ""
        if not text:
            yield f"{name}.{method}: not described"
        yield from unnamed_errors(f"{name}.{method}", function, text)


def unnamed_errors(name, function, text):
    """Errors that it raises itself; those of what it calls are a matter of judgement."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = ast.unparse(node.exc.func)
            if error != "NotImplementedError" and not re.search(rf"\b{error}\b", text):
                yield f"{name}: nothing about {error}"


def test_every_public_name_is_described():
    faults = [fault for name, value in public_names().items() for fault in faults_of(name, value)]
    for path in OF_OTHER_PACKAGES:
        for node in ast.parse((PACKAGE / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not EXAMPLE.search(ast.get_docstring(node) or ""):
                faults.append(f"{path}: {node.name}: no example")
    assert not faults


def names_of_examples():
    """What an example may use without making it."""
    model = torch.nn.Linear(8, 1)
    dataset = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    return {
        "os": os,
        "torch": torch,
        "paceline": paceline,
        "x": torch.randn(4, 8),
        "dataset": dataset,
        "loader": paceline.DataLoader(dataset, batch_size=16),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "train": lambda: model(torch.randn(4, 8)).sum().backward(),
    }


def run_examples(rank, world, directory, examples):
    os.chdir(directory)
    failures = []
    for name, code in examples.items():
        if "init_process_group(" not in code:
            paceline.init_process_group(quiet=True)
        try:
            exec(compile(code, name, "exec"), names_of_examples())
        except Exception:
            failures.append(f"{name}\n{code}\n{traceback.format_exc()}")
        paceline.destroy_process_group()
    return failures


def test_every_example_runs(tmp_path):
    examples = {
        name: textwrap.dedent(EXAMPLE.search(inspect.getdoc(value))[1])
        for name, value in public_names().items()
        if name not in NOT_RUN
    }
    (failures,) = run_ranks(1, run_examples, str(tmp_path), examples, timeout=200)
    assert not failures, "\n".join(failures)
