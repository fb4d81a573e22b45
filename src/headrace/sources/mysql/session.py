"""Connecting: to the right server, which still has what follows our position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec

from ...errors import PositionLost, SourceRefused, SourceReplaced
from .address import MysqlAddress
from .catalog import BinlogEnd, FoundTable, MysqlCatalog, ServerIdentity
from .decode.binlog import parse
from .decode.events import UNKNOWN, FormatDescription
from .decode.gtid import MariadbGtids, MysqlGtids
from .dump import FIRST, BinlogDump, DumpStart, silence_limit
from .plan import interrupted
from .resume import MysqlRestart, MysqlResume, MysqlTableSnapshot, file_number, packed
from .settings import MysqlSettings, matches

_PURGED = (
    "Run `headrace snapshot SOURCE` to start again from a new snapshot. A longer "
    "binlog_expire_logs_seconds keeps the binary log for as long as Headrace may stand still."
)


@dataclass(frozen=True, slots=True)
class MysqlSession:
    """A connection to a server whose identity is verified."""

    source: MysqlSettings
    address: MysqlAddress
    catalog: MysqlCatalog
    server: ServerIdentity
    resume: MysqlResume  # where to go on
    fresh: bool  # nothing was read yet: the position is where the first snapshot will be

    @classmethod
    def open(
        cls, source: MysqlSettings, stored: MysqlResume | MysqlRestart | None, address: MysqlAddress
    ) -> MysqlSession:
        """Connect, verify the server's identity, and that it has what follows our position."""
        with ExitStack() as stack:
            catalog = MysqlCatalog(
                address.connect(),
                source=source.name,
                origin=stored.origin if isinstance(stored, MysqlResume) else "",
                silence_limit=silence_limit(source.heartbeat_seconds),
            )
            stack.callback(catalog.close)
            server = catalog.server()
            expect_rows(catalog)
            if isinstance(stored, MysqlResume):
                resume = verified(source, stored, catalog)
                if resume.file:
                    _verify_birth(source, resume, address)
                resume = _narrowed(resume, source)
            else:
                resume = _begin(server, catalog.exact_end(), stored)
                catalog = catalog.of(resume.origin)
            # Behind the position, or a table that came between the two would never be seen.
            found = catalog.candidates(source.wants)
            # Without a snapshot, only what was there before the first start is left out.
            takes_snapshot = source.snapshot or stored is not None
            resume = with_tables(resume, found, takes_snapshot=takes_snapshot)
            if not takes_snapshot:
                resume = _with_columns(resume, found, catalog)
            stack.pop_all()
        return cls(source, address, catalog, server, resume, not isinstance(stored, MysqlResume))

    def dump(self, resume: MysqlResume) -> BinlogDump:
        """The binary log from where the resume stands."""
        return BinlogDump.open(
            self.address,
            self._start(resume),
            replica_id=self.source.replica_id,
            heartbeat_seconds=self.source.heartbeat_seconds,
        )

    def _start(self, resume: MysqlResume) -> DumpStart:
        if resume.prepared:
            # Their rows have to be read again, wherever they begin.
            file, position = min(
                [(resume.file, resume.position), *resume.prepared.values()],
                key=lambda offset: (file_number(offset[0]), offset[1]),
            )
            return DumpStart(file, position, statements=self._partial)
        gtids = self.server.parse_gtids(resume.gtids) if resume.moved else None
        return DumpStart(resume.file, resume.position, gtids, self._partial)

    @property
    def _partial(self) -> bool:
        """Whether rows have only a part of their columns, which their statement explains."""
        return self.server.mariadb and self.server.image != "FULL"


def expect_rows(catalog: MysqlCatalog) -> None:
    """Halt where the server's settings would leave rows out of the binary log."""
    known = catalog.variables("log_bin", "binlog_format")
    if known.get("log_bin", "OFF") != "ON":
        raise SourceRefused("the server writes no binary log (log_bin is off)")
    if known.get("binlog_format", "ROW") != "ROW":
        raise SourceRefused(f"binlog_format is {known['binlog_format']}, and must be ROW")


def verified(source: MysqlSettings, stored: MysqlResume, catalog: MysqlCatalog) -> MysqlResume:
    """Make sure that the server is the one we know, and still has what follows our position.

    Another server that has the same transactions will do, where these are followed by GTID; the
    resume then has no file until all that it has in common with the log is passed.
    """
    server = catalog.server()
    same = stored.server == server.identity or (stored.born and server.same_as(stored.server))
    if same and stored.file:
        _verify_files(stored, catalog.files())
        return msgspec.structs.replace(stored, server=server.identity)
    if source.follow != "gtid" or stored.prepared or not stored.gtids:
        raise SourceReplaced(
            f"the server is {server.identity}, and our position is of {stored.server}"
        )
    _verify_gtids(stored, catalog)
    return msgspec.structs.replace(
        stored, server=server.identity, file="", position=0, born=0, moved=True
    )


def _verify_files(stored: MysqlResume, files: dict[str, int]) -> None:
    needed = [stored.file, *(file for file, _ in stored.prepared.values())]
    newest = max(map(file_number, files), default=0)
    for file in needed:
        if file not in files and file_number(file) > newest:
            raise SourceReplaced(f"the binary log was begun anew: {file} is not there yet")
        if file not in files:
            raise PositionLost(f"the server has purged {file}", hint=_PURGED)
    if files[stored.file] < stored.position:
        raise SourceReplaced(
            f"{stored.file} ends at {files[stored.file]}, before our position {stored.position}: "
            "the server was restored, or lost the end of its binary log"
        )


def _verify_birth(source: MysqlSettings, stored: MysqlResume, address: MysqlAddress) -> None:
    """A file that was begun at another time is another file, even if it has the same name."""
    dump = BinlogDump.open(
        address,
        DumpStart(stored.file, FIRST),
        replica_id=source.replica_id,
        heartbeat_seconds=source.heartbeat_seconds,
    )
    with closing(dump):
        while True:
            for event in dump.receive(1.0):
                form = parse(event, UNKNOWN)
                if not isinstance(form, FormatDescription):
                    continue
                if stored.born not in (0, form.header.timestamp):
                    raise SourceReplaced(f"{stored.file} is not the file that was read before")
                return


def _verify_gtids(stored: MysqlResume, catalog: MysqlCatalog) -> None:
    if catalog.server().mariadb:
        _verify_domains(stored, catalog)
        return
    known = catalog.variables("gtid_mode", "gtid_executed", "gtid_purged")
    if known.get("gtid_mode") != "ON":
        raise SourceRefused("follow: gtid needs gtid_mode = ON")
    ours = MysqlGtids.parse(stored.gtids)
    if not ours <= MysqlGtids.parse(known["gtid_executed"]):
        raise SourceReplaced("the server has not executed all transactions that were read already")
    if not MysqlGtids.parse(known["gtid_purged"]) <= ours:
        raise PositionLost("the server has purged transactions that follow", hint=_PURGED)


def _verify_domains(stored: MysqlResume, catalog: MysqlCatalog) -> None:
    """A server refuses what it lacks of a domain, but not a domain that it does not know."""
    (state,) = catalog.rows("SELECT @@global.gtid_binlog_state")[0]
    # The last of each domain and server; a replica that writes no log has executed more.
    written = [MariadbGtids.parse(gtid) for gtid in str(state or "").split(",")]
    for ours in MariadbGtids.parse(stored.gtids).last.values():
        if not any(ours in gtids for gtids in written):
            raise SourceReplaced(f"the server has not written {ours}, which was read already")


def _begin(server: ServerIdentity, end: BinlogEnd, stored: MysqlRestart | None) -> MysqlResume:
    return MysqlResume(
        server=server.identity,
        origin=server.origin,
        file=end.file,
        position=end.position,
        born=0,
        gtids=end.gtids,
        snapshots={},
        errored={},
        versions={},
        catalogue=packed({}),
        former=stored.tables if stored else (),
    )


def _narrowed(resume: MysqlResume, source: MysqlSettings) -> MysqlResume:
    """Leave out tables that the config does not name any more; take up unfinished snapshots."""
    gone = [path for path in resume.snapshots if not matches(path, source.tables, source.database)]
    declared = resume.declared()
    snapshots = {
        path: interrupted(progress, declared.get(path))
        for path, progress in resume.snapshots.items()
        if path not in gone
    }
    return msgspec.structs.replace(
        resume,
        snapshots=snapshots,
        errored={path: why for path, why in resume.errored.items() if path not in gone},
        former=(*resume.former, *gone),
    )


def with_tables(
    resume: MysqlResume, found: Iterable[FoundTable], *, takes_snapshot: bool
) -> MysqlResume:
    """Add tables that are not known yet."""
    snapshots = dict(resume.snapshots)
    for table in found:
        if table.path not in snapshots:
            replaces = table.path in resume.former
            guess = table.estimated_rows
            snapshots[table.path] = (
                MysqlTableSnapshot(replaces=replaces, estimated_rows=guess)
                if takes_snapshot
                else MysqlTableSnapshot(begun=True, done=True)
            )
    former = tuple(path for path in resume.former if path not in snapshots)
    return msgspec.structs.replace(resume, snapshots=snapshots, former=former)


def _with_columns(
    resume: MysqlResume, found: Sequence[FoundTable], catalog: MysqlCatalog
) -> MysqlResume:
    declared = {table.path: catalog.declared(table.schema, table.name) for table in found}
    known = {path: each.numbered(None) for path, each in declared.items() if each is not None}
    return msgspec.structs.replace(resume, catalogue=packed(known))
