"""Tricks with the interpreter do what we take them to do: a new Python fails here first."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys

from paceline import _interpreter as interpreter


def test_references_are_counted_exactly():
    thing = object()
    assert interpreter.reference_count(thing) == interpreter.REFERENCES_OF_ARGUMENT
    other = thing
    assert interpreter.reference_count(thing) == interpreter.REFERENCES_OF_ARGUMENT + 1
    del other


def outer(function):
    marker = "seen"
    assert marker
    return function()


def test_a_caller_is_found_by_name_with_its_locals():
    frame = outer(lambda: interpreter.find_caller("outer"))
    assert frame is not None
    assert frame.f_locals["marker"] == "seen"
    assert interpreter.find_caller("nobody is called so") is None


def test_a_warning_names_the_line_outside_of_packages():
    library = {"__name__": "some_library.part", "level": interpreter.stacklevel_outside}
    code = "def warn(): return level('some_library')\ndef function(): return warn()"
    exec(code, library)
    # 1 is the line in warn(), 2 the one in function(), 3 this one.
    assert library["function"]() == 3
    assert interpreter.stacklevel_outside("some_library") == 1


def test_collecting_is_off_inside_and_as_before_outside():
    with interpreter.without_collecting():
        assert not gc.isenabled()
        with interpreter.without_collecting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_functions_are_among_the_live_objects():
    def local() -> None: ...

    assert any(thing is local for thing in interpreter.live_objects())
    assert inspect.isfunction(local)


def test_what_is_frozen_is_not_collected():
    before = gc.get_freeze_count()
    interpreter.freeze_garbage()
    try:
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_children_get_the_options_of_this_interpreter():
    code = "from paceline._interpreter import interpreter_flags; print(*interpreter_flags())"
    command = [sys.executable, "-O", "-W", "ignore", "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"-O", "-Wignore"} <= set(child.stdout.split())
