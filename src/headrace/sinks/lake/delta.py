"""A Delta table as a sink writes it: one commit a batch, by one writer.

The files are written by Spark's tasks; the commits are written here, since delta-rs cannot write
deletion vectors. Each commit carries marks: its own version, by which commits of others are noticed
(see `foreign`), and, if it holds changes, the query's batch and up to which sequence of the log the
table has everything.
"""

import errno
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.schema import Schema
from pyroaring import BitMap

from ... import __version__
from ...errors import HeadraceError, LogReplaced, SinkFenced, TableFailed, TableMoved
from ..status import Progress
from . import vectors
from .comments import TableComments, commented, with_comments
from .deltalog import (
    Action,
    AppTransaction,
    DataFile,
    DeltaCommit,
    DeltaLog,
    Metadata,
    ProtocolVersions,
    TableState,
)
from .features import TIMES, VECTORS, expect_writable, features, with_feature
from .foreign import LOG_GENERATION, SEQUENCE, VERSION, WRITER, judge, judge_since_ours
from .storage import Added, Folder
from .vacuum import vacuum
from .vectors import VectorRef

logger = logging.getLogger(__name__)

SOURCE = "headrace.source"
KEEP = "headrace.keep"
EPOCH = "headrace.epoch"

_ENABLED = "delta.enableDeletionVectors"
_LOG_RETENTION = "delta.logRetentionDuration"
_DEFAULTS = {
    _LOG_RETENTION: "interval 1 days",  # so long, earlier versions can be read
    # What checkpoints tell the VACUUM of other tools of removed files; ours does not need it.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
}
_OLD_PROTOCOL = ProtocolVersions(1, 2)
_NO_FEATURES = ProtocolVersions(1, 1)
_CHECKPOINT_INTERVAL = "delta.checkpointInterval"
_CHECKPOINT_COMMITS = 100
_CLEAN_SECONDS = 3600.0
_interval = re.compile(r"interval (\d+) (second|minute|hour|day|week)s?", re.IGNORECASE).fullmatch

_Build = Callable[[TableState], list[Action]]


class Delta:
    """A Delta table that is there, and belongs to this writer."""

    def __init__(self, folder: Folder, writer: str, state: TableState) -> None:
        self.folder = folder
        self._writer = writer
        self._log = DeltaLog(folder)
        self._state = state
        self._dead: dict[VectorRef, BitMap] = {}
        self._unsure = ""  # a commit of ours of which it is not known whether it was made
        self._clean_due = time.monotonic()
        self._lock = threading.RLock()  # compaction commits beside the stream

    @classmethod
    def open(
        cls, folder: Folder, writer: str, *, adopt: bool = False, restart: bool = False
    ) -> "Delta | None":
        """The table in a folder; None: there is none.

        `restart`: all rows are about to be replaced, so it does not matter what others did to them.
        """
        state = DeltaLog(folder).read()
        if state is None:
            return None
        owner = state.metadata.configuration.get(WRITER)
        if owner != writer and not adopt:
            raise SinkFenced(f"another pipeline writes the Delta table {folder.uri}")
        expect_writable(folder.uri, state.protocol, state.metadata)
        foreign = not restart and owner is not None and judge_since_ours(folder, state, owner)
        delta = cls(folder, writer, state)
        if owner != writer:
            delta.note({WRITER: writer})
        elif foreign:
            delta._acknowledge()
        return delta

    @classmethod
    def create(
        cls,
        folder: Folder,
        schema: pa.Schema,
        properties: Mapping[str, str],
        *,
        writer: str,
        partition_by: Sequence[str] = (),
        vectors: bool = False,
    ) -> "Delta":
        """A new, empty table."""
        text = _schema_string(schema, folder)
        noted = {**_DEFAULTS, **properties, WRITER: writer}
        protocol = _for_columns(_NO_FEATURES, text)
        if vectors:
            noted[_ENABLED], protocol = "true", with_feature(protocol, VECTORS)
        if protocol == _NO_FEATURES:
            protocol = _OLD_PROTOCOL
        columns = list(partition_by)
        metadata = Metadata(str(uuid.uuid4()), text, columns, noted, created_time=_now())
        delta = cls(folder, writer, TableState(-1, protocol, metadata, {}, {}))
        actions = [Action(protocol=protocol), Action(meta_data=metadata)]
        delta._commit("CREATE TABLE", lambda _: actions)
        return delta

    @property
    def version(self) -> int:
        """The version of the last commit that is known here."""
        return self._state.version

    @property
    def files(self) -> Mapping[str, DataFile]:
        """The files by their path; a commit makes another mapping, and leaves this one."""
        return self._state.files

    @property
    def properties(self) -> dict[str, str]:
        """What is noted beside the schema."""
        return dict(self._state.metadata.configuration)

    @property
    def metadata(self) -> Metadata:
        """What the table says of itself; a commit that changes it makes another value."""
        return self._state.metadata

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._state.schema

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that have a folder for each value."""
        return tuple(self._state.metadata.partition_columns)

    @property
    def features(self) -> frozenset[str]:
        """The table features that readers and writers must know."""
        return features(self._state.protocol)

    @property
    def has_vectors(self) -> bool:
        """Whether rows can be marked as dead."""
        return VECTORS in self.features and self.properties.get(_ENABLED) == "true"

    def applied(self, epoch: str) -> int:
        """The sequence of that log up to which the table has everything; 0: nothing of it."""
        return self._state.transactions.get(applied_mark(epoch), 0)

    def place(self, epoch: str) -> Progress:
        """The same with the generation of the log in which it was reached."""
        generation = self._state.transactions.get(_generation_mark(epoch), 0)
        return Progress(epoch, self.applied(epoch), f"{generation:x}")

    def dead(self, path: str) -> BitMap:
        """The positions of a file's dead rows; not to be changed."""
        return self._dead_rows(self._state.files[path].vector)

    def _dead_rows(self, ref: VectorRef | None) -> BitMap:
        if ref is None:
            return BitMap()
        if ref not in self._dead:
            self._dead[ref] = vectors.read(self.folder, ref)
        return self._dead[ref]

    def commit(
        self,
        added: Sequence[Added],
        removed: Sequence[str],
        *,
        dead: Mapping[str, bytes] | None = None,
        schema: pa.Schema | None = None,
        replace: bool = False,
        marks: "Marks | None" = None,
    ) -> None:
        """Take files in and out, and mark rows as dead, at once.

        `dead` has newly dead positions by file (also of an added one), as a serialized BitMap each;
        a file without other rows is taken out. `replace` takes all files out. Without `marks` the
        table's rows stay as they are: the same rows are in other files.

        TableMoved: another writer has replaced files that this is about. What was taken from
        `files` and `applied` is to be looked at again.
        """
        assert not dead or self.has_vectors, "readers of this table know no vectors"
        gone = dict(self.files) if replace else {path: self.files.get(path) for path in removed}
        # Rows that were copied must not have been deleted by another writer meanwhile.
        copies = marks is None or self.properties.get(KEEP) == "history"
        copied = {path: self.files[path] for path in dead or {} if copies and path in self.files}
        change = _FileChange(
            {file.path: _data_file(file) for file in added},
            gone,
            gone | copied,
            {path: BitMap.deserialize(rows) for path, rows in (dead or {}).items()},
            data_change=marks is not None,
        )
        operation = "OPTIMIZE" if marks is None else "MERGE" if removed or dead else "WRITE"
        operation = "REPLACE" if replace else operation
        self._commit_files(operation, change, self._metadata(schema, None), marks)

    def replace_columns(
        self,
        added: Sequence[Added],
        removed: Sequence[str],
        schema: pa.Schema,
        properties: Mapping[str, str],
    ) -> None:
        """The same rows in other files, with other columns, and what is noted of these."""
        gone = {path: self.files.get(path) for path in removed}
        fresh = {file.path: _data_file(file) for file in added}
        change = _FileChange(fresh, gone, gone, {}, data_change=False)
        self._commit_files("REPLACE COLUMNS", change, self._metadata(schema, properties), None)

    def _commit_files(
        self,
        operation: str,
        change: "_FileChange",
        metadata: Callable[[TableState], Metadata],
        marks: "Marks | None",
    ) -> None:
        def build(state: TableState) -> list[Action]:
            marked = marks.transactions(self._writer) if marks else []
            return [
                *_metadata_actions(state, metadata(state)),
                *(Action(txn=each) for each in marked),
                *self._file_actions(change, state),
            ]

        self._commit(operation, build)

    def _file_actions(self, change: "_FileChange", state: TableState) -> list[Action]:
        change.expect_there(self.folder, state)
        now, is_change = _now(), change.data_change
        gone = {path: file for path, file in change.removed.items() if file}
        fresh, marked = dict(change.added), dict[str, BitMap]()
        for path, rows in change.dead.items():
            file = change.added.get(path) or state.files[path]
            known = self._dead_rows(file.vector)
            every = known | rows
            if len(every) == len(known):
                continue
            if path in state.files and path not in change.added:
                gone[path] = file
            if len(every) < file.rows:
                marked[path], fresh[path] = every, file
            else:
                fresh.pop(path, None)
        refs = vectors.write(self.folder, marked)
        self._dead |= {ref: marked[path] for path, ref in refs.items()}
        return [
            *(Action(remove=file.removed(now, data_change=is_change)) for file in gone.values()),
            *(
                Action(add=file.added(refs.get(path), data_change=is_change))
                for path, file in fresh.items()
            ),
        ]

    def note(self, properties: Mapping[str, str]) -> None:
        """Change what is noted beside the schema."""
        metadata = self._metadata(None, properties)
        self._commit("SET TBLPROPERTIES", lambda state: _metadata_actions(state, metadata(state)))

    def add_columns(
        self, fields: Sequence[pa.Field], properties: Mapping[str, str] | None = None
    ) -> None:
        """Give the table columns that its files do not have: they read as null."""
        metadata = self._metadata(pa.schema([*self.schema, *fields]), properties)
        self._commit("ADD COLUMNS", lambda state: _metadata_actions(state, metadata(state)))

    def describe(self, comments: TableComments) -> None:
        """Take over the comments of the source; no file changes."""
        known = self._state.metadata
        if commented(known, comments) != known:
            self._commit(
                "CHANGE COLUMNS",
                lambda state: _metadata_actions(state, commented(state.metadata, comments)),
            )

    def enable_vectors(self) -> None:
        """Let rows be marked as dead, also in a table that was made without."""
        if self.has_vectors:
            return
        metadata = self._metadata(None, {_ENABLED: "true"}, _DEFAULTS)

        def build(state: TableState) -> list[Action]:
            actions = _metadata_actions(state, metadata(state))
            if VECTORS not in features(state.protocol):
                actions.append(Action(protocol=with_feature(state.protocol, VECTORS)))
            return actions

        self._commit("UPGRADE PROTOCOL", build)

    def _metadata(
        self,
        schema: pa.Schema | None,
        properties: Mapping[str, str] | None,
        defaults: Mapping[str, str] | None = None,
    ) -> Callable[[TableState], Metadata]:
        text = None if schema is None else _schema_string(schema, self.folder)

        def changed(state: TableState) -> Metadata:
            known = state.metadata
            noted = {**(defaults or {}), **known.configuration, **(properties or {})}
            columns = known.schema_string
            if text is not None:
                columns = with_comments(text, columns)
            return msgspec.structs.replace(known, schema_string=columns, configuration=noted)

        return changed

    def go_back(self, marks: "Marks") -> None:
        """Count nothing as applied beyond these marks; files stay as they are."""
        marked = marks.transactions(self._writer)
        self._commit("GO BACK", lambda _: [Action(txn=each) for each in marked])

    def continue_in(self, before: str, epoch: str, upto: int, generation: str) -> None:
        """Count what the table has of the log `before` as of `epoch`, its restored copy."""
        if self.properties.get(EPOCH) != before:
            return
        applied = self.applied(before)
        if applied > upto:
            raise LogReplaced(
                f"the Delta table {self.folder.uri} has changes up to {applied}, but the log was "
                f"restored from a copy that ends at {upto}"
            )
        marks = Marks(batch_id=None, epoch=epoch, sequence=applied, generation=generation)
        metadata, marked = self._metadata(None, {EPOCH: epoch}), marks.transactions(self._writer)
        self._commit(
            "CONTINUE",
            lambda state: [
                *_metadata_actions(state, metadata(state)),
                *(Action(txn=each) for each in marked),
            ],
        )

    def empty(self, epoch: str) -> None:
        """Take all files out, and forget how far the table had come in that log."""
        self.commit([], [], replace=True, marks=Marks(batch_id=None, epoch=epoch, sequence=0))

    def refresh(self) -> None:
        """Take over what others have committed; see `foreign` for what is understood."""
        with self._lock:
            commits = self._log.commits(self.version)
            if commits and commits[0].info.get("txnId") == self._unsure:
                self._state = self._state.after([commits.pop(0)])
            self._unsure = ""
            if commits:
                state = judge(self.folder.uri, self._state, commits, self._writer)
                self._state = self._log.counted(state)

    def _commit(self, operation: str, build: _Build) -> None:
        """Make the next version; a conflict with commits that are understood is tried again."""
        with self._lock:
            if self._unsure:
                self._settle()
            commit = self._next(operation, build(self._state))
            while not self._put(commit):
                self._after_conflict()
                commit = self._next(operation, build(self._state))
            self._state = self._state.after([commit])
            known = {file.vector for file in self._state.files.values() if file.vector}
            self._dead = {ref: rows for ref, rows in self._dead.items() if ref in known}
        noted = self.properties.get(_CHECKPOINT_INTERVAL, "")
        interval = int(noted) if noted.isdigit() and int(noted) else _CHECKPOINT_COMMITS
        if self.version and self.version % interval == 0:
            self.checkpoint()

    def _next(self, operation: str, actions: list[Action]) -> DeltaCommit:
        version, now = self.version + 1, _now()
        info = {
            "timestamp": now,
            "operation": operation,
            "operationParameters": {},
            "engineInfo": f"Headrace/{__version__}",
            "txnId": str(uuid.uuid4()),
        }
        mark = AppTransaction(VERSION, version)
        return DeltaCommit(version, [Action(commit_info=info), *actions, Action(txn=mark)])

    def _put(self, commit: DeltaCommit) -> bool:
        token = commit.info["txnId"]
        self._unsure = token
        done = self._log.put(commit)  # else it may be made all the same
        if not done:
            # A storage gets a request again whose response was lost, and then refuses it.
            there = self._log.commit(commit.version)
            done = there is not None and there.info.get("txnId") == token
        self._unsure = ""
        return done

    def _acknowledge(self) -> None:
        """Mark what others have committed as understood, before their commits are cleaned away."""
        self._commit("ACKNOWLEDGE", lambda _: [])

    def _settle(self) -> None:
        before = self.version
        self.refresh()
        if self.version != before:
            raise TableMoved(f"a commit to {self.folder.uri} that had failed was made after all")

    def _after_conflict(self) -> None:
        before = self.version
        if before < 0:
            raise self.folder.failure(
                "no table can be created", FileExistsError(errno.EEXIST, "There is one")
            )
        self.refresh()
        if self.version == before:
            busy = OSError(errno.EBUSY, "another writer is about to commit")
            raise self.folder.failure("this batch was not committed", busy)

    def checkpoint(self) -> None:
        """Spare readers the commits so far, and now and then delete old ones."""
        try:
            table = DeltaTable(self.folder.uri, storage_options=dict(self.folder.options))
            table.create_checkpoint()
            if time.monotonic() >= self._clean_due:
                self._clean_due = time.monotonic() + _CLEAN_SECONDS
                self._log.clean(_duration(self.properties.get(_LOG_RETENTION, "")))
        except (DeltaError, OSError, HeadraceError) as error:
            # The table is whole without: the next one makes up for it.
            logger.warning("no checkpoint table=%s error=%s", self.folder.uri, type(error).__name__)

    def vacuum(self, hours: float) -> int:
        """Delete files that no version younger than so many hours refers to; returns how many."""
        before = self.version
        self.refresh()
        if self.version != before:
            self._acknowledge()
        return vacuum(self.folder, self._state, timedelta(hours=hours))


@dataclass(frozen=True, slots=True)
class _FileChange:
    """What a commit is to do to the files that were there when it was planned."""

    added: Mapping[str, DataFile]
    removed: Mapping[str, DataFile | None]
    unchanged: Mapping[str, DataFile | None]  # the files that must be as they were
    dead: Mapping[str, BitMap]
    data_change: bool

    def expect_there(self, folder: Folder, state: TableState) -> None:
        """Raise TableMoved unless the files still are what they were."""
        moved = [
            *(
                path
                for path, file in self.unchanged.items()
                if file is None or state.files.get(path) != file
            ),
            *(path for path in self.dead if path not in state.files and path not in self.added),
        ]
        if moved:
            raise TableMoved(
                f"another writer has replaced files of the Delta table {folder.uri}, such as "
                f"{moved[0]}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a commit says of the batch it holds."""

    batch_id: int | None  # None: it is no batch's
    epoch: str
    sequence: int
    generation: str = ""

    def transactions(self, writer: str) -> list[AppTransaction]:
        """The marks as Delta keeps them."""
        reached = [AppTransaction(applied_mark(self.epoch), self.sequence)]
        if number := int(self.generation or "0", 16):  # 0 is what a table without the mark has
            reached.append(AppTransaction(_generation_mark(self.epoch), number))
        if self.batch_id is None:
            return reached
        return [AppTransaction(writer, self.batch_id), *reached]


def _metadata_actions(state: TableState, metadata: Metadata) -> list[Action]:
    actions = [Action(meta_data=metadata)] if metadata != state.metadata else []
    protocol = _for_columns(state.protocol, metadata.schema_string)
    return actions + ([Action(protocol=protocol)] if protocol != state.protocol else [])


def _for_columns(protocol: ProtocolVersions, schema: str) -> ProtocolVersions:
    """Readers must know of times without a zone."""
    needed = '"timestamp_ntz"' in schema and TIMES not in features(protocol)
    return with_feature(protocol, TIMES) if needed else protocol


def _schema_string(schema: pa.Schema, folder: Folder) -> str:
    if len({name.lower() for name in schema.names}) < len(schema.names):
        raise TableFailed(
            f"Delta takes no table with the columns of {folder.uri}",
            hint="Columns whose names differ only in case are one to Delta: rename one, then "
            "run `headrace snapshot SOURCE TABLE`.",
        )
    return Schema.from_arrow(schema).to_json()


def _data_file(file: Added) -> DataFile:
    return DataFile(
        file.path,
        file.size,
        file.rows,
        file.statistics,
        tuple(file.partition.items()),
        written_at=file.written_at,
    )


def _duration(text: str) -> timedelta:
    """A duration as Delta writes it; not understood: what tables are made with."""
    found = _interval(text) or _interval(_DEFAULTS[_LOG_RETENTION])
    assert found
    return timedelta(**{f"{found[2].lower()}s": int(found[1])})


def applied_mark(epoch: str) -> str:
    """Under which name a table notes up to where it has everything of a log."""
    return f"{SEQUENCE}{epoch}"


def _generation_mark(epoch: str) -> str:
    return f"{LOG_GENERATION}{epoch}"


def _now() -> int:
    return time.time_ns() // 1_000_000
