"""The writers of the demo's shop, each with a session and a thread."""

import random
import threading
from collections.abc import Callable
from uuid import UUID

from .database import MOST_ALTERATIONS, ShopDatabase, ShopSession, Values, weighted


class Shop:
    """Several writers that keep changing the shop."""

    def __init__(
        self, database: ShopDatabase, *, writers: int = 4, per_second: float = 10.0
    ) -> None:
        """Describe the work; `per_second` is how much each of the writers does."""
        self._database = database
        self._pause = 1 / per_second
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        works = [self._trade] * writers + [self._alter]
        self._threads = [
            threading.Thread(target=self._work, args=(work, number), name=f"shop-{number}")
            for number, work in enumerate(works)
        ]

    def start(self) -> None:
        """Open the shop."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close the shop: when this returns, nobody writes any more."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    @property
    def error(self) -> BaseException | None:
        """What ended a writer before it was stopped."""
        return self._error

    def _work(self, work: Callable[[ShopSession, random.Random], None], number: int) -> None:
        try:
            session = self._database.connect()
            try:
                work(session, random.Random(number))
            finally:
                session.close()
        except self._database.errors as error:
            self._error = error

    def _trade(self, session: ShopSession, chance: random.Random) -> None:
        actions, weights = weighted(self._database.actions)
        while not self._stopping.wait(chance.expovariate(1 / self._pause)):
            [action] = chance.choices(actions, weights)
            session.attempt(action, _values(chance))

    def _alter(self, session: ShopSession, chance: random.Random) -> None:
        number = 0
        while number < MOST_ALTERATIONS and not self._stopping.wait(1.5 + chance.random()):
            # Counted only when done: a column can be neither added nor dropped twice.
            number += session.alter(number)


def _values(chance: random.Random) -> Values:
    return {
        "lines": chance.randint(1, 4),
        "name": f"n{chance.randrange(10**9)}",
        "id": str(UUID(int=chance.getrandbits(128), version=4)),
    }
