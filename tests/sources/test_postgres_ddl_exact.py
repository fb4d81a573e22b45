"""After any DDL, whatever it does to rows that nobody touches, the log replays to the database."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Batch, Op
from headrace.change.replay import TableName
from headrace.sources.postgres.lookout import Lookout
from headrace.sources.postgres.resume import PostgresResume
from headrace.sources.resume import decode
from headrace.testing import PostgresDatabase, wait_until
from tests.conftest import Servers
from tests.everywhere import differences_everywhere
from tests.sources.captures import TIMEOUT
from tests.sources.capturing import Captured, captured, image
from tests.sources.ddlrows import differences

# Each has a table of its own, t, with rows 1 to 3: t (id int PRIMARY KEY, a text, b int).
ALTERATIONS: dict[str, str] = {
    "add": "ALTER TABLE t ADD c text",
    "add_constant": "ALTER TABLE t ADD c text DEFAULT 'n \"x\"', ADD d int[] DEFAULT '{1,2}'",
    "add_stable": "ALTER TABLE t ADD c timestamptz DEFAULT now()",
    "add_volatile": "ALTER TABLE t ADD c text DEFAULT gen_random_uuid()",
    "add_serial": "ALTER TABLE t ADD c serial",
    "add_generated": "ALTER TABLE t ADD c int GENERATED ALWAYS AS (b * 2) STORED",
    "drop": "ALTER TABLE t DROP a",
    "drop_add": "ALTER TABLE t DROP a; ALTER TABLE t ADD a text",
    "drop_add_at_once": "ALTER TABLE t DROP a, ADD a text DEFAULT 'again'",
    "rename": "ALTER TABLE t RENAME a TO z",
    "swap": "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
    "type": "ALTER TABLE t ALTER b TYPE bigint",
    "type_using": "ALTER TABLE t ALTER b TYPE int USING b + 100",
    "type_of_default": "ALTER TABLE t ADD c int NOT NULL DEFAULT 1; ALTER TABLE t ALTER c DROP"
    " DEFAULT; ALTER TABLE t ALTER c TYPE int USING c + id",
    "relabelled": "ALTER TABLE t ALTER a TYPE varchar",
    "zone": "SET TimeZone = 'UTC'; ALTER TABLE t ADD c timestamp DEFAULT '2026-01-01';"
    " ALTER TABLE t ALTER c TYPE timestamptz",
    "default": "ALTER TABLE t ALTER a SET DEFAULT 'later'; ALTER TABLE t ALTER b SET NOT NULL",
    "many": "ALTER TABLE t ADD c int DEFAULT 1, DROP a, ADD e text DEFAULT 'e', ALTER b TYPE text",
    "key": "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (b)",
    "full": "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t ADD c int DEFAULT 5",
    "vacuumed": "ALTER TABLE t ADD c text DEFAULT 'v'; VACUUM FULL t",
    "clustered": "ALTER TABLE t ADD c text DEFAULT 'v'; CLUSTER t USING t_pkey",
    "truncated": "TRUNCATE t; ALTER TABLE t ADD c int DEFAULT 3",
    "dropped": "DROP TABLE t",
    "made_anew": "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, q text);"
    " INSERT INTO t VALUES (7, 'x')",
    "renamed": "ALTER TABLE t RENAME TO t_renamed",
    "there_and_back": "BEGIN; ALTER TABLE t RENAME TO t_away; INSERT INTO t_away VALUES (9, 'n');"
    " ALTER TABLE t_away RENAME TO t; COMMIT",
    "moved": "ALTER TABLE t SET SCHEMA inside",
    "moved_out": "ALTER TABLE t SET SCHEMA outside",
    "names_swapped": "CREATE TABLE t_o (id int PRIMARY KEY, o int); INSERT INTO t_o VALUES (1, 1);"
    " ALTER TABLE t RENAME TO t_x; ALTER TABLE t_o RENAME TO t; ALTER TABLE t_x RENAME TO t_o",
    "label_renamed": "ALTER TYPE t_mood RENAME VALUE 'sad' TO 'blue'",
    "label_added": "ALTER TYPE t_mood ADD VALUE 'angry' BEFORE 'sad'",
    "label_of_new": "ALTER TABLE t ADD m t_mood; INSERT INTO t (id, m) VALUES (9, 'sad');"
    " ALTER TYPE t_mood RENAME VALUE 'sad' TO 'blue'",
    "attribute_of_new": "ALTER TABLE t ADD p t_pair; INSERT INTO t (id, p) VALUES (9, '(1,{sad})');"
    " ALTER TYPE t_pair DROP ATTRIBUTE y; ALTER TYPE t_pair ADD ATTRIBUTE z t_mood[]",
    "attribute_renamed": "ALTER TYPE t_pair RENAME ATTRIBUTE x TO left_one",
    "attribute_added": "ALTER TYPE t_pair ADD ATTRIBUTE z text",
    "attribute_dropped": "ALTER TYPE t_pair DROP ATTRIBUTE y",
}  # fmt: skip

# Of a partitioned table t with the same rows in t_1 and t_2, and a table t_x with the row 21.
PARTITIONED: dict[str, str] = {
    "p_add": "ALTER TABLE t ADD c text DEFAULT 'n'",
    "p_type": "ALTER TABLE t ALTER b TYPE int USING b + 1",
    "p_created": "CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (30) TO (40);"
    " INSERT INTO t VALUES (31, 'new')",
    "p_attached": "ALTER TABLE t ATTACH PARTITION t_x FOR VALUES FROM (20) TO (30)",
    "p_attached_at_once": "BEGIN; CREATE TABLE t_4 (LIKE t INCLUDING ALL); INSERT INTO t_4 VALUES"
    " (41, 'w'); ALTER TABLE t ATTACH PARTITION t_4 FOR VALUES FROM (40) TO (50); COMMIT",
    "p_detached": "ALTER TABLE t DETACH PARTITION t_1",
    "p_dropped": "DROP TABLE t_1",
    "p_truncated": "TRUNCATE t_1",
    "p_came_and_went": "CREATE TABLE t_7 PARTITION OF t FOR VALUES FROM (70) TO (80); INSERT INTO t"
    " VALUES (71, 'w'); DROP TABLE t_7",
    "p_came_and_went_at_once": "BEGIN; CREATE TABLE t_7 PARTITION OF t FOR VALUES FROM (70)"
    " TO (80); INSERT INTO t VALUES (71, 'w'); ALTER TABLE t DETACH PARTITION t_7; COMMIT",
    "p_nested_came_and_went": "CREATE TABLE t_62 PARTITION OF t_6 FOR VALUES FROM (65) TO (70);"
    " INSERT INTO t VALUES (66, 'n'); ALTER TABLE t_6 DETACH PARTITION t_62; DROP TABLE t_62",
    "p_nested": "CREATE TABLE t_62 PARTITION OF t_6 FOR VALUES FROM (65) TO (70); INSERT INTO t"
    " VALUES (66, 'n')",
    "p_nested_detached": "ALTER TABLE t_6 DETACH PARTITION t_61",
    "p_nested_dropped": "DROP TABLE t_6",
}

_TOUCH = {
    "before": "UPDATE t SET b = 20 WHERE id = 2",
    "after": "INSERT INTO t (id, b) VALUES (4, 4); UPDATE t SET b = 30 WHERE id = 3",
}


def _create(database: PostgresDatabase, name: str) -> None:
    text = """
        CREATE TYPE t_mood AS ENUM ('sad', 'happy'); CREATE TYPE t_pair AS (x int, y t_mood[]);
        CREATE TABLE t (id int PRIMARY KEY, a text, b int);
        INSERT INTO t SELECT n, 'a' || n, n FROM generate_series(1, 3) n;"""
    if name.startswith(("label", "attribute")) and not name.endswith("_of_new"):
        text += """ALTER TABLE t ADD m t_mood; ALTER TABLE t ADD p t_pair[];
                   UPDATE t SET m = 'sad', p = ARRAY[(id, '{sad,happy}')::t_pair];"""
    if name in PARTITIONED:
        text = """
            CREATE TABLE t (id int PRIMARY KEY, a text, b int) PARTITION BY RANGE (id);
            CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (2);
            CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (2) TO (20);
            CREATE TABLE t_6 PARTITION OF t FOR VALUES FROM (60) TO (70) PARTITION BY RANGE (id);
            CREATE TABLE t_61 PARTITION OF t_6 FOR VALUES FROM (60) TO (65);
            INSERT INTO t VALUES (61, 'nested');
            INSERT INTO t SELECT n, 'a' || n, n FROM generate_series(1, 3) n;
            CREATE TABLE t_x (LIKE t INCLUDING ALL); INSERT INTO t_x VALUES (21, 'x', 21);"""
    _run(database, name, text)


def _run(database: PostgresDatabase, name: str, text: str) -> None:
    """Run statements over one session, with the table's own name for t."""
    with database.connect() as connection:
        for statement in re.sub(r"\bt(_\w+)?\b", rf"d_{name}\1", text).split(";"):
            connection.execute(statement.encode())


def _altered(database: PostgresDatabase, touch: str) -> None:
    for name, text in {**ALTERATIONS, **PARTITIONED}.items():
        if touch == "before":
            _run(database, name, _TOUCH[touch])
        _run(database, name, text)
        if touch == "after" and _can_be_touched(name):
            _run(database, name, _TOUCH[touch])


def _can_be_touched(name: str) -> bool:
    return name not in ("dropped", "renamed", "moved", "moved_out", "names_swapped", "made_anew",
                        "swap", "many", "type_of_default")  # fmt: skip


GLOBS = ("public.*", "inside.*")


def _prepared(database: PostgresDatabase) -> None:
    database.execute("CREATE SCHEMA inside; CREATE SCHEMA outside")
    for name in (*ALTERATIONS, *PARTITIONED):
        _create(database, name)


def _until_equal(feed: Captured) -> None:
    """Snapshots come as soon as something is noticed; then everything is equal, and stays so."""
    found: dict[str, str] = {"": "not compared"}

    def equal() -> bool:
        found.clear()
        found.update(differences(feed.replay(), feed.database, GLOBS))
        return not found

    try:
        wait_until(equal, timeout=TIMEOUT, message="the log replays to the database")
    except TimeoutError:
        raise AssertionError(found) from None


@pytest.mark.requirement("P-03", "P-04")
@pytest.mark.parametrize("touch", ["", "before", "after"])
@pytest.mark.parametrize("ddl", [False, True])
def test_after_any_ddl_the_log_replays_to_the_database(
    any_pg: PostgresDatabase, tmp_path: Path, touch: str, ddl: bool
) -> None:
    _prepared(any_pg)
    with captured(any_pg, tmp_path, tables=GLOBS, ddl=ddl) as feed:
        _altered(any_pg, touch)
        _until_equal(feed)
        assert not feed.status.errored
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


@pytest.mark.requirement("P-03", "P-04")
@pytest.mark.parametrize("touch", ["", "after"])
def test_ddl_run_while_headrace_is_down_is_followed_when_it_is_up(
    any_pg: PostgresDatabase, tmp_path: Path, touch: str
) -> None:
    _prepared(any_pg)
    with captured(any_pg, tmp_path, tables=GLOBS) as feed:
        feed.capture.stop()
        _altered(any_pg, touch)
        feed.start()
        feed.until_streaming()
        _until_equal(feed)
        assert not feed.status.errored
    assert differences_everywhere(tmp_path / "log", tmp_path / "lakes", 0) == []


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.requirement("P-04")
def test_ddl_that_changes_no_rows_takes_no_snapshot(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    free = ("add", "add_constant", "add_stable", "drop", "rename", "swap", "relabelled", "default",
            "label_added", "p_add", "p_created", "p_nested")  # fmt: skip
    for name in free:
        _create(any_pg, name)
    any_pg.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    any_pg.execute("ALTER TABLE t ADD c text DEFAULT 'v'")
    with captured(any_pg, tmp_path) as feed:
        for name in free:
            _run(any_pg, name, (ALTERATIONS | PARTITIONED)[name])
        for statement in ("VACUUM FULL t", "CLUSTER t USING t_pkey", "TRUNCATE t", "ANALYZE t"):
            any_pg.execute(statement)
        _until_equal(feed)
        _until_looked(feed)
        assert not feed.streamed(Op.READ)
        (schema,) = feed.streamed(Op.SCHEMA, table="d_add_constant")
        assert (image(schema.after) or {})["columns"][3:] == [
            {"name": "c", "type": "text", "key": False, "number": 4, "initial_default": 'n "x"'},
            {"name": "d", "type": "integer[]", "key": False, "number": 5,
             "initial_default": [1, 2]},
        ]  # fmt: skip


def _until_looked(feed: Captured) -> None:
    """DDL of a table that is used for nothing else has been noticed, and so has all before it."""
    feed.database.execute("CREATE TABLE mark (id int PRIMARY KEY)")
    feed.until(lambda: feed.stored(Op.SCHEMA, table="mark"), "the new table is captured")
    feed.database.execute("ALTER TABLE mark ADD seen int")
    feed.until(lambda: len(feed.stored(Op.SCHEMA, table="mark")) > 1, "the look is in the log")


# --- what is not said with the rows --------------------------------------------------------------


@pytest.mark.requirement("P-03", "P-04")
@pytest.mark.parametrize("down", [False, True])
def test_rows_that_come_whole_are_known_by_the_key_of_their_time(
    any_pg: PostgresDatabase, tmp_path: Path, down: bool
) -> None:
    """With REPLICA IDENTITY FULL no message says the key: the catalogs have the one of now."""
    any_pg.execute("CREATE TABLE t (id int PRIMARY KEY, b int NOT NULL)")
    any_pg.execute("ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 0), (2, 0)")
    with captured(any_pg, tmp_path) as feed:
        if down:
            feed.capture.stop()
        with any_pg.connect(autocommit=False) as connection:
            connection.execute("ALTER TABLE t ADD x int")
            connection.execute("UPDATE t SET b = 5 WHERE id = 2")
            connection.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (b)")
            connection.execute("INSERT INTO t VALUES (1, 7)")
        if down:
            feed.start()
            feed.until_streaming()
        _until_equal(feed)
        assert not feed.status.errored


@pytest.mark.requirement("P-03", "P-04")
def test_another_key_of_rows_that_come_whole_is_noticed_soon(
    any_pg: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.sources.postgres.lookout._WHOLE_SECONDS", 36_000.0)
    look, looks = Lookout.look, []

    def counted(*given: Any) -> dict[str, str]:
        looks.append(given)
        return look(*given)

    monkeypatch.setattr(Lookout, "look", counted)
    any_pg.execute("CREATE TABLE t (id int PRIMARY KEY, b int NOT NULL)")
    any_pg.execute("ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 10)")
    with captured(any_pg, tmp_path) as feed:
        feed.until(lambda: len(looks) > 3, "nothing new is found")
        any_pg.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (b)")
        any_pg.execute("INSERT INTO t VALUES (1, 11)")
        _until_equal(feed)


@pytest.mark.requirement("P-03", "P-04")
def test_a_column_that_may_be_another_one_has_not_its_default(
    any_pg: PostgresDatabase, tmp_path: Path
) -> None:
    """A row comes before the look that would say which columns were dropped and added."""
    any_pg.execute("CREATE TABLE t (id int PRIMARY KEY, b int); INSERT INTO t VALUES (1, 1)")
    any_pg.execute("CREATE TABLE other (id int PRIMARY KEY)")  # goes on while t is read
    any_pg.execute("""ALTER TABLE t ADD e jsonb DEFAULT '{"d": 1}'""")
    with captured(any_pg, tmp_path) as feed:
        with any_pg.connect(autocommit=False) as connection:
            connection.execute("ALTER TABLE t DROP b")
            connection.execute("ALTER TABLE t ADD b int[] DEFAULT '{1,2}'")
            connection.execute("INSERT INTO t VALUES (2)")
        _until_equal(feed)
        feed.until_streaming()
        any_pg.execute("UPDATE t SET b = '{3}' WHERE id = 2")  # read as the snapshot was
        _until_equal(feed)
        (version,) = {each.table.version for each in feed.stored(Op.READ)[-2:]}
        assert feed.stored(Op.UPDATE)[-1].table.version == version


@pytest.mark.requirement("P-04")
@pytest.mark.parametrize("ddl", [False, True])
def test_generated_columns_with_another_expression_are_read_anew(
    servers: Servers, tmp_path: Path, ddl: bool
) -> None:
    with servers[18].database() as database:
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED);"
            "INSERT INTO t VALUES (1), (2)"
        )
        with captured(database, tmp_path, ddl=ddl) as feed:
            database.execute("ALTER TABLE t ALTER twice SET EXPRESSION AS (id * 20)")
            database.execute("INSERT INTO t VALUES (3)")
            _until_equal(feed)
            rows = feed.replay().rows(TableName("shop", "public", "t"))
            assert [row["twice"] for row in rows] == [20, 40, 60]
            assert not feed.status.errored


@pytest.mark.requirement("P-04")
def test_a_number_that_becomes_a_name_is_read_anew(pg: PostgresDatabase, tmp_path: Path) -> None:
    """The server writes no row for it, and prints every row in another way."""
    pg.execute("CREATE TABLE t (id int PRIMARY KEY, b int); INSERT INTO t VALUES (1, 1259)")
    with captured(pg, tmp_path) as feed:
        pg.execute("ALTER TABLE t ALTER b TYPE regclass")
        _until_equal(feed)


@pytest.mark.requirement("P-04")
def test_a_table_that_comes_back_and_leaves_again_is_emptied_again(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    globs = ("public.stays", "public.in_*")
    pg.execute("CREATE TABLE stays (id int PRIMARY KEY); CREATE TABLE in_t (id int PRIMARY KEY)")
    pg.execute("INSERT INTO in_t VALUES (1)")
    with captured(pg, tmp_path, tables=globs) as feed:
        for before, after in (("in_t", "t"), ("t", "in_t"), ("in_t", "t")):
            pg.execute(f"ALTER TABLE {before} RENAME TO {after}")
            feed.until(lambda: not differences(feed.replay(), pg, globs), f"it is {after}")


@pytest.mark.requirement("P-04")
def test_with_on_rewrite_stop_an_operator_decides(pg: PostgresDatabase, tmp_path: Path) -> None:
    _create(pg, "t")
    with captured(pg, tmp_path, on_rewrite="stop") as feed:
        _run(pg, "t", "ALTER TABLE t ALTER b TYPE int USING b + 1")
        feed.until(lambda: feed.status.errored, "the table is in the errored state")
        assert "headrace snapshot shop public.d_t" in feed.status.errored["public.d_t"]
        feed.capture.copy_again(["public.d_t"])
        _until_equal(feed)
        assert not feed.status.errored


@pytest.mark.requirement("P-03")
def test_a_log_without_looks_goes_on_and_takes_no_snapshot(
    pg: PostgresDatabase, tmp_path: Path
) -> None:
    _create(pg, "t")
    with captured(pg, tmp_path) as feed:
        feed.capture.stop()
        stored = decode(feed.log.resume("shop") or b"", PostgresResume)
        assert isinstance(stored, PostgresResume)
        old = {
            path: msgspec.structs.replace(copy, look=None)
            for path, copy in stored.snapshots.items()
        }
        stored = msgspec.structs.replace(stored, snapshots=old)
        feed.log.append("shop", Batch([], stored.encode()))
        feed.start()
        feed.until_streaming()
        _until_looked(feed)
        _run(pg, "t", "ALTER TABLE t RENAME a TO z; ALTER TABLE t ADD c int DEFAULT 4")
        _until_equal(feed)
        assert not feed.streamed(Op.READ)
