"""Documented modules that have moved are still found by their old names."""

import importlib
import sys

import pytest

import headrace


@pytest.mark.parametrize(("old", "new"), headrace._MOVED.items())
def test_a_module_that_moved_is_found_by_its_old_name(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__name__ == new


def test_names_of_a_module_that_moved_are_the_same_objects() -> None:
    sys.modules.pop("headrace.event", None)
    with pytest.warns(DeprecationWarning, match="is now"):
        from headrace.event import Op  # type: ignore[import-not-found]  # noqa: PLC0415
    moved = importlib.import_module("headrace.change.event").Op

    assert Op is moved
