"""The log of a Delta table: its actions, the state they add up to, and how it lies on the storage.

    _last_checkpoint ─▶ checkpoint (Parquet) ─▶ the commits after it (JSON) ─▶ TableState

delta-rs reads logs too, but does not show the deletion vectors of files.
"""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.schema import Schema

from ...errors import TableFailed
from .objects import LEFTOVER
from .storage import Folder
from .vectors import VectorRef

FOLDER = "_delta_log"
COMMENT = "comment"  # in the metadata of a field, where other tools look for it
_HOUR = timedelta(hours=1)
HINT_FILE = f"{FOLDER}/_last_checkpoint"
_FIX_LOG = (
    "Bring _delta_log back from a copy, or remove the folder; then run "
    "`headrace snapshot SOURCE TABLE` for a full snapshot, and the table goes on."
)
_file = re.compile(
    rf"{FOLDER}/(?P<version>\d{{20}})\."
    r"(?P<kind>json|crc|\d{20}\.compacted\.json|checkpoint\.(?P<rest>.+))"
).fullmatch
_part = re.compile(r"(\d{10})\.(\d{10})\.parquet").fullmatch
_elsewhere = re.compile(
    r"/|[A-Za-z][A-Za-z0-9+.-]*:"
).match  # file:/lake/a.parquet, as Spark has it
# The columns of a checkpoint that make up the state; statistics as text are enough.
_CHECKPOINT = ["txn", "metaData", "protocol", "sidecar", "checkpointMetadata"]
_CHECKPOINT += ["add.path", "add.partitionValues", "add.size", "add.modificationTime"]
_CHECKPOINT += ["add.dataChange", "add.stats", "add.tags", "add.deletionVector"]


# --- actions -------------------------------------------------------------------------------------


class AddFile(msgspec.Struct, rename="camel", omit_defaults=True):
    """A file that becomes part of the table, or gets another vector."""

    path: str  # as it stands in an address
    partition_values: dict[str, str | None]
    size: int
    modification_time: int
    data_change: bool
    stats: str | None = None
    tags: dict[str, str | None] | None = None
    deletion_vector: VectorRef | None = None


class RemoveFile(msgspec.Struct, rename="camel", omit_defaults=True):
    """A file, with the vector that it has, that is no longer part of the table."""

    path: str
    data_change: bool
    deletion_timestamp: int | None = None
    extended_file_metadata: bool | None = None
    partition_values: dict[str, str | None] | None = None
    size: int | None = None
    deletion_vector: VectorRef | None = None


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    """What a table is."""

    id: str
    schema_string: str
    partition_columns: list[str]
    configuration: dict[str, str]
    format: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"provider": "parquet", "options": {}}
    )
    created_time: int | None = None
    name: str | None = None
    description: str | None = None


class ProtocolVersions(msgspec.Struct, rename="camel", omit_defaults=True, frozen=True):
    """What a reader and a writer of the table must know."""

    min_reader_version: int
    min_writer_version: int
    reader_features: list[str] | None = None
    writer_features: list[str] | None = None


class AppTransaction(msgspec.Struct, rename="camel", omit_defaults=True):
    """How far an application has come.

    Without the time when that was: by it, checkpoints leave out what is older than
    delta.setTransactionRetentionDuration, which anybody may set.
    """

    app_id: str
    version: int


class Action(msgspec.Struct, rename="camel", omit_defaults=True):
    """A line of a commit: one of these."""

    commit_info: dict[str, Any] | None = None
    protocol: ProtocolVersions | None = None
    meta_data: Metadata | None = None
    txn: AppTransaction | None = None
    remove: RemoveFile | None = None
    add: AddFile | None = None


class DeltaCommit(msgspec.Struct):
    """A version of the table, as what changed."""

    version: int
    actions: list[Action]

    @property
    def info(self) -> dict[str, Any]:
        """Who did what; {}: nobody says."""
        return next((each.commit_info for each in self.actions if each.commit_info), {})

    @property
    def adds(self) -> list[AddFile]:
        """Its files."""
        return [each.add for each in self.actions if each.add]

    @property
    def removes(self) -> list[RemoveFile]:
        """The files that it takes out."""
        return [each.remove for each in self.actions if each.remove]


encode_lines = msgspec.json.Encoder().encode_lines
_decode_lines = msgspec.json.Decoder(Action).decode_lines


# --- the state -----------------------------------------------------------------------------------


class _Statistics(msgspec.Struct, rename="camel"):
    num_records: int | None = None
    min_values: dict[str, msgspec.Raw] = {}
    max_values: dict[str, msgspec.Raw] = {}
    null_count: dict[str, msgspec.Raw] = {}


# Each batch asks again for those of every file of its tables.
_statistics = lru_cache(10_000)(msgspec.json.Decoder(_Statistics).decode)
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_exact = msgspec.json.Decoder(float_hook=Decimal).decode


def _readable(statistics: str) -> str:
    """The statistics of a file; "" instead of what another tool has written wrongly."""
    try:
        if statistics:
            _statistics(statistics)
    except msgspec.DecodeError:
        return ""
    return statistics


class DataFile(msgspec.Struct, frozen=True):
    """A file of a table, as the log has it."""

    path: str  # in the table's folder
    size: int
    rows: int  # also dead ones
    statistics: str = ""  # JSON; "": none
    partition: tuple[tuple[str, str | None], ...] = ()  # values that all of its rows share
    vector: VectorRef | None = None  # of its dead rows
    written_at: int = 0  # milliseconds since 1970
    address: str = ""  # the path as it stands in the log; "": as we would write it

    @property
    def live(self) -> int:
        """How many rows are not dead."""
        return self.rows - (self.vector.cardinality if self.vector else 0)

    def bounds(self, column: str) -> tuple[Any, Any] | None:
        """The least and the greatest value as JSON has them, fractions exact; None: not known."""
        if not self.statistics:
            return None
        known = _statistics(self.statistics)
        least, most = known.min_values.get(column), known.max_values.get(column)
        return (_exact(least), _exact(most)) if least is not None and most is not None else None

    def may_be_null(self, column: str) -> bool:
        """Whether a column is null in some row, as far as is known."""
        return self._nulls(column) != b"0"

    def has_nulls(self, column: str) -> bool:
        """Whether it is known that a column is null in some row, be it a dead one."""
        return self._nulls(column) not in (b"", b"0")

    def _nulls(self, column: str) -> bytes:
        counts = _statistics(self.statistics).null_count if self.statistics else {}
        return bytes(counts.get(column, b""))

    @staticmethod
    def path_of(address: str) -> str:
        """The path behind that of an action."""
        return unquote(address)

    @classmethod
    def of(cls, add: AddFile, partition_columns: Sequence[str] = ()) -> "DataFile":
        """The file behind an action; `rows` -1: the log does not say."""
        path = cls.path_of(add.path)
        if _elsewhere(path):
            raise TableFailed(
                f"the table has a file outside of its folder: {path}",
                hint="A shallow clone of another table cannot be written: set another path.",
            )
        statistics = _readable(add.stats or "")
        rows = _statistics(statistics).num_records if statistics else None
        # An empty text stands for null.
        values = add.partition_values
        partition = tuple((name, values.get(name) or None) for name in partition_columns)
        return cls(
            path,
            add.size,
            -1 if rows is None else rows,
            statistics,
            partition,
            add.deletion_vector,
            add.modification_time,
            add.path if add.path != _address(path) else "",
        )

    def added(self, vector: VectorRef | None, *, data_change: bool) -> AddFile:
        """The action that has the file with this vector."""
        return AddFile(
            self.address or _address(self.path),
            dict(self.partition),
            self.size,
            self.written_at,
            data_change,
            (self._wide_statistics() if vector else self.statistics) or None,
            deletion_vector=vector,
        )

    def _wide_statistics(self) -> str:
        """The statistics as bounds that need not be among the rows; with the count of all rows."""
        known = _raw(self.statistics) if self.statistics else {}
        rows = msgspec.Raw(b"%d" % self.rows)
        wide = {"numRecords": rows, **known, "tightBounds": msgspec.Raw(b"false")}
        return msgspec.json.encode(wide).decode()

    def removed(self, now: int, *, data_change: bool) -> RemoveFile:
        """The action that takes the file out."""
        return RemoveFile(
            self.address or _address(self.path),
            data_change,
            now,
            extended_file_metadata=True,
            partition_values=dict(self.partition),
            size=self.size,
            deletion_vector=self.vector,
        )


def _address(path: str) -> str:
    return quote(path, safe="/=")


@dataclass(frozen=True, slots=True)
class TableState:
    """A table at a version; nothing of it is ever changed in place."""

    version: int
    protocol: ProtocolVersions
    metadata: Metadata
    files: Mapping[str, DataFile]
    transactions: Mapping[str, int]

    @property
    def schema(self) -> pa.Schema:
        """The table's columns, without comments: files would repeat them."""
        fields = pa.schema(Schema.from_json(self.metadata.schema_string).to_arrow())
        return pa.schema([_uncommented(field) for field in fields])

    def after(self, commits: Sequence[DeltaCommit]) -> "TableState":
        """The state that these commits lead to."""
        if not commits:
            return self
        files, transactions = dict(self.files), dict(self.transactions)
        protocol, metadata = self.protocol, self.metadata
        for commit in commits:
            for action in commit.actions:
                metadata, protocol = action.meta_data or metadata, action.protocol or protocol
                if action.txn:
                    transactions[action.txn.app_id] = action.txn.version
                if action.remove:
                    files.pop(DataFile.path_of(action.remove.path), None)
            for add in commit.adds:
                file = DataFile.of(add, metadata.partition_columns)
                files[file.path] = file
        return TableState(commits[-1].version, protocol, metadata, files, transactions)


def _uncommented(field: pa.Field) -> pa.Field:
    left = {
        name: value for name, value in (field.metadata or {}).items() if name != COMMENT.encode()
    }
    return field.with_metadata(left or None) if field.metadata else field


# --- on the storage ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listing:
    """What the folder of the log holds."""

    commits: set[int]
    checkpoints: dict[int, list[str]]  # complete ones
    foreign: dict[int, str]  # checkpoints of a kind that is not read here


class DeltaLog:
    """The log in a table's folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def read(self, upto: int | None = None) -> TableState | None:
        """The state at a version, or the latest; None: there is no table."""
        with self._understood():
            hint = self._hint()
            listing = self._listed(hint if upto is None else 0)
            if hint and hint not in listing.checkpoints:
                listing = self._listed(0)
            if not listing.commits and not listing.checkpoints:
                return None
            newest = max(listing.commits | listing.checkpoints.keys())
            return self._state(listing, newest if upto is None else upto)

    def commits(self, after: int) -> list[DeltaCommit]:
        """The commits that follow a version."""
        found: list[DeltaCommit] = []
        while (commit := self.commit(after + len(found) + 1)) is not None:
            found.append(commit)
        return found

    def commit(self, version: int) -> DeltaCommit | None:
        """One commit; None: there is none."""
        with self.folder.reached(FOLDER), self._understood():
            content = self.folder.objects.read(_commit_file(version))
            return None if content is None else DeltaCommit(version, _decode_lines(content))

    def put(self, commit: DeltaCommit) -> bool:
        """Make this the commit of its version; False: there is one already."""
        path = _commit_file(commit.version)
        with self.folder.reached(path):
            if commit.version and not self._has(commit.version - 1):
                # A table that was deleted must not begin again in its midst.
                raise FileNotFoundError(errno.ENOENT, "The Delta log is gone")
            return self.folder.objects.create(path, encode_lines(commit.actions))

    def _has(self, version: int) -> bool:
        files = _commit_file(version), f"{FOLDER}/{version:020d}.checkpoint.parquet"
        return any(self.folder.objects.read(file, 0, 1) is not None for file in files)

    def clean(self, keep: timedelta) -> int:
        """Delete what only versions before that time need; returns how many files.

        The newest checkpoint that is older stays, with all commits after it. Of other checkpoints
        one an hour is enough: they hold every file of the table.
        """
        now = datetime.now(UTC)
        with self.folder.reached(FOLDER):
            written = dict(self.folder.objects.entries(FOLDER))
            old = [path for path, at in written.items() if now - at >= keep]
            listing = _listing(old)
            first = max(listing.checkpoints.keys() & listing.commits, default=0)
            gone = {path for path in old if path.startswith(f"{FOLDER}/{LEFTOVER}")}
            gone |= {e for e in written if (found := _file(e)) and int(found["version"]) < first}
            hours = set[datetime]()
            checkpoints = _listing(written.keys() - gone).checkpoints
            for version, paths in sorted(checkpoints.items())[::-1]:
                at = written[paths[0]]
                hour = at.replace(minute=0, second=0, microsecond=0)
                # The commits that stay need the first one.
                if hour in hours and now - at >= _HOUR and version != first:
                    gone.update(paths)
                hours.add(hour)
            self.folder.objects.delete(sorted(gone))
        return len(gone)

    def forget(self, before: int) -> int:
        """Delete every commit and checkpoint of earlier versions; returns how many files.

        The version itself must have a checkpoint.
        """
        with self.folder.reached(FOLDER):
            paths = [each.path for each in self.folder.objects.entries(FOLDER)]
            gone = [path for path in paths if path.startswith(f"{FOLDER}/{LEFTOVER}")]
            gone += [p for p in paths if (found := _file(p)) and int(found["version"]) < before]
            self.folder.objects.delete(gone)
        return len(gone)

    def _hint(self) -> int:
        with self.folder.reached(HINT_FILE):
            content = self.folder.objects.read(HINT_FILE)
        try:
            return int(msgspec.json.decode(content)["version"]) if content else 0
        except (ValueError, LookupError, TypeError):
            return 0  # it only spares a long list

    def _listed(self, first: int) -> _Listing:
        after = f"{FOLDER}/{first:020d}" if first else f"{FOLDER}/"
        with self.folder.reached(FOLDER):
            return _listing(each.path for each in self.folder.objects.entries(FOLDER, after))

    def _state(self, listing: _Listing, upto: int) -> TableState:
        start = max((each for each in listing.checkpoints if each <= upto), default=-1)
        if (
            any(start < each <= upto for each in listing.foreign)
            and start + 1 not in listing.commits
        ):
            newest = max(listing.foreign)
            raise TableFailed(
                f"{self.folder.uri} has a checkpoint of a kind that Headrace does not read: "
                f"{listing.foreign[newest]}",
                hint="Set delta.checkpointPolicy to classic and make a new checkpoint, with the "
                "tool that made this one.",
            )
        actions = self._checkpoint(listing.checkpoints[start]) if start >= 0 else []
        commits = [DeltaCommit(start, actions)]
        for version in range(start + 1, upto + 1):
            commit = self.commit(version)
            if commit is None:
                raise self._damage(f"has no version {version}")
            commits.append(commit)
        metadata = [each.meta_data for commit in commits for each in commit.actions]
        protocols = [each.protocol for commit in commits for each in commit.actions]
        if not any(metadata) or not any(protocols):
            raise self._damage("says nothing of its columns")
        [protocol, *_], [first, *_] = filter(None, protocols), filter(None, metadata)
        state = TableState(start, protocol, first, {}, {}).after(commits)
        return self.counted(state)

    def counted(self, state: TableState) -> TableState:
        """Rows of files that somebody has written without statistics are counted by Parquet."""
        files = {
            path: msgspec.structs.replace(file, rows=self.folder.count(path))
            for path, file in state.files.items()
            if file.rows < 0
        }
        return replace(state, files={**state.files, **files}) if files else state

    def _checkpoint(self, paths: Iterable[str]) -> list[Action]:
        found: list[Action] = []
        for path in paths:
            with self.folder.reached(path):
                content = self.folder.objects.read(path)
            if content is None:
                raise self._damage(f"lacks {path}")
            rows = pq.ParquetFile(pa.BufferReader(content)).read(_CHECKPOINT)
            if any(
                name in rows.column_names and rows[name].null_count < rows.num_rows
                for name in ("sidecar", "checkpointMetadata")
            ):
                raise TableFailed(
                    f"{self.folder.uri} has a V2 checkpoint, which Headrace does not read: {path}",
                    hint="Set delta.checkpointPolicy to classic and make a new checkpoint, with "
                    "the tool that made this one.",
                )
            found += _actions(rows)
        return found

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Say what it means that something of the log makes no sense."""
        try:
            yield
        except (msgspec.MsgspecError, pa.ArrowInvalid) as error:
            raise self._damage("holds what cannot be read") from error

    def _damage(self, what: str) -> TableFailed:
        return TableFailed(
            f"the Delta log in {self.folder.uri} is damaged: it {what}", hint=_FIX_LOG
        )


def _commit_file(version: int) -> str:
    return f"{FOLDER}/{version:020d}.json"


def _listing(paths: Iterable[str]) -> _Listing:
    listing = _Listing(set(), {}, {})
    parts: dict[tuple[int, int], list[str]] = {}
    for path in paths:
        if (found := _file(path)) is None:
            continue
        version, rest = int(found["version"]), found["rest"]
        if found["kind"] == "json":
            listing.commits.add(version)
        elif rest == "parquet":
            listing.checkpoints[version] = [path]
        elif rest and (part := _part(rest)):
            pieces = parts.setdefault((version, int(part[2])), [])
            pieces.append(path)
            if len(pieces) == int(part[2]):
                listing.checkpoints.setdefault(version, pieces)
        elif rest:
            listing.foreign[version] = path
    return listing


def _actions(rows: pa.Table) -> Iterator[Action]:
    for name, field, kind in (
        ("protocol", "protocol", ProtocolVersions),
        ("metaData", "meta_data", Metadata),
        ("txn", "txn", AppTransaction),
        ("add", "add", AddFile),
    ):
        if name in rows.column_names:
            values = rows[name].drop_null().to_pylist(maps_as_pydicts="strict")
            for value in msgspec.convert(values, list[kind]):  # type: ignore[valid-type]
                yield Action(**{field: value})
