"""Patterns of names: `*`, `?` and `[a-z]`, as in a shell.

Anybody who may send a request may send a pattern. Reading one and matching a name take time in
proportion to their length, whatever they are; a regular expression promises neither.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

LONGEST_GLOB = 200  # characters of a pattern that comes from a client
MOST_GLOBS = 100  # patterns in a request

_PATTERNS_KEPT = 1024
_CHARACTERS_KEPT = 256


def matches(text: str, glob: str) -> bool:
    """Whether a pattern means the whole text; upper and lower case differ."""
    return _compiled(glob).matches(text)


class Glob:
    """A pattern as the states that a text passes through, all of them looked at together.

    State n: the first n tests have passed. A star before test n lets a text stay in state n.
    """

    def __init__(self, pattern: str) -> None:
        self._tests: list[_CharacterTest] = []
        self._stars = 0  # states, one bit each
        for test in _tests(pattern):
            if test is None:
                self._stars |= 1 << len(self._tests)
            else:
                self._tests.append(test)
        self._passing: dict[str, int] = {}  # by character: the tests that it passes

    def matches(self, text: str) -> bool:
        """Whether it means the whole text."""
        states = 1
        for character in text:
            passed = self._passing.get(character)
            if passed is None:
                passed = self._find_passing(character)
            states = (states & passed) << 1 | states & self._stars
            if not states:
                return False
        return bool(states >> len(self._tests))

    def _find_passing(self, character: str) -> int:
        if len(self._passing) >= _CHARACTERS_KEPT:
            self._passing.clear()
        passed = sum(1 << at for at, test in enumerate(self._tests) if test(character))
        self._passing[character] = passed
        return passed


_compiled = lru_cache(maxsize=_PATTERNS_KEPT)(Glob)

_CharacterTest = Callable[[str], bool]


def _tests(pattern: str) -> Iterator[_CharacterTest | None]:
    """What each character must be; None: any number of characters may stand here."""
    at, last_bracket = 0, pattern.rfind("]")
    while at < len(pattern):
        character = pattern[at]
        at += 1
        # A bracket directly after the opening one, or after its "!", is one of the characters.
        first = at + 1 if pattern.startswith("!", at) else at
        if character == "*":
            yield None
        elif character == "?":
            yield _any
        elif character == "[" and last_bracket > first:
            end = pattern.index("]", first + 1)
            yield _one_of(pattern[first:end], negated=first > at)
            at = end + 1
        else:
            yield character.__eq__


def _any(character: str) -> bool:
    return True


def _one_of(characters: str, *, negated: bool) -> _CharacterTest:
    singles, ranges, at = set(), [], 0
    while at < len(characters):
        if at + 2 < len(characters) and characters[at + 1] == "-":
            ranges.append((characters[at], characters[at + 2]))
            at += 3
        else:
            singles.add(characters[at])
            at += 1

    def test(character: str) -> bool:
        found = character in singles or any(low <= character <= high for low, high in ranges)
        return found is not negated

    return test
