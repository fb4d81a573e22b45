"""What foreign keys do to rows without a change event, the tables sink does too."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from headrace.change import record
from headrace.change.columns import schema_payload
from headrace.change.event import BeforeKind, Change, Column, Op, Reference, Table
from headrace.change.replay import Replay, TableName
from headrace.errors import SinkUnavailable
from headrace.pipeline.options import Options
from headrace.pipeline.reading import DiskLog, PipelineLog
from headrace.sinks import LogRange
from headrace.sinks.lake.delta import Delta
from headrace.sinks.lake.plan import TableRef
from headrace.sinks.tables import cascades
from headrace.sinks.tables.cascades import Step, read_steps, ref_of
from headrace.sinks.tables.foreign_keys import family_of
from headrace.sinks.tables.parquet import SORTED
from headrace.sinks.tables.rewrite import RewriteWork
from headrace.sinks.tables.sink import TablesWriter
from headrace.sources.redact import ColumnRules
from headrace.transforms.rules import TableTransform, described
from tests.effort import times
from tests.sinks.lake import SOURCE, Lake, Row, change, ordered, put, remove, schema, truncate
from tests.sinks.plain import PlainLake, rewritten

pytestmark = pytest.mark.requirement("P-39")

_image = msgspec.json.encode


def _reference(columns: str, parent: str, named: str, delete: str, update: str) -> Reference:
    names, others = tuple(columns.split()), tuple(named.split())
    return Reference(names, "public", parent, others, delete, update)


def _columns(key: str, *others: str) -> tuple[Column, ...]:
    numbers = [Column(name, "bigint", key=True) for name in key.split()]
    return (*numbers, *(Column(name, "bigint") for name in others), Column("note", "text"))


_FIRM = _columns("id", "code")
_PERSON = _columns("id", "firm", "boss")
_BADGE = _columns("id", "code", "person")
_PART = _columns("firm no")
_BIT = _columns("id", "firm", "no")
_REFERENCES = {
    "person": (
        _reference("firm", "firm", "id", "cascade", "cascade"),
        _reference("boss", "person", "id", "set null", "cascade"),
    ),
    "badge": (
        _reference("code", "firm", "code", "set null", "set null"),
        _reference("person", "person", "id", "cascade", "cascade"),
    ),
    "part": (_reference("firm", "firm", "id", "cascade", "cascade"),),
    "bit": (_reference("firm no", "part", "firm no", "cascade", "cascade"),),
}
_TABLES = {"firm": _FIRM, "person": _PERSON, "badge": _BADGE, "part": _PART, "bit": _BIT}


class Office(PlainLake):
    """A database with foreign keys, of which the log has no word, and a lake."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> None:
        super().__init__(patch, folder, **settings)
        self.tables = {name: self.family(name) for name in _TABLES}
        self.commit(*map(schema, self.tables.values()))

    def family(self, name: str, columns: tuple[Column, ...] | None = None) -> Table:
        """A table with its foreign keys."""
        described = self.table(name, columns or _TABLES[name])
        return self.log.register(
            msgspec.structs.replace(described, references=_REFERENCES.get(name, ()), version=0)
        )

    def put(self, name: str, **row: Any) -> Change:
        """A new row."""
        whole: Any = {each.name: row.get(each.name) for each in self.tables[name].columns}
        return put(self.tables[name], **whole)

    def remove(self, name: str, **row: Any) -> Change:
        """A row that is gone, and what is known of it."""
        table = self.tables[name]
        key = _image({each: row[each] for each in table.key})
        gone = remove(table, **row)
        return msgspec.structs.replace(gone, key=key, before_kind=BeforeKind.FULL)

    def update(self, name: str, old: Row, **new: Any) -> Change:
        """A row that has other values, both images whole."""
        table, row = self.tables[name], {**old, **new}
        return change(
            Op.UPDATE,
            table,
            key=_image({each: row[each] for each in table.key}),
            before=_image(old),
            before_kind=BeforeKind.FULL,
            after=_image(row),
        )

    def write_all(self, parts: int = 2) -> None:
        """All that there is, as one batch."""
        self.write(self.log.latest_sequence, parts)

    def differences(self) -> list[str]:
        """The tables that are not what the log replays to."""
        names = [name for name in self.tables if (self.path / "public" / name).exists()]
        return [
            f"{name}: {self.current(name)} instead of {self.expected(name, self.written)}"
            for name in names
            if self.current(name) != self.expected(name, self.written)
        ]

    def current(self, name: str) -> list[Row]:
        """The rows of now."""
        rows = [row for row in self.rows(name, own=True) if row.get("_current", True)]
        names = [column.name for column in self.tables[name].columns]
        return ordered([{each: row[each] for each in names} for row in rows])

    @property
    def failed(self) -> dict[str, str]:
        """The tables that are not followed, and why."""
        return {each.table: each.reason for each in self.writer.failed_tables()}


@pytest.fixture(params=["rows", "history", "rewrite"])
def office(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Office:
    settings = {"deletes": "rewrite"} if request.param == "rewrite" else {"keep": request.param}
    return Office(monkeypatch, tmp_path, **settings)


def _filled(office: Office) -> None:
    """Three firms with three people each, and what hangs on them."""
    office.commit(*(office.put("firm", id=n, code=100 + n) for n in (1, 2, 3)))
    people = [
        office.put("person", id=10 * firm + n, firm=firm, boss=10 * firm if n else None, note="p")
        for firm in (1, 2, 3)
        for n in (0, 1, 2)
    ]
    office.commit(*people)
    badges = [(10 * firm + n, firm) for firm in (1, 2, 3) for n in (0, 1)]
    office.commit(*(office.put("badge", id=p, person=p, code=100 + f, note="b") for p, f in badges))
    office.commit(*(office.put("part", firm=f, no=n, note="x") for f in (1, 2, 3) for n in (1, 2)))
    bits = [(10 * firm + no, firm, no) for firm in (1, 2, 3) for no in (1, 2)]
    office.commit(*(office.put("bit", id=i, firm=f, no=n, note="y") for i, f, n in bits))


Work = Callable[[Office], Any]
_CASES: dict[str, Work] = {
    "a parent goes": lambda o: o.commit(o.remove("firm", id=1, code=101)),
    "a parent gets another key": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, id=7)
    ),
    "what children name becomes null": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, code=5)
    ),
    "a boss goes": lambda o: o.commit(o.remove("person", id=10)),
    "a boss gets another key": lambda o: o.commit(
        o.update("person", {"id": 10, "firm": 1, "boss": None, "note": "p"}, id=99)
    ),
    "a composite key": lambda o: o.commit(
        o.update("part", {"firm": 1, "no": 1, "note": "x"}, no=8), o.remove("part", firm=2, no=2)
    ),
    "a child comes before and after": lambda o: o.commit(
        o.put("person", id=60, firm=1),
        o.remove("firm", id=1, code=101),
        o.put("firm", id=1, code=101),
        o.put("person", id=61, firm=1),
        o.put("person", id=11, firm=2),
    ),
    "a parent comes again with its child, not its grandchild": lambda o: o.commit(
        o.remove("firm", id=1, code=101),
        o.put("firm", id=1, code=101),
        o.put("person", id=10, firm=1, note="again"),
    ),
    "v becomes w, and x becomes v": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, id=9),
        o.update("firm", {"id": 2, "code": 102, "note": None}, id=1),
        o.update("firm", {"id": 9, "code": 101, "note": None}, id=2),
    ),
    "a row moved by its parent goes": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, id=9),
        o.remove("part", firm=9, no=1),
        o.update("part", {"firm": 9, "no": 2, "note": "x"}, firm=3, no=3),
    ),
    "a row changes after its parent": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, id=9, code=109),
        o.update("person", {"id": 10, "firm": 9, "boss": None, "note": "p"}, note="after"),
        o.remove("firm", id=9, code=109),
    ),
    "a child comes to a firm, which goes": lambda o: o.commit(
        o.update("person", {"id": 20, "firm": 2, "boss": None, "note": "p"}, firm=1),
        o.remove("firm", id=1, code=101),
    ),
    "a child leaves a firm, which goes": lambda o: o.commit(
        o.update("person", {"id": 10, "firm": 1, "boss": None, "note": "p"}, firm=2),
        o.remove("firm", id=1, code=101),
    ),
    "the children are read anew": lambda o: o.commit(
        o.remove("firm", id=1, code=101),
        truncate(o.tables["person"], snapshot=True),
        o.put("person", id=10, firm=2),
        o.remove("firm", id=2, code=102),
    ),
}


@pytest.mark.parametrize("together", [False, True], ids=["later", "in one batch"])
@pytest.mark.parametrize("case", _CASES)
def test_rows_follow_those_that_they_name(office: Office, case: str, together: bool) -> None:
    _filled(office)
    if not together:
        office.write_all()
    _CASES[case](office)
    office.write_all()
    assert office.failed == {}
    assert office.differences() == []
    versions = [office.delta(name).version() for name in office.tables]
    office.repeat(3)
    office.open()
    office.repeat(1)
    assert office.differences() == []
    assert [office.delta(name).version() for name in office.tables] == versions


def test_history_has_what_was_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, tmp_path, keep="history")
    _filled(office)
    office.write_all()
    firm = {"id": 1, "code": 101, "note": None}
    office.commit(office.update("firm", firm, id=8))
    office.commit(office.update("firm", firm | {"id": 8}, id=9))
    office.commit(office.remove("firm", id=9, code=101))
    office.write_all()
    past = [row for row in office.rows("person", own=True) if row["id"] == 10]
    past.sort(key=lambda row: row["_valid_from"])
    assert [row["firm"] for row in past] == [1, 8, 9]
    assert [row["note"] for row in past] == ["p", "p", "p"]
    assert [row["_valid_to"] for row in past[:-1]] == [row["_valid_from"] for row in past[1:]]
    assert past[-1]["_valid_to"] is not None
    assert not any(row["_current"] for row in past)


def test_a_parent_need_not_be_in_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, tmp_path, tables=("public.person", "public.badge"))
    _filled(office)
    office.write_all()
    office.commit(office.remove("firm", id=1, code=101))
    office.write_all()
    office.commit(office.update("firm", {"id": 2, "code": 102, "note": None}, id=5, code=105))
    office.write_all()
    assert office.failed == {}
    assert office.differences() == []


def test_a_table_between_must_be_in_the_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(monkeypatch, tmp_path, tables=("public.firm", "public.badge", "public.part"))
    _filled(office)
    office.write_all()
    office.commit(office.remove("firm", id=1, code=101))
    office.write_all()
    assert list(office.failed) == ["public.badge"]
    assert "public.person" in office.failed["public.badge"]
    assert [each for each in office.differences() if not each.startswith("badge")] == []


_HIDING = {
    "masked": TableTransform(mask={"firm": None}),
    "left out": TableTransform(select=("id", "boss", "note")),
    "looked at": TableTransform(where="firm <> 3"),
}


@pytest.mark.parametrize("how", _HIDING)
def test_a_table_whose_foreign_key_is_not_stored_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    office = Office(monkeypatch, tmp_path, transforms={"public.person": _HIDING[how]})
    _filled(office)
    office.write_all()
    assert office.failed == {}
    office.commit(office.remove("firm", id=1, code=101))
    office.write_all()
    assert "a foreign key has changed rows" in office.failed["public.person"]
    assert "public.part" not in office.failed


def test_a_table_without_a_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, tmp_path)
    keyless = tuple(msgspec.structs.replace(each, key=False) for each in _PART)
    office.tables["part"] = office.family("part", keyless)
    office.commit(schema(office.tables["part"]))
    office.commit(office.put("firm", id=1), office.put("firm", id=2), office.put("part", firm=1))
    office.write_all()
    office.commit(office.remove("firm", id=1, code=None))
    office.write_all()
    assert "the table has no key" in office.failed["public.part"]


def test_foreign_keys_that_come_and_go_act_in_their_own_time(office: Office) -> None:
    _filled(office)
    free = msgspec.structs.replace(office.tables["person"], references=(), version=0)
    free = office.log.register(free)
    office.commit(office.remove("firm", id=1, code=101))
    office.commit(schema(free))
    office.commit(office.remove("firm", id=2, code=102))
    office.tables["person"] = renamed = office.log.register(
        msgspec.structs.replace(
            office.tables["person"],
            columns=_columns("id", "works_for", "boss"),
            references=(_reference("works_for", "firm", "id", "cascade", "cascade"),),
            version=0,
        )
    )
    office.commit(schema(renamed))
    office.commit(office.put("firm", id=4, code=104), office.put("person", id=70, works_for=4))
    office.commit(office.remove("firm", id=4, code=104))
    office.write_all()
    assert office.failed == {}
    assert office.differences() == []


def test_rows_that_one_change_has_changed_are_told_apart_by_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(monkeypatch, tmp_path)
    _filled(office)
    office.write_all()
    office.commit(office.update("firm", {"id": 1, "code": 101, "note": None}, id=9))
    office.write_all()
    assert isinstance(office.writer, TablesWriter)
    person = office.writer._targets[TableRef(SOURCE, "public", "person")]
    plan, files = person.layout()
    work = [RewriteWork(plan=plan, name=SORTED, whole=tuple(files))]
    done = rewritten(None, work)
    row = {"id": 11, "firm": 9, "boss": 10, "note": "p"}
    office.commit(office.update("person", row, note="meanwhile"))
    office.write_all()
    assert person.compacted(work, done)
    assert office.differences() == []


def test_tasks_of_spark_find_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path)
    firm = lake.table("firm", _FIRM)
    references = _REFERENCES["person"]
    plain = msgspec.structs.replace(lake.table("person", _PERSON), references=references, version=0)
    person = lake.log.register(plain)
    lake.commit(*(put(firm, id=n, code=n, note="f") for n in (1, 2)))
    lake.commit(
        *(
            put(person, id=n, firm=n % 2 + 1, boss=n - 4 if n > 4 else None, note="p")
            for n in range(9)
        )
    )
    lake.write()
    lake.commit(remove(firm, id=1))
    lake.write()
    assert lake.rows("person") == lake.expected("person")


@pytest.mark.parametrize("hidden", ["firm", "boss"])
def test_a_redacted_table_shows_the_foreign_keys_over_other_columns(hidden: str) -> None:
    references = _REFERENCES["person"]
    person = Table("s", "mysql", "o", "d", "public", "person", _PERSON, references=references)
    redacted = ColumnRules(exclude=(f"person.{hidden}",)).of(person)
    shown = msgspec.json.decode(described(_image(schema_payload(person)), redacted.stored))
    kept = [each.columns for each in references if hidden not in each.columns]
    assert [tuple(each["columns"]) for each in shown["foreign_keys"]] == kept


# --- what the driver holds -----------------------------------------------------------------------


def _steps(office: Office) -> list[Step]:
    """What the sink would keep of all that is not written."""
    log = PipelineLog(DiskLog(str(office.log.path)), Options())
    whole = LogRange(log, office.log.epoch, office.written, office.log.latest_sequence)
    applied = {ref_of(table): 0 for table in office.tables.values()}
    tables = {ref_of(table): table for table in office.tables.values() if table.references}
    return read_steps(whole, family_of(office.sink, tables, applied))


_IDLE: dict[str, Work] = {
    "a parent comes": lambda o: o.commit(o.put("firm", id=9, code=109)),
    "a parent gets other values": lambda o: o.commit(
        o.update("firm", {"id": 1, "code": 101, "note": None}, note="other")
    ),
    "a parent gets other values, in part": lambda o: o.commit(
        put(o.tables["firm"], Op.UPDATE, was={"id": 1}, id=1, note="other")
    ),
    "what names nothing goes": lambda o: o.commit(o.remove("bit", id=11)),
}


@pytest.mark.parametrize("case", _IDLE)
def test_nothing_is_kept_of_a_batch_that_changes_no_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    office = Office(monkeypatch, tmp_path)
    _filled(office)
    _IDLE[case](office)
    monkeypatch.setattr(cascades, "_steps", lambda *_: pytest.fail("it decodes rows"))
    assert _steps(office) == []


def test_children_that_come_with_their_parents_are_not_even_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(monkeypatch, tmp_path)
    _filled(office)
    monkeypatch.setattr(record, "rows", lambda *_: pytest.fail("it reads rows"))
    assert _steps(office) == []


def test_only_tables_that_may_follow_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(monkeypatch, tmp_path)
    _filled(office)
    office.commit(office.remove("part", firm=1, no=1))
    assert {step.ref.table for step in _steps(office)} == {"part", "bit"}


def test_a_table_with_too_many_changes_beside_a_parents_fails_alone(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascades, "_MOST_ROWS", 20)
    _filled(office)
    office.write_all()
    office.commit(*(office.put("badge", id=n) for n in range(100, 150)))
    office.write_all()
    assert office.failed == {}
    office.commit(
        *(office.put("badge", id=n) for n in range(200, 250)), office.remove("firm", id=1, code=101)
    )
    office.write_all()
    assert list(office.failed) == ["public.badge"]
    assert "more than 20 changes of public.badge" in office.failed["public.badge"]
    assert [each for each in office.differences() if not each.startswith("badge")] == []
    office.commit(truncate(office.tables["badge"], snapshot=True), office.put("badge", id=7))
    office.commit(office.remove("firm", id=2, code=102))
    office.write_all()
    assert office.failed == {}
    assert office.differences() == []


def test_too_many_parents_fail_the_tables_that_follow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascades, "_MOST_ROWS", 20)
    office = Office(monkeypatch, tmp_path)
    office.commit(*(office.put("part", firm=1, no=n) for n in range(15)))
    office.commit(*(office.put("badge", id=n) for n in range(50)))
    office.write_all()
    office.commit(*(office.put("part", firm=2, no=n) for n in range(15)))
    office.commit(*(office.remove("part", firm=1, no=n) for n in range(15)))
    office.write_all()
    assert list(office.failed) == ["public.bit"]
    assert "more than 20 changes of public.part" in office.failed["public.bit"]
    assert [each for each in office.differences() if not each.startswith("bit")] == []


@pytest.mark.parametrize(
    ("kind", "value"), [("date", "infinity"), ("bigint[]", [1, 2])], ids=["unfit", "list"]
)
def test_values_that_no_row_can_be_found_by_fail_their_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, value: Any
) -> None:
    office = Office(monkeypatch, tmp_path)
    firm = (Column("id", "bigint", key=True), Column("code", kind), Column("note", "text"))
    badge = (Column("id", "bigint", key=True), Column("code", kind), Column("person", "bigint"))
    office.tables |= {"firm": office.family("firm", firm), "badge": office.family("badge", badge)}
    office.commit(schema(office.tables["firm"]), schema(office.tables["badge"]))
    office.commit(office.put("firm", id=1, code=value), office.put("person", id=5, firm=1))
    office.commit(office.put("badge", id=7, code=value))
    office.write_all()
    office.commit(office.remove("firm", id=1, code=value))
    office.write_all()
    assert list(office.failed) == ["public.badge"]
    assert "no foreign key is followed by it" in office.failed["public.badge"]
    assert [each for each in office.differences() if not each.startswith("badge")] == []


# --- anything, in any batches --------------------------------------------------------------------


class _Work:
    """Random rows and changes that a database with these foreign keys would let pass."""

    def __init__(self, office: Office, dice: Random, *, whole: bool) -> None:
        self._office = office
        self._dice = dice
        self._whole = whole
        self._replay = Replay.of(office.log.read(0, limit=1 << 20))

    def run(self, count: int) -> None:
        for _ in range(count):
            made = [each for _ in range(self._dice.randrange(1, 5)) for each in self._one()]
            if made:
                self._office.commit(*made)

    def _one(self) -> Iterator[Change]:
        name = self._dice.choice(list(self._office.tables))
        rows, dice = self._rows(name), self._dice
        if not rows or dice.random() < 0.45:
            made = self._inserted(name)
        elif dice.random() < 0.45:
            made = self._deleted(name, dice.choice(rows))
        else:
            made = self._updated(name, dice.choice(rows))
        if made is not None:
            self._replay.apply(made)
            yield made

    def _rows(self, name: str) -> list[Row]:
        return self._replay.rows(TableName(SOURCE, "public", name))

    def _row(self, name: str) -> Row | None:
        dice, table = self._dice, self._office.tables[name]
        row: Row = {each.name: dice.randrange(12) for each in table.columns}
        for each in table.references:
            parents = self._rows(each.table)
            nullable = not set(each.columns) & set(table.key)
            if parents and (not nullable or dice.random() < 0.9):
                parent = dice.choice(parents)
                pairs = zip(each.columns, each.parent_columns, strict=True)
                row |= {column: parent[named] for column, named in pairs}
            elif nullable:
                row |= dict.fromkeys(each.columns)
            else:
                return None
        return row | {"note": str(dice.random())}

    def _free(self, name: str, row: Row, but: Row | None = None) -> bool:
        unique = [self._office.tables[name].key, *([("code",)] if name == "firm" else [])]
        return not any(
            [other[each] for each in names] == [row[each] for each in names]
            for other in self._rows(name)
            if other is not but
            for names in unique
        )

    def _inserted(self, name: str) -> Change | None:
        row = self._row(name)
        return self._office.put(name, **row) if row and self._free(name, row) else None

    def _deleted(self, name: str, row: Row) -> Change:
        key = self._office.tables[name].key
        sent = row if self._whole else {each: row[each] for each in key}
        kind = BeforeKind.FULL if self._whole else BeforeKind.KEY
        return msgspec.structs.replace(self._office.remove(name, **sent), before_kind=kind)

    def _updated(self, name: str, old: Row) -> Change | None:
        fresh, table = self._row(name), self._office.tables[name]
        if fresh is None:
            return None
        kept = [each.name for each in table.columns if self._dice.random() < 0.6]
        row = fresh | {each: old[each] for each in kept}
        parts = [each for each in table.references if not set(each.columns) <= set(kept)]
        row |= {column: fresh[column] for each in parts for column in each.columns}
        if not self._free(name, row, old):
            return None
        if self._whole:
            return self._office.update(name, old, **row)
        sent = {each: row[each] for each in row if row[each] != old[each] or each in table.key}
        was = {each: old[each] for each in table.key}
        return put(table, Op.UPDATE, was=was, **sent)


@pytest.mark.parametrize("seed", range(times(2, nightly=30)))
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in part"])
def test_random_work_in_random_batches_is_followed(
    office: Office, monkeypatch: pytest.MonkeyPatch, seed: int, whole: bool
) -> None:
    dice = Random(seed)
    if not whole:
        # The old value of what is not the key does not come.
        kept = _REFERENCES["badge"][1:]
        badge = msgspec.structs.replace(office.tables["badge"], references=kept, version=0)
        office.tables["badge"] = office.log.register(badge)
        office.commit(schema(office.tables["badge"]))
    _Work(office, dice, whole=whole).run(120)
    commit = Delta.commit

    def torn(*args: Any, **settings: Any) -> None:
        if dice.random() < 0.1:
            raise SinkUnavailable("the storage is away")
        commit(*args, **settings)

    monkeypatch.setattr(Delta, "commit", torn)
    ends = [each.sequence for each in office.log.read(0, limit=1 << 20) if each.last]
    chosen = sorted({*(end for end in ends if dice.random() < 0.2), ends[-1]})
    for upto in chosen:
        while office.written < upto:
            try:
                office.write(upto, dice.randrange(1, 4))
            except SinkUnavailable:
                if dice.random() < 0.5:
                    office.open()
        if dice.random() < 0.3:
            monkeypatch.setattr(Delta, "commit", commit)
            office.compact()
            monkeypatch.setattr(Delta, "commit", torn)
        assert office.failed == {}
        assert office.differences() == [], f"up to {upto}"
