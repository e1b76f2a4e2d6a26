"""The error that C++ code is about to raise, seen as soon as Python has it.

When a backward fails, autograd unwinds its C++ frames before it hands the error to Python. What is
destroyed on the way knows that there is an error, not which. So it asks the Python frame that
called autograd to say when it arrives there: the way debuggers look at a caller. Nothing of this
exists while all goes well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["when_raised_in"]


def when_raised_in(frame: FrameType, action: Callable[[BaseException], None]) -> None:
    """Call `action` with the next exception that arrives in a frame that is running, before its own
    handlers.
    """
    tracer, frame_tracer = sys.gettrace(), frame.f_trace

    def on_event(at: FrameType, event: str, argument: Any) -> Any:
        if event != "exception":
            return on_event
        frame.f_trace = frame_tracer
        sys.settrace(tracer)
        _, error, trace = argument
        action(error.with_traceback(trace))
        return frame_tracer

    frame.f_trace = on_event
    sys.settrace(tracer or _in_no_new_frame)


def _in_no_new_frame(frame: FrameType, event: str, argument: Any) -> None:
    return None
