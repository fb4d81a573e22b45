"""What `headrace check` finds on a MySQL or MariaDB server, and that its fixes work."""

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.secret import Secret
from headrace.sources import Finding
from headrace.sources.mysql import Mysql
from headrace.testing.mysql import MysqlDatabase, MysqlServer
from tests.mysqls import mysql_of
from tests.sources.mycapturing import captured
from tests.sources.myplaces import mysql


def failed(source: Mysql) -> dict[str, Finding]:
    """What is not in order."""
    return {finding.name: finding for finding in source.check() if not finding.ok}


def test_a_server_in_order_has_nothing_to_mend(my: MysqlDatabase) -> None:
    my.execute("CREATE TABLE users (id int PRIMARY KEY)")
    assert failed(mysql(my)) == {}


def test_settings_are_mended_by_their_fixes(own_my: MysqlServer) -> None:
    own_my.execute(
        "SET GLOBAL binlog_format = MIXED, GLOBAL binlog_row_metadata = MINIMAL,"
        " GLOBAL binlog_expire_logs_seconds = 60"
    )
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int)")
        source = mysql(database)
        found = failed(source)
        path = f"table {database.name}.users"
        assert set(found) == {"binlog_format", "binlog_row_metadata", "binary log", path}
        for finding in found.values():
            database.execute(finding.fix)
        assert failed(source) == {}


def test_privileges_are_mended_by_their_fixes(own_my: MysqlServer, tmp_path: Path) -> None:
    with own_my.database() as database:
        database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (1)")
        own_my.execute("CREATE USER reader@'127.0.0.1' IDENTIFIED BY 'x'")
        own_my.execute(f"GRANT INSERT ON {database.name}.* TO reader@'127.0.0.1'")
        url = Secret(database.url.replace("root@", "reader:x@"))
        source = mysql(database, url=url)
        for _ in range(2):  # what the user may not see shows after the grant
            for finding in failed(source).values():
                own_my.execute(finding.fix)
        assert failed(source) == {}
        with captured(database, tmp_path, url=url) as feed:
            assert feed.rows("users") == [{"id": 1}]


@pytest.mark.requirement("P-15")
def test_a_user_without_any_privilege_gets_all_of_them_in_one_pass(own_my: MysqlServer) -> None:
    with own_my.database() as database:
        database.execute(
            "CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE `odd ``one` (id int PRIMARY KEY)"
            " ENGINE=MyISAM; CREATE USER reader@'%' IDENTIFIED BY 'x'"
        )
        source = mysql(database, url=Secret(database.url.replace("root@", "reader:x@")))
        for finding in failed(source).values():
            database.execute(finding.fix)
        assert failed(source) == {}


def test_a_table_that_cannot_be_read_is_shown(maria: MysqlDatabase) -> None:
    maria.execute(
        "CREATE TABLE users (id int PRIMARY KEY) ENGINE=InnoDB;ALTER TABLE users DISCARD TABLESPACE"
    )
    (finding,) = failed(mysql(maria)).values()
    assert "discarded" in finding.detail
    maria.execute(finding.fix)


def test_cascades_and_filters_are_told(my_kind: str) -> None:
    with (
        mysql_of(my_kind, {"binlog_ignore_db": "shadow"}) as server,
        server.database() as database,
    ):
        database.execute(
            "CREATE TABLE users (id int PRIMARY KEY); CREATE TABLE orders (id int PRIMARY KEY,"
            " u int, FOREIGN KEY (u) REFERENCES users (id) ON DELETE CASCADE)"
        )
        found = failed(mysql(database))
        assert "binlog_ignore_db = shadow" in found["filters"].detail
        finding = found[f"foreign key of {database.name}.orders"]
        assert "ON DELETE CASCADE" in finding.detail
        database.execute(finding.fix)
        assert set(failed(mysql(database))) == {"filters"}


def test_a_server_that_is_not_there_is_told_with_the_url_masked() -> None:
    source = Mysql(name="shop", url=Secret("mysql://app:s3cret@127.0.0.1:1/shop"))
    (finding,) = source.check()
    assert (finding.name, finding.ok) == ("connection", False)
    assert "s3cret" not in repr(finding)


@pytest.mark.parametrize(
    "url", ["s3cret", "postgresql://a:s3cret@h/d", "mysql://h:s3cret/d", "mysql://h/d?what=s3cret"]
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match="mysql://user:password@host:3306/database") as refused:
        Mysql(name="shop", url=Secret(url))
    assert "s3cret" not in str(refused.value)


def test_without_a_database_each_table_must_name_its_own() -> None:
    with pytest.raises(ConfigError, match=r"database\.table"):
        Mysql(name="shop", url=Secret("mysql://h"))
    source = Mysql(name="shop", url=Secret("mysql://h"), tables=("shop.*",))
    assert source.wants("shop", "users")
    assert not source.wants("shop", "headrace_annotations")
    assert not source.wants("other", "users")
    assert not Mysql(name="a", url=Secret("mysql://h"), tables=("*.*",)).wants("mysql", "user")


def test_every_source_has_a_number_of_its_own() -> None:
    one, other = (Mysql(name=name, url=Secret("mysql://h/d")) for name in ("one", "other"))
    assert one.replica_id != other.replica_id
    assert one.replica_id == Mysql(name="one", url=Secret("mysql://h/d")).replica_id
    assert Mysql(name="one", url=Secret("mysql://h/d"), server_id=7).replica_id == 7
    assert Mysql(name="one", url=Secret("mariadb://u%40x:p@db.example:3307/d")).host == "db.example"
