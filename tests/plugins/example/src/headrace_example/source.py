"""A source: a text file to which lines are appended; each line is a row."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from headrace.change.connector import Connector
from headrace.change.event import (
    Batch,
    BeforeKind,
    Change,
    Column,
    Op,
    Position,
    Table,
    Transaction,
)
from headrace.errors import PositionLost, SourceUnavailable
from headrace.sources import Finding, Phase, Register, Removal, Status

MOST_BYTES = 1_000_000  # that are read at a time


class LinePosition(Position, frozen=True, gc=False, tag="lines"):
    """Where a change stands in the file; the log stores it with the change."""

    line: int  # counted from 1

    @property
    def commit(self) -> int:
        return self.line

    @property
    def own(self) -> int:
        return self.line


class Resume(msgspec.Struct, frozen=True):
    """What the log keeps for the source, to go on after a batch."""

    line: int = 0  # the last one that is in the log
    offset: int = 0  # where the next one begins, in bytes
    first_stop: int = 0  # where the file ended at the start: rows before it are READ


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A text file; its fields are its settings."""

    name: str
    path: str
    poll_seconds: float = 0.1

    connector: ClassVar[Connector] = Connector(name="lines", positions=(LinePosition,))

    @property
    def host(self) -> str:
        return ""

    @property
    def table(self) -> Table:
        columns = (Column("line", "bigint", key=True), Column("text", "text"))
        name = Path(self.path).stem
        return Table(self.name, "lines", self.path, "", "files", name, columns)

    def open(self, resume: bytes | None, register: Register) -> "LinesStream":
        return LinesStream(self, resume, register)

    def copy_again(self, resume: bytes | None, tables: Sequence[str]) -> bytes | None:
        return None  # from the first line

    def describe(self, resume: bytes | None) -> Status:
        known = msgspec.json.decode(resume, type=Resume) if resume else Resume()
        return Status(source=self.name, phase=Phase.STOPPED, position=f"line {known.line}")

    def check(self) -> list[Finding]:
        there = Path(self.path).is_file()
        detail = f"{self.path} is {'there' if there else 'not there'}"
        return [Finding("file", there, detail, "" if there else f"touch {self.path}")]

    def captured_tables(self) -> list[Table]:
        return [self.table]

    def remove(self, resume: bytes | None, *, dry_run: bool = False) -> list[Removal]:
        return []  # it puts nothing into the file


class LinesStream:
    """The file while it is read."""

    def __init__(self, source: Lines, resume: bytes | None, register: Register) -> None:
        self._source = source
        self._known = msgspec.json.decode(resume, type=Resume) if resume else None
        self._register = register
        self._closed = threading.Event()
        self._stored = self._known or Resume()

    def __iter__(self) -> Iterator[Batch]:
        try:
            file = open(self._source.path, "rb")  # noqa: SIM115
        except FileNotFoundError as error:
            raise SourceUnavailable(f"there is no file {self._source.path}") from error
        with file:
            end = file.seek(0, 2)
            known = self._known or Resume(first_stop=end)
            if end < known.offset:
                raise PositionLost(f"{self._source.path} is shorter than it was")
            table = self._register(self._source.table)
            file.seek(known.offset)
            while not self._closed.is_set():
                begin = file.tell()
                lines = [line for line in file.readlines(MOST_BYTES) if line.endswith(b"\n")]
                file.seek(begin + sum(map(len, lines)))  # an unfinished line comes later, whole
                if lines:
                    changes = self._changes(table, known, lines)
                    known = Resume(known.line + len(lines), file.tell(), known.first_stop)
                    yield Batch(changes, msgspec.json.encode(known))
                else:
                    self._closed.wait(self._source.poll_seconds)

    def _changes(self, table: Table, known: Resume, lines: list[bytes]) -> list[Change]:
        now = time.time_ns() // 1000
        changes, offset = [], known.offset
        for number, line in enumerate(lines, known.line + 1):
            row = {"line": number, "text": line.decode(errors="replace").rstrip("\n")}
            changes.append(
                Change(
                    op=Op.READ if offset < known.first_stop else Op.INSERT,
                    table=table,
                    key=b'{"line":%d}' % number,
                    before=None,
                    before_kind=BeforeKind.NONE,
                    after=msgspec.json.encode(row),
                    changed=None,
                    unchanged=(),
                    # Each line is a transaction of its own.
                    transaction=Transaction(str(number), commit_time=now, captured_at=now),
                    ordinal=1,
                    position=LinePosition(number),
                    last=True,
                )
            )
            offset += len(line)
        return changes

    def ack(self, resume: bytes) -> None:
        # Everything up to it is durable. A file has nothing to forget, so it is only shown.
        self._stored = msgspec.json.decode(resume, type=Resume)

    def status(self) -> Status:
        stored = self._stored
        phase = Phase.STREAMING if stored.offset >= stored.first_stop else Phase.SNAPSHOT
        return Status(source=self._source.name, phase=phase, position=f"line {stored.line}")

    def close(self) -> None:
        self._closed.set()
