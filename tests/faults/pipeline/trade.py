"""A log made by hand under a pipeline that dies again and again, and what must be true of it."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
from deltalake import DeltaTable

from headrace.change.event import Change, Column, Op, Table
from headrace.sinks.lake.deltalog import DeltaLog
from headrace.sinks.lake.storage import Folder
from tests.faults.pipeline.outside import Outside
from tests.faults.pipeline.runner import AUDIT, Orders, Run, Told
from tests.sinks.lake import Row, Shop, ordered, put, remove, schema, truncate


class Runner(Outside[Told]):
    """The pipeline's process."""

    def __init__(self, orders: Orders) -> None:
        super().__init__("runner", msgspec.json.encode(orders).decode(), Path(orders.folder), Told)

    def run(self, **order: Any) -> Told:
        """Carry all that is in the log."""
        return self.does(Run(**order))

    def die(self, **order: Any) -> None:
        """Carry what is in the log until it kills itself; nothing of it is left then."""
        self.await_ready()
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.dies_of(Run(**order))
        self.close()
        _, alive = psutil.wait_procs(started, timeout=120)
        assert not alive, f"processes outlive the one that started them: {alive}"


class Trade(Shop):
    """A shop whose tables change at random, all in one folder with its pipeline."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder)
        self._random = Random(seed)
        self._next = 0
        self._kept: dict[str, Table] = {}
        self._there: dict[str, set[int]] = {}
        for name in ("orders", "customers", "returns"):
            self.begin(name)

    @property
    def names(self) -> list[str]:
        """Every table."""
        return list(self._kept)

    def begin(self, name: str) -> None:
        """One table more."""
        self._kept[name] = self.table(name)
        self._there[name] = set()
        self.fill(name, 30)

    def fill(self, name: str, count: int) -> None:
        """So many rows more, in one transaction."""
        self.commit(*(self._insert(name) for _ in range(count)))

    def go_on(self, transactions: int = 8) -> None:
        """Every table changes in many ways."""
        for name in self.names:
            self.commit(self._insert(name), self._update(name))
        for _ in range(transactions):
            some = self._random.choices(self.names, k=self._random.randint(1, 6))
            self.commit(*(self._anything(name) for name in some))
        self.fill(self._random.choice(self.names), 5)

    def empty(self, name: str) -> None:
        """TRUNCATE, and rows after it."""
        self._there[name].clear()
        self.commit(truncate(self._kept[name]), self._insert(name))

    def add_column(self, name: str) -> None:
        """A column more, which a row then has."""
        known = self._kept[name]
        added = Column(f"extra{len(known.columns)}", "integer[]")
        self._alter(name, [*known.columns, added])

    def change_columns(self, name: str) -> None:
        """A column is dropped and another gets a wider type, so that every file is written anew."""
        known = self._kept[name].columns
        wider = Column("amount", "numeric(20,4)")
        self._alter(name, [wider if c.name == "amount" else c for c in known if c.name != "note"])

    def copy_again(self, name: str) -> None:
        """A full copy, as `headrace snapshot` puts it into the log."""
        known = self._kept[name]
        there = self.expected_images(name)
        self.commit(truncate(known, snapshot=True))
        self.commit(*(put(known, Op.READ, **row) for row in there))

    def expected_images(self, name: str) -> list[Row]:
        """The rows that a table has, made up anew."""
        return [self._row(name, number) for number in sorted(self._there[name])]

    def _alter(self, name: str, columns: list[Column]) -> None:
        self._kept[name] = self.table(name, columns)
        self.commit(schema(self._kept[name]), self._insert(name))

    def _anything(self, name: str) -> Change:
        what = self._random.choice([self._insert, self._update, self._move, self._remove])
        return what(name) if self._there[name] else self._insert(name)

    def _insert(self, name: str) -> Change:
        self._next += 1
        self._there[name].add(self._next)
        return put(self._kept[name], **self._row(name, self._next))

    def _update(self, name: str) -> Change:
        row = self._row(name, self._pick(name))
        if self._random.random() < 0.5:
            row.pop("note", None)  # not sent, so it stays as it is
        return put(self._kept[name], Op.UPDATE, **row)

    def _move(self, name: str) -> Change:
        old = self._pick(name)
        self._there[name].remove(old)
        self._next += 1
        self._there[name].add(self._next)
        row = self._row(name, self._next)
        if self._random.random() < 0.5:
            row.pop("note", None)
        return put(self._kept[name], Op.UPDATE, was={"id": old}, **row)

    def _remove(self, name: str) -> Change:
        old = self._pick(name)
        self._there[name].remove(old)
        return remove(self._kept[name], id=old)

    def _pick(self, name: str) -> int:
        return self._random.choice(sorted(self._there[name]))

    def _row(self, name: str, number: int) -> Row:
        made: Row = {
            "id": number,
            "status": self._random.choice(["new", "paid", "sent"]),
            "amount": f"{self._random.randrange(10**6) / 100:.2f}",
            "note": f"{self._random.random()}",
        }
        if self._kept[name].columns[2].type == "numeric(20,4)":
            made["amount"] += "00"
        names = [column.name for column in self._kept[name].columns]
        return {each: made.get(each, [number, None]) for each in names}

    # -- what must be true ------------------------------------------------------------------------

    def check_moment(self) -> None:
        """Whatever has just died: a reader sees every table as it was after some transaction."""
        for name in self.names:
            if not (self.path / "public" / name / "_delta_log").exists():
                continue
            mark = self.delta(name).transaction_version(f"headrace.sequence:{self.log.epoch}") or 0
            expected = self.expected(name, mark) if mark else []
            # Columns have a commit of their own, before the rows that are without them.
            there = {field.name for field in self.delta(name).schema().fields}
            columns = [each for each in (expected[0] if expected else ()) if each in there]
            found, wanted = (
                ordered([{each: row[each] for each in columns} for row in rows])
                for rows in (self.rows(name), expected)
            )
            assert found == wanted, f"{name} is not as of sequence {mark}"

    def check_end(self) -> None:
        """Everything has arrived, once."""
        for name in self.names:
            assert self.rows(name) == self.expected(name), f"{name} differs"
        sequences = DeltaTable(str(self.folder / AUDIT)).to_pyarrow_table(columns=["sequence"])
        found = sorted(sequences["sequence"].to_pylist())
        assert found == list(range(1, self.log.latest_sequence + 1)), "the history differs"

    def orphans(self) -> list[Path]:
        """Files of tables that no Delta log has."""
        homes = [*(self.path / "public" / name for name in self.names), self.folder / AUDIT]
        return [file for home in homes for file in orphans_in(home)]


def orphans_in(home: Path) -> list[Path]:
    """Files in a table's folder that its Delta log does not have."""
    state = DeltaLog(Folder.of(str(home), {})).read()
    assert state is not None
    vectors = (file.vector.file for file in state.files.values() if file.vector)
    known = {home / path for path in (*state.files, *vectors)}
    there = {path for path in home.rglob("*") if path.is_file()}
    hidden = ("_delta_log", "_headrace")
    return sorted(path for path in there - known if not any(name in path.parts for name in hidden))
