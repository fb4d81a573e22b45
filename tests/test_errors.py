"""The tree of errors is the one that its page draws, and every error can travel."""

import pickle
from collections.abc import Iterator

import pytest

from headrace import errors
from headrace.errors import HeadraceError


def _tree(kind: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
    yield kind
    for child in kind.__subclasses__():
        # Others may derive errors of their own; the page draws the package's.
        if child.__module__ == errors.__name__:
            yield from _tree(child)


ERRORS = list(_tree(HeadraceError))


def test_the_page_draws_every_error_below_its_parent() -> None:
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip(" │├└─").partition(" ")[0]
        if hasattr(errors, name):
            depth = line.index(name) // 4
            drawn[name] = above.get(depth - 1, "Exception")
            above[depth] = name
    assert drawn == {kind.__name__: kind.__mro__[1].__name__ for kind in ERRORS}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_hint(kind: type[HeadraceError]) -> None:
    error = kind("what went wrong", hint="what to do")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.hint) == ("what went wrong", "what to do")


def test_an_error_explains_itself_with_its_hint_on_a_line_of_its_own() -> None:
    assert errors.LogInUse("taken").explain() == f"taken\n{errors.LogInUse.hint}"
    assert errors.LogInUse("taken", hint="wait").explain() == "taken\nwait"
    assert HeadraceError("broken").explain() == "broken"


def test_only_what_does_not_answer_is_tried_again() -> None:
    assert {kind for kind in ERRORS if kind.retry} == {
        errors.SourceUnavailable,
        errors.ServerAbsent,
        errors.ServerBusy,
        errors.LogUnreachable,
        errors.CheckpointUnavailable,
        errors.SinkUnavailable,
        errors.TableMoved,
        errors.WorkerLate,
    }
