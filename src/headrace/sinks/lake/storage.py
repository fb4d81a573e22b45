"""Files of a table: Parquet under one folder, on any storage that delta-rs reaches."""

import errno
import os
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler

from ...errors import SinkUnavailable
from ...plugins import Finding
from .disk import check_folder, sync_names
from .objects import Objects, objects
from .refusal import refusal

LONGEST_BOUND = 64  # characters; a longer smallest or largest text is left out of the statistics
LONGEST_NAME = 200  # of a folder
OWN_FOLDER = "_headrace"
# Times that can be written in ISO 8601: the first and the last millisecond of the years 1 to 9999.
_EARLIEST, _LATEST = -62_135_596_800_000_000, 253_402_300_799_999_000  # microseconds since 1970
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_DAY, _LAST_DAY = (each.toordinal() - _EPOCH_DAY for each in (date.min, date.max))
# For a probe: delta-rs would try for minutes.
_IMPATIENT = {"connect_timeout": "5s", "timeout": "15s", "max_retries": "1", "retry_timeout": "10s"}
_DICTIONARY_ROWS = 1000
_DICTIONARY_SHARE = 0.2

# A decimal's exact digits: a bound that was rounded would hide rows.
_to_json = msgspec.json.Encoder(decimal_format="number").encode


class Added(msgspec.Struct, frozen=True):
    """A file that a task has written."""

    path: str
    size: int
    rows: int
    written_at: int  # milliseconds since 1970
    statistics: str
    partition: dict[str, str | None] = {}


def is_local(path: str) -> bool:
    """Whether a path is on a machine's own disk, and not the address of a storage.

    >>> is_local("lake"), is_local("file:///lake"), is_local("s3://lake")
    (True, True, False)
    """
    return "://" not in path or path.startswith("file://")


@dataclass(frozen=True)
class Folder:
    """A folder of a table's files; can be sent to Spark's tasks."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, path: str, options: Mapping[str, str]) -> "Folder":
        """The folder at a path or an address such as s3://bucket/lake."""
        # A task runs in another folder than the driver.
        return cls(path.rstrip("/") if "://" in path else os.path.abspath(path), dict(options))

    def within(self, *names: str) -> "Folder":
        """A folder below this one."""
        return Folder("/".join((self.uri, *map(folder_name, names))), self.options)

    @cached_property
    def files(self) -> pyarrow.fs.FileSystem:
        """The storage, paths being relative to the folder."""
        if "://" not in self.uri:
            os.makedirs(self.uri, exist_ok=True)
        return pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.uri, dict(self.options)))

    @cached_property
    def objects(self) -> Objects:
        """The storage as one of small files."""
        return objects(self.uri, self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "options": self.options}

    @contextmanager
    def open(self, path: str) -> Iterator[pq.ParquetFile]:
        """A file, to read parts of it."""
        # Spark's own times (INT96) as nanoseconds would end in the year 2262.
        with (
            self.reached(path),
            pq.ParquetFile(path, filesystem=self.files, coerce_int96_timestamp_unit="us") as file,
        ):
            yield file

    def read(self, path: str, columns: list[str] | None = None) -> pa.Table:
        """A file's columns; those that it does not have are left out."""
        with self.open(path) as file:
            if columns is not None:
                there = set(file.schema_arrow.names)
                columns = [name for name in columns if name in there]
            return file.read(columns=columns, use_threads=False)

    def count(self, path: str) -> int:
        """How many rows a file has."""
        with self.reached(path), pq.ParquetFile(path, filesystem=self.files) as file:
            return int(file.metadata.num_rows)

    def write(
        self,
        rows: pa.Table,
        name: str,
        partition: dict[str, str | None],
        *,
        group_rows: int | None = None,
    ) -> Added:
        """A new file, in row groups; nobody knows of it until it is committed."""
        path = f"{_subfolder(partition)}{name}-{uuid.uuid4().hex}.parquet"
        dictionaries = repetitive(rows)
        with self.reached(path):
            with self.files.open_output_stream(path) as stream:
                pq.write_table(
                    rows,
                    stream,
                    row_group_size=group_rows,
                    compression="zstd",
                    use_dictionary=dictionaries,
                    version="2.6",
                )
            size = self.files.get_file_info(path).size
            if "://" not in self.uri:
                self._sync(path)
        now = time.time_ns() // 1_000_000
        return Added(path, size, rows.num_rows, now, statistics(rows), partition)

    def _sync(self, path: str) -> None:
        """Make sure that a file is on disk before a commit says so."""
        file = Path(self.uri, path)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        for folder in file.parents[: path.count("/") + 1]:
            sync_names(folder)

    def read_bytes(self, path: str, start: int, length: int) -> bytes:
        """A piece of a file."""
        with self.reached(path):
            found = self.objects.read(path, start, length)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return found

    def write_bytes(self, path: str, content: bytes) -> None:
        """A file that is durable afterwards."""
        with self.reached(path):
            self.objects.write(path, content)

    def failure(self, what: str, error: BaseException) -> SinkUnavailable:
        """The storage's failure, in its own words; it may be there again later."""
        return SinkUnavailable(f"{self.uri}: {refusal(error, self.options)}; {what}")

    @contextmanager
    def reached(self, path: str) -> Iterator[None]:
        """Say of a storage that fails that it may be there again later."""
        try:
            yield
        except OSError as error:
            raise self.failure(f"{path} cannot be read or written", error) from error

    def check(self, name: str) -> Finding:
        """Whether it can be written, listed and deleted from: by doing that with a probe."""
        if "://" not in self.uri:
            return check_folder(name, Path(self.uri))
        storage = Folder(self.uri, {**_IMPATIENT, **self.options})
        probe = f"{OWN_FOLDER}/probe-{uuid.uuid4().hex}"
        try:
            storage.write_text(probe, "headrace check")
            storage.files.get_file_info(pyarrow.fs.FileSelector(OWN_FOLDER, allow_not_found=True))
            storage.files.delete_file(probe)
        except Exception as error:  # noqa: BLE001 - delta-rs has errors of several kinds
            fix = "Check the sink's path and storage, and that they permit put, list and delete."
            detail = f"{self.uri}: {refusal(error, self.options)}"
            return Finding(name, ok=False, detail=detail, fix=fix)
        detail = f"{self.uri} can be written, listed and deleted from"
        return Finding(name, ok=True, detail=detail)

    def read_text(self, path: str) -> str | None:
        """A small file; None: there is none."""
        with self.reached(path):
            content = self.objects.read(path)
        return None if content is None else content.decode()

    def write_text(self, path: str, text: str) -> None:
        """Replace a small file, at once."""
        self.write_bytes(path, text.encode())


def folder_name(name: str) -> str:
    """The name of a schema or table as that of a folder: no other folder can be meant by it."""
    if name in (".", "..", OWN_FOLDER):
        return "".join(map(_escaped, name))
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else _escaped(letter)
        for letter in name
    )


def _escaped(letter: str) -> str:
    return "".join(f"~{byte:02X}" for byte in letter.encode())


def statistics(rows: pa.Table) -> str:
    """What a Delta log says of a file, so that readers can pass over it."""
    smallest: dict[str, object] = {}
    largest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for name in rows.column_names:
        column = rows.column(name)
        if pa.types.is_nested(column.type):
            continue
        nulls[name] = column.null_count
        bounds = _bounds(column)
        if bounds is not None:
            smallest[name], largest[name] = bounds
    statistics = {
        "numRecords": rows.num_rows,
        "minValues": smallest,
        "maxValues": largest,
        "nullCount": nulls,
    }
    return _to_json(statistics).decode()


def _bounds(column: pa.ChunkedArray) -> tuple[object, object] | None:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_boolean(kind):
        return None
    if pa.types.is_timestamp(kind):
        return _moments(column)
    if pa.types.is_date(kind):
        return _days(column)
    found = pc.min_max(column)
    least, most = found["min"].as_py(), found["max"].as_py()
    if least is None:
        return None
    if pa.types.is_floating(kind):
        # JSON has no NaN, and Delta no place for it.
        finite = pc.all(pc.is_finite(column)).as_py()
        return (least, most) if finite else None
    if pa.types.is_string(kind):
        return (least, most) if max(len(least), len(most)) <= LONGEST_BOUND else None
    return least, most


def _days(column: pa.ChunkedArray) -> tuple[str, str] | None:
    found = pc.min_max(pc.cast(column, pa.int32()))
    least, most = found["min"].as_py(), found["max"].as_py()
    if least is None or not _FIRST_DAY <= least <= most <= _LAST_DAY:
        return None
    return _day(least), _day(most)


def _day(number: int) -> str:
    return date.fromordinal(number + _EPOCH_DAY).isoformat()


def _moments(column: pa.ChunkedArray) -> tuple[str, str] | None:
    """The bounds in milliseconds, as Delta writes them: rounded away from the values."""
    found = pc.min_max(pc.cast(column, pa.int64()))
    least, most = found["min"].as_py(), found["max"].as_py()
    if least is None:
        return None
    if least < _EARLIEST or most > _LATEST:
        return None  # rounded, it would be a year that nobody can write
    return _moment(least // 1000, column.type), _moment(-(-most // 1000), column.type)


def _moment(milliseconds: int, kind: pa.DataType) -> str:
    value = pa.scalar(milliseconds, pa.timestamp("ms")).as_py()
    return f"{value.isoformat(timespec='milliseconds')}{'Z' if kind.tz else ''}"


def repetitive(rows: pa.Table) -> list[str]:
    """Columns with few values among many: a dictionary of the others only costs time."""
    sample = rows.slice(0, _DICTIONARY_ROWS)
    return [
        name
        for name in rows.column_names
        if not pa.types.is_nested(rows.schema.field(name).type)
        and pc.count_distinct(sample.column(name)).as_py() <= len(sample) * _DICTIONARY_SHARE
    ]


def _subfolder(partition: Mapping[str, str | None]) -> str:
    """The place of a partition's files, named as Hive does: some readers go by the name alone."""
    return "".join(f"{name}={_folder_name(value)}/" for name, value in partition.items())


def _folder_name(value: str | None) -> str:
    if value is None:
        return "__HIVE_DEFAULT_PARTITION__"
    quoted = quote(value, safe="")
    # A file system takes no longer name; the Delta log says what it stands for.
    return quoted if len(quoted) <= LONGEST_NAME else f"_{zlib.crc32(value.encode()):08x}"
