"""Patterns of names."""

import time
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.change.glob import LONGEST_GLOB, Glob, matches
from tests.effort import times

# A range whose ends are in the wrong order means nothing here; fnmatch drops it before it reads on.
PIECES = st.sampled_from(["a", "b", "-", "]", "[", "!", "*", "?", "^", "\\", "&&", "[a-c]", "[!a]"])
PATTERNS = st.lists(PIECES, max_size=8).map("".join).filter(lambda text: "]-" not in text)


@given(PATTERNS, st.text("ab-][!^\\&c.\n", max_size=6))
@settings(max_examples=times(500, nightly=20_000), deadline=None)
def test_patterns_mean_what_they_mean_in_a_shell(pattern: str, text: str) -> None:
    assert matches(text, pattern) is fnmatchcase(text, pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("orders", "orders", True),
        ("orders", "Orders", False),
        ("", "", True),
        ("*", "", True),
        ("o*s", "orders", True),
        ("o*s*", "order", False),
        ("order?", "orders", True),
        ("order?", "order", False),
        ("[a-z]*", "orders", True),
        ("[!a-z]*", "orders", False),
        ("[]x]", "]", True),
        ("[", "[", True),
        ("[z-a]", "m", False),
        ("?" * 300, "ä" * 300, True),
    ],
)
def test_a_pattern_means_a_whole_name(pattern: str, text: str, expected: bool) -> None:
    assert matches(text, pattern) is expected


@pytest.mark.requirement("P-16")
@pytest.mark.parametrize(
    "pattern",
    ["[" * 60_000, "[" * 60_000 + "]", "[a-" * 20_000 + "]", "[!" * 30_000, "*?" * 30_000],
    ids=["open", "closed", "ranges", "negated", "stars"],
)
def test_a_long_pattern_is_read_in_linear_time(pattern: str) -> None:
    begun = time.process_time()
    Glob(pattern)
    assert time.process_time() - begun < 5  # each took minutes as a regular expression


@pytest.mark.requirement("P-16")
@pytest.mark.parametrize(
    "pattern",
    ["*a" * 100, "*" + "a" * 198 + "b", "*" + "?" * 198 + "b", "*[!b]" * 40, "*a?" * 66],
)
def test_a_name_is_matched_in_linear_time(pattern: str) -> None:
    assert len(pattern) <= LONGEST_GLOB
    name, times_longer = "a" * 20_000, 10
    glob = Glob(pattern)

    def seconds(text: str) -> float:
        begun = time.process_time()
        glob.matches(text)
        return time.process_time() - begun

    once = max(min(seconds(name) for _ in range(3)), 0.002)
    assert seconds(name * times_longer) < once * times_longer * 10
