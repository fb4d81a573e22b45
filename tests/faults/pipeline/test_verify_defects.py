"""`verify` finds what tables would lose if Headrace did not follow a thing that it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from headrace.change.event import Batch, Change, Op, Table
from headrace.log import Log
from headrace.sinks.verification import TableOutcome
from headrace.testing import Place, wait_until
from tests.pipeline.verifying import PATIENCE, FollowingLake, places_of, run

pytestmark = [pytest.mark.requirement("P-11"), pytest.mark.live]

ROWS = "CREATE TABLE item (id integer PRIMARY KEY, note varchar(9), extra varchar(9))"
OTHER = "CREATE TABLE other (id integer PRIMARY KEY)"
VALUES = "INSERT INTO item VALUES (1, 'a', 'b'), (2, 'c', 'd')"
Patch = tuple[str, object]  # what stands there, and what it is replaced by


class ForgetfulLog(Log):
    """A log that stores less than a source gives."""

    def register(self, table: Table) -> Table:
        """Store columns by their names alone, without defaults and foreign keys."""
        columns = tuple(
            msgspec.structs.replace(column, number=0, initial_default="")
            for column in table.columns
        )
        return super().register(msgspec.structs.replace(table, columns=columns, references=()))

    def append(self, source: str, batch: Batch) -> int:
        """Store all but the ends of tables."""
        kept = [change for change in batch.changes if not _is_dropped(change)]
        return super().append(source, Batch(kept, batch.resume))


def _is_dropped(change: Change) -> bool:
    return change.op is Op.SCHEMA and b'"dropped":true' in (change.after or b"")


@dataclass(frozen=True, slots=True)
class Defect:
    """A thing that is not followed: in which source, by which statements it shows."""

    name: str
    kind: str
    statements: tuple[str, ...]
    log: type[Log] = Log
    patches: tuple[Patch, ...] = ()
    before: tuple[str, ...] = (ROWS, VALUES)
    surplus: int = 0
    differing: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def by_name(kind: str, name: str, *statements: str) -> Defect:
    """Columns are known by their names alone."""
    return Defect(name, kind, statements, log=ForgetfulLog, differing=2)


ADDED = "ALTER TABLE item ADD COLUMN more varchar(9) DEFAULT 'x'"
RENAMED = "ALTER TABLE item RENAME COLUMN note TO remark"
READDED = "ALTER TABLE item DROP COLUMN note, ADD COLUMN note varchar(9)"
PARTS = (
    "CREATE TABLE item (id integer, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF item FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE high PARTITION OF item FOR VALUES FROM (10) TO (20)",
    "INSERT INTO item VALUES (1), (11), (12)",
)
FAMILY = (
    "CREATE TABLE parent (id integer PRIMARY KEY)",
    "CREATE TABLE item (id integer PRIMARY KEY, p integer, "
    "FOREIGN KEY (p) REFERENCES parent (id) ON DELETE CASCADE)",
    "INSERT INTO parent VALUES (1), (2)",
    "INSERT INTO item VALUES (1, 1), (2, 1), (3, 2)",
)
UNLOOKED: Patch = ("headrace.sources.postgres.looks._reason", lambda *_: "")
UNMARKED: Patch = ("headrace.sources.postgres.publications.publication_marks", lambda *_: {})
UNALTERED: Patch = ("headrace.sources.postgres_events.altered._is_altered", lambda *_: False)

DEFECTS = [
    by_name("postgres", "default of a new column", ADDED),
    by_name("mysql", "default of a new column", ADDED),
    by_name("postgres", "renamed column", RENAMED),
    by_name("mysql", "column dropped and added", READDED),
    Defect("dropped table", "postgres", ("DROP TABLE item",), log=ForgetfulLog, surplus=2),
    Defect("dropped table", "sqlite", ("DROP TABLE item",), log=ForgetfulLog, surplus=2),
    Defect(
        "rewritten rows",
        "postgres",
        ("ALTER TABLE item ALTER note TYPE varchar(9) USING note || '!'",),
        patches=(UNLOOKED,),
        differing=2,
    ),
    Defect(
        "detached partition",
        "postgres",
        ("ALTER TABLE item DETACH PARTITION high",),
        before=PARTS,
        patches=(UNLOOKED,),
        surplus=2,
    ),
    Defect(
        "edited publication",
        "postgres",
        (
            "ALTER PUBLICATION headrace_shop SET (publish = 'insert')",
            "UPDATE item SET note = 'z' WHERE id = 1",
            "ALTER PUBLICATION headrace_shop SET (publish = 'insert, update, delete, truncate')",
        ),
        patches=(UNMARKED,),
        differing=1,
    ),
    Defect(
        "renamed column", "postgres_events", (RENAMED,), patches=(UNALTERED,), differing=2
    ),
    Defect(
        "detached partition",
        "postgres_events",
        ("ALTER TABLE item DETACH PARTITION high",),
        before=PARTS,
        patches=(UNALTERED,),
        surplus=2,
    ),
    Defect(
        "foreign key that cascades",
        "mysql",
        ("DELETE FROM parent WHERE id = 1",),
        before=FAMILY,
        log=ForgetfulLog,
        surplus=2,
    ),
]  # fmt: skip


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Fresh databases."""
    with ExitStack() as stack:
        yield places_of(stack, request, tmp_path)


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_a_defect_that_is_put_back_is_found(
    defect: Defect,
    places: Callable[[str], Place],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for target, replacement in defect.patches:
        monkeypatch.setattr(target, replacement)
    place = places(defect.kind)
    run(place, *defect.before, OTHER)
    place.altered()
    lake = FollowingLake(spark, tmp_path, place.source(), log=defect.log)

    def found() -> bool:
        verified = lake.verify(f"{place.schema}.item").verification
        return [(each.outcome, each.surplus, each.differing) for each in verified.tables] == [
            (TableOutcome.DIFFERS, defect.surplus, defect.differing)
        ]

    with lake.running():
        run(place, *defect.statements)
        place.altered()
        wait_until(found, timeout=PATIENCE, message="the difference is found")
        # It is no difference of a moment, which ends when the source has looked at its catalogs.
        run(place, "INSERT INTO other VALUES (1)")
        lake.until_stored(f"{place.schema}.other")
        assert found()
