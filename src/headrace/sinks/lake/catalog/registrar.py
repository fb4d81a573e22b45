"""Registration beside the stream: a thread that tries until the catalog has every table.

A catalog that is away never stops or slows a batch. What was offered to the catalog is remembered,
so a batch that changes no columns costs nothing here; after a restart each table is looked up once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ....errors import HeadraceError
from ....retry import Backoff
from ..deltalog import DeltaLog, Metadata
from ..storage import Folder
from .entry import CatalogEntry, TableCatalog, source_name

logger = logging.getLogger(__name__)

BACKOFF = Backoff(first=5.0, longest=300.0, jitter=0.2)
FINISH_SECONDS = 30.0  # that the end of `--once` waits for

_Shown = tuple[str, list[str], str | None]  # what a catalog can show of a table
_Entry = Callable[[], CatalogEntry | None]  # None: there is no table


class Registrar:
    """Keeps the entries of a catalog equal to a sink's tables."""

    def __init__(self, catalog: TableCatalog, sink: str) -> None:
        self._catalog = catalog
        self._sink = sink
        self._shown: dict[str, _Shown] = {}
        self._pending: dict[str, _Entry] = {}
        self._failed: dict[str, str] = {}
        self._changed = threading.Condition()
        self._reported = ""
        self._failures = 0  # rounds in a row in which something failed
        self._due = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, schema: str, table: str, folder: Folder, metadata: Metadata) -> None:
        """Register a table, unless the catalog has it with these columns and comments."""
        source = source_name(schema, table)
        shown = (metadata.schema_string, metadata.partition_columns, metadata.description)
        if self._shown.get(source) == shown:
            return
        self._shown[source] = shown
        name = self._catalog.name_of(schema, table)
        self._add(source, lambda: CatalogEntry.of(source, name, folder, metadata))

    def offer_stored(self, schema: str, table: str, folder: Folder) -> None:
        """Register a table that is there and may not change for long; it is read later."""
        source, name = source_name(schema, table), self._catalog.name_of(schema, table)

        def entry() -> CatalogEntry | None:
            found = _stored(folder)
            return None if found is None else CatalogEntry.of(source, name, folder, found)

        self._add(source, entry)

    def failure(self) -> str:
        """Which tables are not registered, and why; "": all are."""
        failed = dict(self._failed)
        if not failed:
            return ""
        table, reason = next(iter(failed.items()))
        others = f" (and {len(failed) - 1} other tables)" if len(failed) > 1 else ""
        return f"{table}{others} is not in the catalog as it is now: {reason}"

    def finish(self) -> None:
        """Wait until every table is registered or has failed: without an answer, it has."""
        deadline = time.monotonic() + FINISH_SECONDS
        with self._changed:
            while self._untried() and time.monotonic() < deadline:
                self._changed.wait(min(0.5, FINISH_SECONDS))
            if self._untried():
                reason = f"no answer within {FINISH_SECONDS:.0f} seconds"
                self._failed = {**dict.fromkeys(self._pending, reason), **self._failed}
        self._report()

    def close(self) -> None:
        """Register nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _untried(self) -> bool:
        return not self._closed and any(each not in self._failed for each in self._pending)

    def _add(self, source: str, entry: _Entry) -> None:
        with self._changed:
            self._pending[source] = entry
            self._failed.pop(source, None)
            self._due = 0.0
            self._changed.notify_all()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name=f"catalog of {self._sink}", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while self._wait():
            tried = dict(self._pending)
            for source, entry in tried.items():
                if self._closed:
                    return
                self._settle(source, entry, self._try(source, entry))
            self._report()
            with self._changed:
                self._failures = self._failures + 1 if self._failed else 0
                if self._failures and not self._untried():
                    self._due = time.monotonic() + BACKOFF.wait(self._failures)

    def _report(self) -> None:
        """Log what has changed, in one line for all tables."""
        before, self._reported = self._reported, self.failure()
        if self._reported and self._reported != before:
            logger.warning("sink=%s catalog=%s", self._sink, self._reported)
        elif before and not self._reported:
            logger.info("sink=%s catalog has all tables again", self._sink)

    def _wait(self) -> bool:
        """Until something is to be registered; False: the sink is closed."""
        with self._changed:
            while not self._closed:
                left = self._due - time.monotonic()
                if self._pending and left <= 0:
                    return True
                self._changed.wait(left if self._pending else None)
            return False

    def _try(self, source: str, entry: _Entry) -> str:
        """Register one table; returns why that failed, or ""."""
        try:
            wanted = entry()
            if wanted is not None and self._catalog.register(wanted):
                logger.info("sink=%s table=%s registered=%s", self._sink, source, wanted.name)
        except HeadraceError as error:
            return " ".join(error.explain().split())
        except Exception as error:  # noqa: BLE001 - the stream and the other tables go on
            return type(error).__name__  # its text may be of somebody else's making
        return ""

    def _settle(self, source: str, entry: _Entry, reason: str) -> None:
        with self._changed:
            if self._pending.get(source) is not entry:
                return  # a newer one waits
            if reason:
                self._failed[source] = reason
            else:
                del self._pending[source]
                self._failed.pop(source, None)
            self._changed.notify_all()


def _stored(folder: Folder) -> Metadata | None:
    """What a Delta table says of itself; None: there is none."""
    state = DeltaLog(folder).read()
    return None if state is None else state.metadata
