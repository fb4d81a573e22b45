"""What lives by a key ends with it, also where the client takes nothing: one look for all."""

import asyncio
from collections.abc import Callable

from ..log.keys import Key

LOOK_SECONDS = 0.5  # between two looks at the keys of those who are connected

End = Callable[[], None]


class Live:
    """Who is connected with a key now; all of it on one event loop."""

    def __init__(self, valid: Callable[[Key], bool]) -> None:
        self._valid = valid
        self._ends: dict[str, set[End]] = {}
        self._keys: dict[str, Key] = {}
        self._looking: asyncio.TimerHandle | None = None

    def enter(self, key: Key, end: End) -> None:
        """Call `end`, at every look, from when the key has ended until `leave`."""
        self._ends.setdefault(key.id, set()).add(end)
        self._keys[key.id] = key
        if self._looking is None:
            self._look_later()

    def leave(self, key: Key, end: End) -> None:
        """It is over."""
        ends = self._ends[key.id]
        ends.discard(end)
        if not ends:
            del self._ends[key.id], self._keys[key.id]
        if not self._ends and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        # That every connection looks by itself would keep a core busy.
        self._look_later()
        ended = [id for id, key in self._keys.items() if not self._valid(key)]
        for end in [end for id in ended for end in self._ends[id]]:
            end()
