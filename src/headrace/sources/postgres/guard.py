"""Looks every second whether a table has lost its replica identity, whatever else goes on.

The flow of a source may wait for long: for a slot, which takes as long as the longest open
transaction, or for a log that cannot be written to. An application that drops a key meanwhile must
not wait with it, so this has a thread and a connection of its own.
"""

from __future__ import annotations

import logging
import threading

from ...errors import SourceError
from .catalog import Catalog
from .publications import Publications
from .settings import PostgresSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0  # it waits for a lock for a second at most


class IdentityGuard:
    """Moves tables whose UPDATE and DELETE fail to the second publication."""

    def __init__(self, source: PostgresSettings, lock: threading.Lock) -> None:
        """`lock` is that of the publications which the flow of the source alters."""
        self._source = source
        self._lock = lock
        self._catalog: Catalog | None = None
        self._publications: Publications | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="postgres-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                self._connected().guard()
            except SourceError as error:
                # The flow meets the same and reports it; or the next look succeeds.
                logger.debug("source=%s no look at identities: %s", self._source.name, error)
                self._let_go()
            except Exception:  # a bug of ours; tables must be watched all the same
                logger.exception("source=%s the look at identities failed", self._source.name)
                self._let_go()
        self._let_go()

    def _connected(self) -> Publications:
        if self._publications is None:
            self._catalog = Catalog(self._source.address.connect(), source=self._source.name)
            self._publications = Publications(self._catalog, self._source, self._lock)
        return self._publications

    def _let_go(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = self._publications = None
