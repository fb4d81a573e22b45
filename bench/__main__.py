"""Run everything, one at a time, and write down the figures."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.testing import PostgresDatabase, PostgresServer, Setting, postgres_installs

from . import (
    attacks,
    delivery,
    delivery_grpc,
    delivery_report,
    formats,
    headrace_run,
    lake,
    lake_costs,
    lake_transaction,
    lake_variants,
    lake_verify,
    lake_whole,
    latency,
    machine,
    memory,
    mysql,
    peers,
    push_files,
    push_kafka,
    push_queues,
    push_webhook,
    report,
    workload,
)
from .process import ROOT, Outcome
from .report import Race, Runner, Section, Target
from .workload import Scale

POSTGRES = 16
IDLE_ROWS = 1000  # that an idle pipeline has carried before
RESULTS = ROOT / "bench" / "RESULTS.md"

# Nothing of the server's own is to run beside what is measured.
SETTINGS: Mapping[str, Setting] = {
    "autovacuum": False,
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1d",
}

console = Console()


class Part(StrEnum):
    """What can be measured by itself."""

    STREAM = "stream"
    SNAPSHOT = "snapshot"
    LATENCY = "latency"
    MEMORY = "memory"
    LAKE = "lake"
    LAKE_SNAPSHOT = "lake-snapshot"
    LAKE_COSTS = "lake-costs"
    LAKE_EXECUTORS = "lake-executors"
    LAKE_TRANSFORM = "lake-transform"
    LAKE_SQL = "lake-sql"
    LAKE_TRANSACTION = "lake-transaction"
    LAKE_DELAY = "lake-delay"
    LAKE_IDLE = "lake-idle"
    VERIFY = "verify"
    FORMATS = "formats"
    MYSQL = "mysql"
    MYSQL_SNAPSHOT = "mysql-snapshot"
    DELIVERY = "delivery"
    DELIVERY_DELAY = "delivery-delay"
    DELIVERY_FANOUT = "delivery-fanout"
    DELIVERY_IDLE = "delivery-idle"
    DELIVERY_SLOW = "delivery-slow"
    DELIVERY_GRPC = "delivery-grpc"
    DELIVERY_ATTACKS = "delivery-attacks"
    PUSH_FILES = "push-files"
    PUSH_KAFKA = "push-kafka"
    PUSH_KAFKA_DELAY = "push-kafka-delay"
    PUSH_RABBITMQ = "push-rabbitmq"
    PUSH_NATS = "push-nats"
    PUSH_REDIS = "push-redis"
    PUSH_WEBHOOK = "push-webhook"


# What has parts of its own.
WHOLE = {
    Part.DELIVERY: (
        Part.DELIVERY_DELAY,
        Part.DELIVERY_FANOUT,
        Part.DELIVERY_IDLE,
        Part.DELIVERY_SLOW,
        Part.DELIVERY_GRPC,
        Part.DELIVERY_ATTACKS,
    )
}


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the measurements take place, and how large they are."""

    database: PostgresDatabase
    scale: Scale
    runs: int
    table_rows: Sequence[int] = lake.SIZES  # of the tables of the lake, at full size

    def stream(self) -> Section:
        """The backlog through everyone, each run from a slot of its own made before the backlog."""
        slots = [f"bench_{who}_{run}" for who in "hdp" for run in range(self.runs)]
        for slot in slots:
            workload.create_slot(self.database, slot)
        console.print(f"stream: loading {self.scale.changes:,} changes")
        end = workload.load_backlog(self.database, self.scale.transactions)
        self.database.execute("CHECKPOINT")
        scale, database = self.scale, self.database

        def headrace(run: int, folder: Path) -> Outcome:
            return headrace_run.stream(database, f"bench_h_{run}", scale=scale, folder=folder)

        def debezium(run: int, folder: Path) -> Outcome:
            slot = f"bench_d_{run}"
            return peers.debezium_stream(database, slot, changes=scale.changes, folder=folder)

        def limit(run: int, folder: Path) -> Outcome:
            slot = f"bench_p_{run}"
            return peers.pg_recvlogical(
                database, slot, changes=scale.changes, end=end, folder=folder
            )

        runners = self._race(
            "stream", {"Headrace": headrace, "Debezium": debezium, "pg_recvlogical": limit}
        )
        for slot in slots:
            workload.drop_slot(database, slot)
        targets = [Target("Debezium", 4, aim=5), Target("pg_recvlogical", 0.6, aim=0.75)]
        return Race("Changes → durable log", runners, targets)

    def snapshot(self) -> Section:
        """A whole table through everyone."""
        console.print(f"snapshot: loading {self.scale.rows:,} rows")
        workload.load_copy(self.database, self.scale.rows)
        self.database.execute("CHECKPOINT")
        scale, database = self.scale, self.database

        def headrace(run: int, folder: Path) -> Outcome:
            return headrace_run.snapshot(database, f"copy_h_{run}", scale=scale, folder=folder)

        def debezium(run: int, folder: Path) -> Outcome:
            slot = f"copy_d_{run}"
            return peers.debezium_snapshot(database, slot, rows=scale.rows, folder=folder)

        def limit(_: int, folder: Path) -> Outcome:
            return peers.copy(database, rows=scale.rows, folder=folder)

        runners = self._race(
            "snapshot", {"Headrace": headrace, "Debezium": debezium, "COPY": limit}
        )
        database.drop_slots()
        return Race("Snapshot → durable log", runners, [Target("Debezium", 3, aim=5)])

    def latency(self) -> Section:
        """From commit to client."""
        seconds = max(1.0, latency.SECONDS * min(1.0, self.scale.factor * 4))
        changes = round(seconds * latency.RATE)
        console.print(f"latency: {changes:,} changes at {latency.RATE:,} a second")
        with temporary_folder() as folder:
            return latency.measure(self.database, folder, changes=changes)

    def memory(self) -> Section:
        """One transaction of many rows."""
        console.print(f"memory: one transaction of {self.scale.rows:,} rows")
        with temporary_folder() as folder:
            return memory.measure(self.database, folder, rows=self.scale.rows)

    def lake(self) -> Section:
        """From the log into Delta tables of several sizes."""
        factor = self.scale.factor
        sizes = [lake.Size.scaled(rows, factor) for rows in self.table_rows]
        with temporary_folder() as folder:
            return lake.measure(sizes, folder, runs=self.runs, say=console.print)

    def lake_costs(self) -> Section:
        """Past versions, many tables, readers."""
        console.print("lake-costs: past versions, many tables, readers")
        with temporary_folder() as folder:
            return lake_costs.figures(folder, factor=min(1.0, self.scale.factor))

    def lake_executors(self) -> Section:
        """Two executors beside one."""
        console.print("lake-executors: two executors beside one, on a cluster of their own")
        return self._compared(lake_variants.EXECUTORS)

    def lake_transform(self) -> Section:
        """A transform beside none."""
        console.print("lake-transform: some columns and rows beside all of them")
        return self._compared(lake_variants.TRANSFORM)

    def lake_sql(self) -> Section:
        """Rows that Spark computes beside those that it does not."""
        console.print("lake-sql: a statement beside none")
        return self._compared(lake_variants.SQL)

    def _compared(self, compared: lake_variants.Comparison) -> Section:
        factor = min(1.0, self.scale.factor)
        with temporary_folder() as folder:
            return lake_variants.measure(
                compared, folder, factor=factor, runs=self.runs, say=console.print
            )

    def lake_transaction(self) -> Section:
        """One transaction of many rows."""
        with temporary_folder() as folder:
            factor = min(1.0, self.scale.factor)
            return lake_transaction.measure(folder, factor=factor, say=console.print)

    def lake_delay(self) -> Section:
        """From commit to a Delta table."""
        seconds = max(5.0, lake_whole.DELAY_SECONDS * min(1.0, self.scale.factor * 4))
        console.print(f"lake-delay: {seconds:.0f} s on {self.scale.rows:,} rows")
        workload.load_copy(self.database, self.scale.rows)
        with temporary_folder() as folder:
            return lake_whole.delay(self.database, folder, rows=self.scale.rows, seconds=seconds)

    def lake_snapshot(self) -> Section:
        """A whole table all the way into a Delta table."""
        console.print(f"lake-snapshot: loading {self.scale.rows:,} rows")
        workload.load_copy(self.database, self.scale.rows)
        self.database.execute("CHECKPOINT")
        rows, database = self.scale.rows, self.database

        def headrace(_: int, folder: Path) -> Outcome:
            return lake_whole.snapshot(database, rows=rows, folder=folder)

        def debezium(run: int, folder: Path) -> Outcome:
            return peers.debezium_snapshot(database, f"lake_d_{run}", rows=rows, folder=folder)

        # Debezium stores nothing: it is what reading the table alone costs elsewhere.
        runners = self._race(
            "lake-snapshot", {"Headrace": headrace, "Debezium, into nothing": debezium}
        )
        database.drop_slots()
        return Race("Snapshot → Delta table", runners, [])

    def lake_idle(self) -> Section:
        """A pipeline with nothing to do."""
        seconds = max(1.0, lake_whole.IDLE_SECONDS * min(1.0, self.scale.factor * 4))
        console.print(f"lake-idle: looking on for {seconds:.0f} s")
        workload.load_copy(self.database, IDLE_ROWS)
        with temporary_folder() as folder:
            return lake_whole.idle(self.database, folder, rows=IDLE_ROWS, seconds=seconds)

    def verify(self) -> Section:
        """Every row of a Delta table compared with its source."""
        rows = max(1, round(lake_verify.ROWS * self.scale.factor))
        console.print(f"verify: loading {rows:,} rows")
        workload.load_copy(self.database, rows)
        with temporary_folder() as folder:
            return lake_verify.measure(self.database, folder, rows=rows)

    def formats(self) -> Section:
        """A change in every format."""
        changes = max(formats.PER_TRANSACTION, round(formats.CHANGES * self.scale.factor))
        console.print(f"formats: {changes:,} changes")
        return formats.measure(changes=changes, turns=self.runs * formats.TURNS)

    def mysql(self) -> Section:
        """The backlog through MariaDB's binary log."""
        with mysql.server() as server, server.database() as database:
            backlog = mysql.Backlog(database, self.scale)
            console.print(f"mysql: loading {self.scale.changes:,} changes")
            backlog.load()
            runners = self._race(
                "mysql",
                {
                    "Headrace": lambda _, folder: backlog.measured("headrace", folder),
                    "python-mysql-replication": lambda _, folder: backlog.measured("peer", folder),
                    "mariadb-binlog --raw": lambda _, folder: backlog.raw(folder),
                },
            )
        targets = [Target("python-mysql-replication", 8, aim=8)]
        return Race("MariaDB's binary log → durable log", runners, targets)

    def mysql_snapshot(self) -> Section:
        """A whole table of MariaDB."""
        with mysql.server() as server, server.database() as database:
            backlog = mysql.Backlog(database, self.scale)
            console.print(f"mysql-snapshot: loading {self.scale.rows:,} rows")
            backlog.load_copy()
            runners = self._race(
                "mysql-snapshot",
                {
                    "Headrace": lambda _, folder: backlog.measured("snapshot", folder),
                    "PyMySQL, into nothing": lambda _, folder: backlog.measured("select", folder),
                    "mariadb-dump": lambda _, folder: backlog.dumped(folder),
                },
            )
        return Race("MariaDB snapshot → durable log", runners, [])

    def delivery_delay(self) -> Section:
        """From commit to many clients."""
        seconds = self._short(delivery.SECONDS)
        console.print(f"delivery-delay: {delivery.SUBSCRIBERS} clients, {seconds:.0f} s for each")
        with temporary_folder() as folder:
            measured = delivery.delays(self.database, folder, seconds=seconds)
        return delivery_report.delays(
            measured, subscribers=delivery.SUBSCRIBERS, rate=delivery.RATE
        )

    def delivery_fanout(self) -> Section:
        """As much as one process can tell."""
        seconds = self._short(delivery.OFFER_SECONDS)
        with temporary_folder() as folder:
            measured = delivery.fanout(self.database, folder, seconds=seconds, say=console.print)
        return delivery_report.fanout(measured)

    def delivery_idle(self) -> Section:
        """Clients that are only there."""
        subscribers = max(1, round(delivery.IDLE * min(1.0, self.scale.factor)))
        seconds = self._short(delivery.IDLE_SECONDS)
        console.print(f"delivery-idle: {subscribers:,} clients")
        with temporary_folder() as folder:
            measured = delivery.idle(
                self.database, folder, subscribers=subscribers, seconds=seconds
            )
        return delivery_report.idle(measured)

    def delivery_slow(self) -> Section:
        """Clients that stop reading."""
        console.print(f"delivery-slow: {delivery.STUCK} clients of each protocol")
        with temporary_folder() as folder:
            measured = delivery.slow(self.database, folder, seconds=self._short(delivery.SECONDS))
        return delivery_report.slow(measured, stuck=delivery.STUCK)

    def delivery_grpc(self) -> Section:
        """The same log to one subscriber and to many."""
        console.print("delivery-grpc: one subscriber and many, beside a bare server")
        factor = min(1.0, self.scale.factor)
        with temporary_folder() as folder:
            return delivery_grpc.deliveries(folder, factor=factor, runs=self.runs)

    def delivery_attacks(self) -> Section:
        """Polls beside attacks."""
        console.print("delivery-attacks: a server, a client that polls, and others that attack")
        with temporary_folder() as folder:
            return attacks.measure(folder)

    def push(self, deliveries: Callable[..., Section]) -> Section:
        """From the log to another system."""
        console.print("push: a query's batches, beside a loop")
        factor = min(1.0, self.scale.factor)
        with temporary_folder() as folder:
            return deliveries(folder, factor=factor, runs=self.runs)

    def push_kafka_delay(self) -> Section:
        """From commit to a consumer."""
        console.print("push-kafka-delay: a capture, a pipeline, a broker and a consumer")
        with temporary_folder() as folder:
            return push_kafka.delay(self.database, folder)

    def _short(self, seconds: float) -> float:
        """A duration at this scale."""
        return max(1.0, seconds * min(1.0, self.scale.factor * 4))

    def _race(
        self, name: str, runners: Mapping[str, Callable[[int, Path], Outcome]]
    ) -> list[Runner]:
        """Everyone once, then everyone again: what slows the machine for a while slows them all."""
        outcomes: dict[str, list[Outcome]] = {who: [] for who in runners}
        for run in range(self.runs):
            for who, measured in runners.items():
                step = f"{name}: run {run + 1} of {self.runs}: {who}"
                with console.status(step), temporary_folder() as folder:
                    outcome = measured(run, folder)
                outcomes[who].append(outcome)
                console.print(
                    f"{step} {outcome.rate:,.0f} rows/s "
                    f"({outcome.rows:,} rows in {outcome.seconds:.2f} s)"
                )
        return [Runner(who, done) for who, done in outcomes.items()]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for one run."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def parts(only: Sequence[Part] | None) -> list[Part]:
    """What is measured: each part of what was asked for, or everything."""
    asked = only or [part for part in Part if part not in WHOLE]
    return [part for each in asked for part in WHOLE.get(each, (each,))]


def measure(
    part: Part, server: PostgresServer, bench_of: Callable[[PostgresDatabase], Bench]
) -> Section:
    """One part, in a database of its own."""
    with server.database() as database:
        workload.create(database)
        bench = bench_of(database)
        measurements: dict[Part, Callable[[], Section]] = {
            Part.STREAM: bench.stream,
            Part.SNAPSHOT: bench.snapshot,
            Part.LATENCY: bench.latency,
            Part.MEMORY: bench.memory,
            Part.LAKE: bench.lake,
            Part.LAKE_SNAPSHOT: bench.lake_snapshot,
            Part.LAKE_COSTS: bench.lake_costs,
            Part.LAKE_EXECUTORS: bench.lake_executors,
            Part.LAKE_TRANSFORM: bench.lake_transform,
            Part.LAKE_SQL: bench.lake_sql,
            Part.LAKE_TRANSACTION: bench.lake_transaction,
            Part.LAKE_DELAY: bench.lake_delay,
            Part.LAKE_IDLE: bench.lake_idle,
            Part.VERIFY: bench.verify,
            Part.FORMATS: bench.formats,
            Part.MYSQL: bench.mysql,
            Part.MYSQL_SNAPSHOT: bench.mysql_snapshot,
            Part.DELIVERY_DELAY: bench.delivery_delay,
            Part.DELIVERY_FANOUT: bench.delivery_fanout,
            Part.DELIVERY_IDLE: bench.delivery_idle,
            Part.DELIVERY_SLOW: bench.delivery_slow,
            Part.DELIVERY_GRPC: bench.delivery_grpc,
            Part.DELIVERY_ATTACKS: bench.delivery_attacks,
            Part.PUSH_FILES: partial(bench.push, push_files.deliveries),
            Part.PUSH_KAFKA: partial(bench.push, push_kafka.deliveries),
            Part.PUSH_KAFKA_DELAY: bench.push_kafka_delay,
            Part.PUSH_RABBITMQ: partial(bench.push, partial(push_queues.deliveries, "RabbitMQ")),
            Part.PUSH_NATS: partial(bench.push, partial(push_queues.deliveries, "NATS")),
            Part.PUSH_REDIS: partial(bench.push, partial(push_queues.deliveries, "Redis")),
            Part.PUSH_WEBHOOK: partial(bench.push, push_webhook.deliveries),
        }
        section = measurements[part]()
    console.print(report.terminal(section))
    return section


def main(
    only: Annotated[list[Part] | None, typer.Option(help="Measure just this; repeatable.")] = None,
    scale: Annotated[float, typer.Option(min=0.0001, help="1 is the full size.")] = 1.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each; the best counts.")] = 3,
    rows: Annotated[
        list[int] | None, typer.Option(help="Just a lake table of so many rows; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write the page; a full run has RESULTS.md.")
    ] = None,
) -> None:
    """Measure Headrace beside Debezium, pg_recvlogical, COPY and delta-rs, on this machine."""
    install = postgres_installs()[POSTGRES]
    facts = machine.facts(install, shlex.join(["python", "-m", "bench", *sys.argv[1:]]))
    with PostgresServer(install, settings=SETTINGS) as server:
        chosen, sizes = parts(only), rows or lake.SIZES
        sections = [
            measure(part, server, lambda database: Bench(database, Scale(scale), runs, sizes))
            for part in chosen
        ]
    if scale != 1:
        facts["Size"] = f"{scale:g} of the full one: the JVM is not warm, ratios mean nothing"
        console.print(f"Size: {facts['Size']}")
    if output is None and not only and not rows and scale == 1:
        output = RESULTS
    if output is not None:
        counted = {"Counted": f"the best of {runs} runs"}
        output.write_text(report.markdown(sections, facts | counted), "utf-8")
        console.print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
