"""Tables whose rows InnoDB changes by their foreign keys, while the table that they name stops."""

from pathlib import Path

import pytest

from headrace.testing.mysql import MysqlDatabase
from tests.sources.mycapturing import captured, snapshot_rows

pytestmark = pytest.mark.requirement("P-39")

_TABLES = """
    CREATE TABLE firm (id int PRIMARY KEY, a int);
    CREATE TABLE person (id int PRIMARY KEY, firm int,
        FOREIGN KEY (firm) REFERENCES firm (id) ON DELETE CASCADE);
    CREATE TABLE badge (id int PRIMARY KEY, person int,
        FOREIGN KEY (person) REFERENCES person (id) ON DELETE SET NULL);
    CREATE TABLE bill (id int PRIMARY KEY, firm int, FOREIGN KEY (firm) REFERENCES firm (id));
    INSERT INTO firm VALUES (1, 1), (2, 2);
    INSERT INTO person VALUES (1, 1), (2, 2);
    INSERT INTO badge VALUES (1, 1), (2, 2);
"""


def test_tables_whose_foreign_keys_name_an_errored_table_are_shown_until_its_snapshot(
    maria: MysqlDatabase, tmp_path: Path
) -> None:
    maria.execute(_TABLES)
    firm, person, badge = (f"{maria.name}.{name}" for name in ("firm", "person", "badge"))
    with captured(maria, tmp_path, on_rewrite="stop") as feed:
        maria.execute("ALTER TABLE firm MODIFY a varchar(9)")
        maria.execute("DELETE FROM firm WHERE id = 1")
        feed.until_caught_up()
        ((left,),) = maria.execute("SELECT count(*) FROM person")
        assert len(feed.rows("person")) > left
        stopped = feed.source.describe(feed.log.resume(feed.source.name))
        for status in (feed.status, stopped):
            assert status.errored.keys() == {firm, person, badge}
            assert f"while {firm} is errored" in status.errored[person]
        feed.capture.copy_again([firm])
        feed.until(lambda: not feed.resume.errored and not feed.resume.to_snapshot, "it is read")
        feed.until_caught_up()
        assert feed.status.errored == {}
        expected = snapshot_rows(maria, tmp_path / "other")
        for table in ("firm", "person", "badge"):
            assert feed.rows(table) == expected[table], table
