"""Who keeps tables by canonical or etl has what the log replays to, through every DDL."""

import random
from pathlib import Path

import pytest

from headrace.change.event import Column, Op
from headrace.change.replay import Replay
from tests.effort import times
from tests.formats.consumers import consumed_canonical, consumed_etl
from tests.random_columns import STEPS, VALUES
from tests.sinks.lake import Shop, ordered, put, remove, schema, truncate


@pytest.mark.requirement("P-03")
@pytest.mark.parametrize("seed", range(times(10, nightly=100)))
def test_rows_follow_renames_drops_and_defaults(tmp_path: Path, seed: int) -> None:
    chance, shop = random.Random(seed), Shop(tmp_path)
    columns = [
        Column("id", "bigint", key=True, number=1),
        Column("a", "text", number=2),
        Column("b", "integer", number=3),
    ]
    known: set[int] = set()
    for number in range(4, 24):
        table = shop.table("orders", columns)
        shop.commit(schema(table))
        for _ in range(chance.randrange(4)):
            row = {column.name: chance.choice(VALUES[column.type]) for column in columns[1:]}
            at = chance.randrange(6)
            if at in known and chance.random() < 0.2:
                shop.commit(remove(table, id=at))
                known.remove(at)
            else:
                shop.commit(put(table, Op.UPDATE if at in known else Op.INSERT, id=at, **row))
                known.add(at)
        if chance.random() < 0.05:
            shop.commit(truncate(table))
            known.clear()
        columns = chance.choice(STEPS)(chance, list(columns), number)
    changes = shop.log.read(0, limit=10_000)
    replay = Replay.of(changes)
    (name,) = replay.tables
    for consumed in (consumed_canonical(changes), consumed_etl(changes)):
        (kept,) = consumed.values()
        assert ordered(kept.rows) == ordered(replay.rows(name))
    shop.log.close()
