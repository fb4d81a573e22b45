"""Sources that hide columns, captured into a log, and a search for what must not be in it."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.change.event import Batch
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase, Register, Source, Status, Stream
from headrace.sources.mysql.resume import MysqlResume
from headrace.sources.mysql.resume import decode as mysql_resume
from headrace.sources.redact import open_redacted
from headrace.transforms import Mask

MASK = Mask(Secret("a key of sixteen or more"))


class Redacting:
    """A source as the capturing process opens it, in this process."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def open(self, resume: bytes | None, register: Register) -> Stream:
        return open_redacted(self.source, resume, register)


@dataclass(frozen=True, slots=True)
class Mistaken:
    """A source with a mistake in it: its errors show a value."""

    secret: str
    exclude_columns: tuple[str, ...] = ()
    name: str = "shop"
    host: str = "here"
    opens: bool = True

    def open(self, resume: bytes | None, register: Register) -> Mistaken:
        del resume, register
        if not self.opens:
            self._fails()
        return self

    def __iter__(self) -> Iterator[Batch]:
        for run in (self._logs, self._ends_in_a_thread):
            run()
        yield Batch([], b"resume")
        self._fails()

    def _logs(self) -> None:
        try:
            self._fails()
        except ValueError:
            logging.getLogger("headrace.sources.test").exception("failed")

    def _ends_in_a_thread(self) -> None:
        thread = threading.Thread(target=self._fails)
        thread.start()
        thread.join()

    def _fails(self) -> None:
        raise ValueError(self.secret)

    def ack(self, resume: bytes) -> None: ...

    def status(self) -> Status:
        return Status(source=self.name, phase=Phase.STREAMING)

    def close(self) -> None: ...


def assert_nowhere(secrets: Iterable[str], log: Log, folder: Path, *texts: str) -> None:
    """No secret is in the log, in a file of the folder, or in these texts; whatever its encoding.

    RocksDB compresses what it has sorted, so the log is also read.
    """
    written = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    places = [*written, *_content(log), *(text.encode() for text in texts)]
    for secret in secrets:
        for form in _forms(secret.encode()):
            assert not any(form in place for place in places), (secret, form)


def _content(log: Log) -> Iterator[bytes]:
    """Everything that a log has: changes, tables and resume positions."""
    yield from map(msgspec.json.encode, log.read(0, limit=1 << 30))
    yield msgspec.json.encode(log.tables())
    for source in {table.source for table in log.tables()}:
        resume = log.resume(source) or b""
        yield resume
        if resume[:1] != b"{":
            found = mysql_resume(resume)
            assert isinstance(found, MysqlResume)
            yield repr((found, found.declared())).encode()


def _forms(secret: bytes) -> list[bytes]:
    """A secret as it is, in hexadecimal digits, and within base64 wherever it begins there."""
    within = [base64.b64encode(bytes(shift) + secret) for shift in range(3)]
    return [secret, secret.hex().encode(), *(each[4:-4] for each in within)]
