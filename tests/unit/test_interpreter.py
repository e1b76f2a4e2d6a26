"""Tricks with the interpreter do what we take them to do: a new Python fails here first."""

from __future__ import annotations

import gc
import inspect

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
