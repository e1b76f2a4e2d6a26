"""Programs that import by a former name go on working, and learn the new one."""

from __future__ import annotations

import pytest

from paceline import diagnostics


def test_what_observe_offered_comes_from_diagnostics():
    with pytest.warns(DeprecationWarning, match=r"paceline\.diagnostics: import Progress"):
        from paceline.observe import Progress
    assert Progress is diagnostics.Progress


def test_a_name_it_never_had_is_refused():
    from paceline import observe

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = observe.nothing
