"""What `headrace check` looks at on a MySQL or MariaDB server."""

from __future__ import annotations

from collections.abc import Iterator

from ...change.path import table_path
from ...errors import HeadraceError, SourceRefused, SourceUnavailable
from .. import Finding
from .address import quoted
from .catalog import FoundTable, MysqlCatalog
from .follow import LOOSE_FIX, loose_references, loosely_compared
from .settings import MysqlSettings

_OLDEST = {True: (10, 5), False: (8, 0)}  # MariaDB, MySQL
_A_DAY = 86_400
_CASCADES = """
    SELECT TABLE_NAME, CONSTRAINT_NAME, DELETE_RULE, UPDATE_RULE,
           UNIQUE_CONSTRAINT_SCHEMA, REFERENCED_TABLE_NAME
    FROM information_schema.REFERENTIAL_CONSTRAINTS WHERE CONSTRAINT_SCHEMA = %s
      AND (DELETE_RULE IN ('CASCADE', 'SET NULL', 'SET DEFAULT')
           OR UPDATE_RULE IN ('CASCADE', 'SET NULL', 'SET DEFAULT'))
    ORDER BY 1, 2"""
_SETTINGS = (
    "log_bin",
    "binlog_format",
    "binlog_row_image",
    "binlog_row_metadata",
    "binlog_annotate_row_events",
    "binlog_rows_query_log_events",
    "binlog_row_value_options",
    "binlog_expire_logs_seconds",
    "expire_logs_days",
    "server_id",
    "gtid_mode",
    "log_slave_updates",
    "log_replica_updates",
)


def check(source: MysqlSettings) -> list[Finding]:
    """Every setting and privilege that capturing needs, with the statement that fixes it."""
    try:
        connection = source.address.connect()
    except HeadraceError as error:
        fix = "Check the source's url, the user's host, and that the server listens there."
        return [Finding("connection", ok=False, detail=str(error), fix=fix)]
    catalog = MysqlCatalog(connection, source=source.name)
    try:
        return list(_Check(source, catalog).findings())
    finally:
        catalog.close()


class _Check:
    """The checks of one server."""

    def __init__(self, source: MysqlSettings, catalog: MysqlCatalog) -> None:
        self._source = source
        self._catalog = catalog
        self._known = catalog.variables(*_SETTINGS)

    def findings(self) -> Iterator[Finding]:
        """All of them, in the order in which they matter."""
        yield Finding("connection", ok=True, detail=self._source.url.masked_url())
        yield self._version()
        yield self._log_bin()
        yield self._server_id()
        yield self._format()
        yield self._session_log()
        yield self._image()
        yield self._metadata()
        yield self._retention()
        yield self._replication()
        if self._known.get("log_bin") == "ON":
            yield from self._status()
        yield self._gtid()
        yield self._snapshot()
        if not self._catalog.server().mariadb:
            yield self._prepared()
        yield from self._tables()

    def _is(self, name: str, wanted: str, fix: str) -> Finding:
        value = self._known.get(name, "")
        ok = value.upper() == wanted
        return Finding(name, ok=ok, detail=value or "unknown", fix="" if ok else fix)

    def _version(self) -> Finding:
        server = self._catalog.server()
        numbers = tuple(int(part) for part in server.version.split(".")[:2])
        oldest = _OLDEST[server.mariadb]
        ok = numbers >= oldest
        name = "MariaDB" if server.mariadb else "MySQL"
        fix = f"Upgrade the server to {name} {oldest[0]}.{oldest[1]} or later."
        return Finding("version", ok=ok, detail=f"{name} {server.version}", fix="" if ok else fix)

    def _log_bin(self) -> Finding:
        return self._is(
            "log_bin", "ON", "log_bin = mysql-bin  # in my.cnf, then restart the server"
        )

    def _server_id(self) -> Finding:
        number = self._known.get("server_id", "0")
        ok = number != "0"
        return Finding(
            "server_id", ok=ok, detail=number, fix="" if ok else "SET GLOBAL server_id = 1;"
        )

    def _format(self) -> Finding:
        fix = "SET GLOBAL binlog_format = ROW;  -- and in my.cnf; sessions take it when they begin"
        return self._is("binlog_format", "ROW", fix)

    def _image(self) -> Finding:
        image = self._known.get("binlog_row_image", "FULL").upper()
        partial = "PARTIAL_JSON" in self._known.get("binlog_row_value_options", "").upper()
        fix = "SET GLOBAL binlog_row_value_options = '';" if partial else ""
        detail = {
            "FULL": "old and new rows are whole",
            "NOBLOB": "large columns that did not change are left out",
            "MINIMAL": "columns that did not change are left out, and old rows are keys",
        }.get(image, image)
        ok = not partial
        if partial:
            detail = "changes of JSON columns are sent in parts"
        elif image != "FULL":
            ok = self._shows_statements()
            fix = "" if ok else "SET GLOBAL binlog_row_image = FULL;  -- and in my.cnf"
            detail += "; a table fails where what an event leaves out is not certain: virtual "
            detail += "columns, no primary key, a REPLACE" + (" by a trigger" if ok else "")
        return Finding("binlog_row_image", ok=ok, detail=f"{image}: {detail}", fix=fix)

    def _shows_statements(self) -> bool:
        """Whether the binary log has the text that rows come from."""
        name = "binlog_annotate_row_events"
        if not self._catalog.server().mariadb:
            name = "binlog_rows_query_log_events"
        return self._known.get(name) == "ON"

    def _session_log(self) -> Finding:
        detail = "what a session writes while it has set sql_log_bin to 0 is in no binary log, and "
        detail += "is not captured; nothing shows that it happened"
        return Finding("sql_log_bin", ok=True, detail=detail)

    def _metadata(self) -> Finding:
        fix = "SET GLOBAL binlog_row_metadata = FULL;  -- and in my.cnf"
        found = self._is("binlog_row_metadata", "FULL", fix)
        if found.ok:
            return found
        detail = f"{found.detail}: columns have no names in the binary log, so a table that is "
        detail += "altered while Headrace lags behind needs a new snapshot"
        return Finding(found.name, ok=False, detail=detail, fix=fix)

    def _retention(self) -> Finding:
        days = float(self._known.get("expire_logs_days", "0") or 0)
        seconds = (
            int(float(self._known.get("binlog_expire_logs_seconds", "0") or 0)) or days * _A_DAY
        )
        ok = not seconds or seconds >= _A_DAY
        detail = f"kept for {seconds / _A_DAY:g} days" if seconds else "kept until it is purged"
        fix = "SET GLOBAL binlog_expire_logs_seconds = 604800;  -- a week, and in my.cnf"
        return Finding("binary log", ok=ok, detail=detail, fix="" if ok else fix)

    def _replication(self) -> Finding:
        user = self._user()
        grants = " ".join(str(row[0]).upper() for row in self._catalog.rows("SHOW GRANTS"))
        ok = "REPLICATION SLAVE" in grants or "ALL PRIVILEGES ON *.*" in grants
        detail = f"user {user} {'may' if ok else 'may not'} read the binary log"
        fix = f"GRANT REPLICATION SLAVE ON *.* TO {user};"
        return Finding("replication privilege", ok=ok, detail=detail, fix="" if ok else fix)

    def _status(self) -> Iterator[Finding]:
        try:
            self._catalog.end()
            self._catalog.files()
        except SourceRefused as error:
            # MariaDB takes the older name too, but its errors and SHOW GRANTS have this one.
            named = "BINLOG MONITOR" if self._catalog.server().mariadb else "REPLICATION CLIENT"
            fix = f"GRANT {named} ON *.* TO {self._user()};"
            yield Finding("status privilege", ok=False, detail=str(error), fix=fix)
            return
        yield Finding("status privilege", ok=True, detail="may read where the binary log ends")
        yield self._filters()
        yield self._replica()

    def _filters(self) -> Finding:
        newer = self._catalog.server().newer
        row = self._catalog.rows("SHOW BINARY LOG STATUS" if newer else "SHOW MASTER STATUS")[0]
        filters = [
            f"{name} = {value}"
            for name, value in zip(("binlog_do_db", "binlog_ignore_db"), row[2:4], strict=True)
            if value
        ]
        fix = "Remove binlog_do_db and binlog_ignore_db from my.cnf, then restart the server."
        detail = "; ".join(filters) or "none"
        return Finding("filters", ok=not filters, detail=detail, fix=fix if filters else "")

    def _replica(self) -> Finding:
        logs = self._known.get("log_slave_updates") or self._known.get("log_replica_updates", "ON")
        try:
            newer = self._catalog.server().newer
            following = bool(
                self._catalog.rows("SHOW REPLICA STATUS" if newer else "SHOW SLAVE STATUS")
            )
        except SourceRefused:
            following = False  # the user may not see it
        ok = logs == "ON" or not following
        detail = "logs what it replicates" if logs == "ON" else "logs its own changes only"
        fix = "log_slave_updates = ON  # in my.cnf, then restart the server"
        return Finding("replica", ok=ok, detail=detail, fix="" if ok else fix)

    def _gtid(self) -> Finding:
        mode = "ON" if self._catalog.server().mariadb else self._known.get("gtid_mode", "OFF")
        ok = mode == "ON" or self._source.follow == "position"
        fix = "SET GLOBAL gtid_mode = ON;  -- in the steps of MySQL's manual, or follow: position"
        detail = f"{mode}, followed by {self._source.follow}"
        return Finding("gtid", ok=ok, detail=detail, fix="" if ok else fix)

    def _snapshot(self) -> Finding:
        grants = " ".join(str(row[0]).upper() for row in self._catalog.rows("SHOW GRANTS"))
        if self._catalog.server().mariadb:
            return self._snapshot_mariadb(grants)
        ok = "RELOAD" in grants or "ALL PRIVILEGES ON *.*" in grants or "LOCK TABLES" in grants
        detail = "a lock of some milliseconds" if ok else "may not lock for the moment it begins"
        fix = f"GRANT LOCK TABLES, RELOAD ON *.* TO {self._user()};"
        return Finding("snapshot", ok=ok, detail=detail, fix="" if ok else fix)

    def _snapshot_mariadb(self, grants: str) -> Finding:
        found = self._catalog.candidates(self._source.wants)
        locked = [table for table in found if not table.transactional]
        if not locked:
            return Finding("snapshot", ok=True, detail="without a lock")
        ok = "LOCK TABLES" in grants or "ALL PRIVILEGES ON" in grants
        detail = f"{locked[0].path} has no transactions, so it is locked during its snapshot"
        schema = quoted(locked[0].schema)
        fix = f"GRANT LOCK TABLES ON {schema}.* TO {self._user()};"
        return Finding("snapshot", ok=ok, detail=detail, fix="" if ok else fix)

    def _prepared(self) -> Finding:
        try:
            self._catalog.rows("XA RECOVER")
        except SourceRefused:
            detail = "may not list them: one that is prepared when a snapshot begins is noticed "
            detail += "only when it commits, and then a new snapshot is needed"
            fix = f"GRANT XA_RECOVER_ADMIN ON *.* TO {self._user()};"
            return Finding("XA transactions", ok=False, detail=detail, fix=fix)
        return Finding(
            "XA transactions", ok=True, detail="a snapshot waits for those that are prepared"
        )

    def _tables(self) -> Iterator[Finding]:
        found = self._catalog.candidates(self._source.wants)
        if not found:
            detail = f"no table matches {', '.join(self._source.tables)}"
            # The catalogue shows a user no table that it may not read.
            detail += f" among those that user {self._user()} may read"
            where = f"{quoted(self._source.database)}.*" if self._source.database else "*.*"
            fix = f"GRANT SELECT, LOCK TABLES ON {where} TO {self._user()};"
            fix += "  -- or check `tables` of the source, and that the tables exist"
            yield Finding("tables", ok=False, detail=detail, fix=fix)
        for table in found:
            yield self._table(table)
        for schema in sorted({table.schema for table in found}):
            yield from self._cascades(schema)

    def _table(self, table: FoundTable) -> Finding:
        what, name = f"table {table.path}", quoted(table.schema, table.name)
        try:
            self._catalog.rows(f"SELECT 1 FROM {name} LIMIT 1")
        except SourceRefused as error:
            fix = f"GRANT SELECT ON {name} TO {self._user()};"
            return Finding(what, ok=False, detail=str(error), fix=fix)
        except SourceUnavailable as error:
            fix = f"CHECK TABLE {name};  -- it shows what is wrong with the table"
            return Finding(what, ok=False, detail=str(error), fix=fix)
        declared = self._catalog.declared(table.schema, table.name)
        if declared is not None and declared.versioned:
            detail = "keeps its history, which the binary log shows as rows: it is not captured"
            fix = f"ALTER TABLE {name} DROP SYSTEM VERSIONING;"
            return Finding(what, ok=False, detail=detail, fix=fix)
        if declared is None or declared.key:
            return Finding(what, ok=True, detail="has a primary key")
        fix = f"ALTER TABLE {name} ADD COLUMN row_id bigint AUTO_INCREMENT PRIMARY KEY;"
        return Finding(what, ok=False, detail="has no primary key: its rows have no name", fix=fix)

    def _cascades(self, schema: str) -> Iterator[Finding]:
        if self._catalog.server().logs_cascades:
            return
        found = self._catalog.rows(_CASCADES, schema)
        wanted = [each for each in found if self._source.wants(schema, each[0])]
        for table, constraint, deleting, updating, *parent in wanted:
            detail = f"{constraint}: ON DELETE {deleting}, ON UPDATE {updating}; what InnoDB does "
            detail += "by itself is not in the binary log, and readers of the log must do the same"
            if not self._source.wants(*parent):
                detail += f"; nobody can, since {'.'.join(parent)} is not captured"
            fix = f"ALTER TABLE {quoted(schema, table)} DROP FOREIGN KEY {quoted(constraint)};"
            fix += "  -- and let the application or a trigger do it"
            yield Finding(
                f"foreign key of {table_path(schema, table)}", ok=False, detail=detail, fix=fix
            )
        for table in dict.fromkeys(each[0] for each in wanted):
            yield from self._collations(schema, table)

    def _collations(self, schema: str, table: str) -> Iterator[Finding]:
        declared = self._catalog.declared(schema, table)
        for each in loose_references(declared) if declared else ():
            what = f"collation of {table_path(schema, table)}"
            yield Finding(what, ok=False, detail=loosely_compared(each), fix=LOOSE_FIX)

    def _user(self) -> str:
        name, _, host = str(self._catalog.rows("SELECT CURRENT_USER()")[0][0]).rpartition("@")
        return f"'{name}'@'{host}'"
