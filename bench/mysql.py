"""The same backlog and the same table from MariaDB: Headrace, a peer in Python, and the limit.

`mariadb-binlog --raw` receives the same bytes as any replica and writes them to a file unread.
python-mysql-replication decodes rows into Python values and stores nothing.
PyMySQL's unbuffered cursor selects the table into Python values, which nobody keeps, and
`mariadb-dump` writes it as INSERT statements to nowhere.
"""

import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pymysql
from pymysql.cursors import SSCursor

from headrace.capture import Capture
from headrace.change.event import Batch
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources.mysql import Mysql
from headrace.sources.worker import Apart
from headrace.testing.mariadb import MariadbDatabase, MariadbServer, Setting

from .headrace_run import Commits, operations, rows_there
from .process import MeasurementFailed, Outcome, answer, measure, module, run
from .workload import Scale

SETTINGS: dict[str, Setting] = {
    "innodb_buffer_pool_size": "512M",
    "innodb_flush_log_at_trx_commit": 2,
    "max_binlog_size": "1G",
}

_TABLE = """
    CREATE TABLE bench_backlog (
        id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
        customer int NOT NULL,
        name text NOT NULL,
        price decimal(12,2) NOT NULL,
        tags json NOT NULL,
        active boolean NOT NULL,
        note text,
        created_at timestamp(6) NOT NULL DEFAULT current_timestamp(6)
    )"""
_COPY = "CREATE TABLE bench_copy LIKE bench_backlog"
_ROWS = """
    (customer, name, price, tags, active, note)
    SELECT g.seq, concat('customer name ', g.seq), g.seq * 1.25,
           json_object('a', g.seq, 'b', concat('text ', g.seq), 'c', json_array(1, 2, 3)),
           g.seq % 2 = 0, concat('note for row ', g.seq)"""
_PROCEDURE = f"""
    CREATE PROCEDURE bench_load(transactions int)
    BEGIN
        DECLARE i int DEFAULT 1;
        DECLARE first bigint;
        WHILE i <= transactions DO
            START TRANSACTION;
            INSERT INTO bench_backlog {_ROWS}
                FROM (SELECT i * 10 + seq AS seq FROM seq_0_to_9) g;
            SET first = last_insert_id();
            UPDATE bench_backlog SET price = price + 1, note = 'updated'
                WHERE id BETWEEN first AND first + 4;
            DELETE FROM bench_backlog WHERE id = first + 9;
            COMMIT;
            SET i = i + 1;
        END WHILE;
    END"""

_COPIES = ("snapshot", "select")  # who reads the table, not the backlog
_DUMP = "mariadb-dump"


class Task(msgspec.Struct, frozen=True):
    """What a child is to read."""

    who: str
    url: str
    port: int
    database: str
    table: str
    folder: str
    resume: bytes | None
    file: str
    position: int
    expected: dict[str, int]

    @property
    def rows(self) -> int:
        """Row changes in all."""
        return sum(self.expected.values())

    def source(self) -> Mysql:
        """The source over the one table."""
        return Mysql(name="bench", url=Secret(self.url), tables=(self.table,))


class Backlog:
    """A database with a backlog, and the places in the binary log before and after it."""

    def __init__(self, database: MariadbDatabase, scale: Scale) -> None:
        self.database = database
        self.scale = scale
        database.execute(_TABLE)
        database.execute(_COPY)
        database.execute(_PROCEDURE)
        # The source is opened once before the backlog, so that its resume stands there.
        source = Mysql(
            name="bench", url=Secret(database.url), tables=("bench_backlog",), snapshot=False
        )
        with closing(source.open(None, lambda table: table)) as stream:
            self.resume = next(iter(stream)).resume
        self.file, self.position = self.end()

    def end(self) -> tuple[str, int]:
        """Where the binary log ends."""
        row = self.database.execute("SHOW MASTER STATUS")[0]
        return str(row[0]), int(row[1])

    def load(self) -> None:
        """Commit the backlog."""
        self.database.execute("CALL bench_load(%s)", self.scale.transactions)

    def load_copy(self) -> None:
        """Fill the table that is copied."""
        self.database.execute(
            f"INSERT INTO bench_copy {_ROWS} FROM (SELECT seq FROM seq_1_to_{self.scale.rows}) g"
        )

    def task(self, who: str, folder: Path) -> Task:
        """For one run."""
        snapshots = who in _COPIES
        return Task(
            who=who,
            url=self.database.url,
            port=self.database.server.port,
            database=self.database.name,
            table="bench_copy" if snapshots else "bench_backlog",
            folder=str(folder),
            resume=None if snapshots else self.resume,
            file=self.file,
            position=self.position,
            expected={"READ": self.scale.rows} if snapshots else self.scale.operations,
        )

    def measured(self, who: str, folder: Path) -> Outcome:
        """One run of somebody, in a process of its own."""
        task = msgspec.json.encode(self.task(who, folder)).decode()
        return measure(module("mysql", task), folder)

    def raw(self, folder: Path) -> Outcome:
        """The files of the binary log, unread."""
        program = self.database.server.install.binlog
        if program is None:
            raise MeasurementFailed("mariadb-binlog is not installed")
        last, _ = self.end()
        command: list[str | Path] = [program, "--no-defaults", "--raw", "--read-from-remote-server"]
        command += ["--host=127.0.0.1", f"--port={self.database.server.port}", "--user=root"]
        command += [f"--start-position={self.position}", "--to-last-log", self.file]
        began = time.perf_counter()
        run(command, folder)
        seconds = time.perf_counter() - began
        received = sum(file.stat().st_size for file in folder.iterdir())
        if not (folder / last).exists():
            raise MeasurementFailed(f"mariadb-binlog stopped before {last}")
        return Outcome(self.scale.changes, seconds, {"bytes": received})

    def dumped(self, folder: Path) -> Outcome:
        """The table as statements, into nothing."""
        command = [_DUMP, "--no-defaults", "--host=127.0.0.1", "--user=root", "--quick"]
        command += [f"--port={self.database.server.port}", "--single-transaction"]
        command += ["--result-file=/dev/null", self.database.name, "bench_copy"]
        began = time.perf_counter()
        run(command, folder)
        return Outcome(self.scale.rows, time.perf_counter() - began)


# --- in the child --------------------------------------------------------------------------------


def headrace(task: Task) -> Outcome:
    """Into a log, from where the backlog begins, or a whole table."""
    with Log.open(Path(task.folder) / "log") as log:
        if task.resume is not None:
            log.append("bench", Batch((), task.resume))
        began = time.perf_counter()
        commits = Commits(log)
        capture = Capture(Apart(task.source()), log)
        capture.start()
        ended = rows_there(task.rows, log, commits, capture)
        capture.stop()
        found = operations(log)
    if found != task.expected:
        raise MeasurementFailed(f"the log holds {found}, not {task.expected}")
    return Outcome(task.rows, ended - began)


def peer(task: Task) -> Outcome:
    """Through python-mysql-replication, into nothing."""
    # Only this process needs it: the tests import this module with what `dev` installs.
    from pymysqlreplication import BinLogStreamReader  # noqa: PLC0415
    from pymysqlreplication.row_event import (  # noqa: PLC0415
        DeleteRowsEvent,
        UpdateRowsEvent,
        WriteRowsEvent,
    )

    began = time.perf_counter()
    stream = BinLogStreamReader(
        connection_settings={"host": "127.0.0.1", "port": task.port, "user": "root"},
        server_id=4242,
        log_file=task.file,
        log_pos=task.position,
        resume_stream=True,
        blocking=True,
        is_mariadb=True,
        only_tables=[task.table],
        only_events=[WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent],
    )
    found = 0
    for event in stream:  # never ends by itself: at the end of the binary log it waits for more
        found += len(event.rows)
        if found >= task.rows:
            break
    seconds = time.perf_counter() - began
    stream.close()
    if found != task.rows:
        raise MeasurementFailed(f"python-mysql-replication read {found} rows, not {task.rows}")
    return Outcome(found, seconds)


def select(task: Task) -> Outcome:
    """Through PyMySQL, into nothing."""
    began = time.perf_counter()
    connection = pymysql.connect(
        host="127.0.0.1", port=task.port, user="root", database=task.database, cursorclass=SSCursor
    )
    with closing(connection), connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {task.table}")
        found = sum(1 for _ in cursor)
    seconds = time.perf_counter() - began
    if found != task.rows:
        raise MeasurementFailed(f"PyMySQL read {found} rows, not {task.rows}")
    return Outcome(found, seconds)


def server() -> MariadbServer:
    """The server that is measured on."""
    return MariadbServer(settings=SETTINGS)


def main(encoded: str) -> None:
    """Do one task and answer."""
    task = msgspec.json.decode(encoded, type=Task)
    answer({"peer": peer, "select": select}.get(task.who, headrace)(task))


if __name__ == "__main__":
    main(sys.argv[1])
