"""Binlogs of real servers read as what the servers did, and damaged ones as an error of ours."""

import struct
import zlib
from typing import TypeVar

import pytest

from headrace.errors import DecodeError, ProtocolError, SourceRefused
from headrace.sources.mysql.decode.binlog import parse
from headrace.sources.mysql.decode.events import (
    UNKNOWN,
    Event,
    FormatDescription,
    Gtid,
    GtidList,
    Header,
    Heartbeat,
    IgnoredEvent,
    Incident,
    Payload,
    PreviousGtids,
    Query,
    Rotate,
    RowsEvent,
    RowsKind,
    RowsQuery,
    TableMap,
    XaPrepare,
    Xid,
)
from headrace.sources.mysql.decode.gtid import MariadbGtid, MysqlGtid, MysqlGtids
from headrace.sources.mysql.decode.rows import Row
from tests.sources.binlogs.reading import (
    FILES,
    HEADER_SIZE,
    events,
    raw_events,
    recorded,
    replayed,
    rows,
    shown,
)

PLAIN = FormatDescription(Header(0, 15, 1, 0, 0, 0), "8.0.36", 0, b"", checksum=False)
MARIADB = FormatDescription(Header(0, 15, 1, 0, 0, 0), "10.11.19-MariaDB", 0, b"", checksum=False)
CHECKED = FormatDescription(Header(0, 15, 1, 0, 0, 0), "8.0.36", 0, b"", checksum=True)
PARTIAL = [name for name in FILES if name.endswith(("minimal", "noblob"))]
WHOLE = [name for name in FILES if not name.endswith("vector") and name not in PARTIAL]
T = TypeVar("T")


def event(kind: int, body: bytes, *, flags: int = 0, end: int = 0, checksum: bool = False) -> bytes:
    """An event as a server writes it."""
    size = HEADER_SIZE + len(body) + 4 * checksum
    data = struct.pack("<IBIIIH", 1_700_000_000, kind, 7, size, end, flags) + body
    return data + zlib.crc32(data).to_bytes(4, "little") if checksum else data


def only(found: list[Event], kind: type[T]) -> list[T]:
    return [each for each in found if isinstance(each, kind)]


# --- what servers wrote --------------------------------------------------------------------------


@pytest.mark.requirement("S0-28", "S0-29", "S0-30")
@pytest.mark.parametrize("name", WHOLE)
def test_the_changes_of_a_binlog_add_up_to_what_select_shows(name: str) -> None:
    assert replayed(name) == shown(name)


@pytest.mark.parametrize("name", PARTIAL)
def test_what_images_leave_out_is_absent_and_never_null(name: str) -> None:
    rows, there = replayed(name)["shop"], shown(name)["shop"]
    assert rows.keys() == there.keys()
    for key, row in rows.items():
        assert row.items() <= there[key].items()
    # A default that no statement names is not sent, and no other value is missing.
    missing = {column for key in rows for column in there[key].keys() - rows[key].keys()}
    assert missing <= {"paid", "note", "picture", "n"}
    assert rows[b'{"id":1}'].keys() == there[b'{"id":1}'].keys()


@pytest.mark.parametrize("name", FILES)
def test_every_event_ends_where_the_next_begins(name: str) -> None:
    at = 4
    for data in raw_events(FILES[name].read_bytes()):
        at += len(data)
        assert int.from_bytes(data[13:17], "little") == at
    assert isinstance(events(name)[-1], Rotate)


@pytest.mark.parametrize("name", FILES)
def test_a_file_begins_with_its_format_and_the_transactions_before_it(name: str) -> None:
    form, before, *_ = events(name)
    assert isinstance(form, FormatDescription)
    assert form.mariadb is name.startswith("mariadb")
    assert form.checksum is not name.endswith("unchecked")
    assert isinstance(before, GtidList if form.mariadb else PreviousGtids)


def test_transactions_of_mariadb_have_a_gtid_and_an_end() -> None:
    found = events("mariadb/full")
    created, inserted, *_ = only(found, Gtid)
    assert isinstance(created.gtid, MariadbGtid)
    assert isinstance(inserted.gtid, MariadbGtid)
    assert (created.standalone, inserted.standalone) == (True, False)
    assert inserted.gtid.sequence == created.gtid.sequence + 1
    assert len(only(found, Xid)) == 7  # every transaction but the DDL
    (before,) = only(found, GtidList)
    assert str(before.position) == str(
        MariadbGtid(0, created.gtid.server, created.gtid.sequence - 1)
    )
    assert only(found, RowsQuery)[2].sql == "UPDATE shop SET name = 'b' WHERE id = 1"


def test_transactions_of_mysql_have_a_gtid_a_time_and_a_length() -> None:
    found = events("mysql80/full")
    (before,) = only(found, PreviousGtids)
    begun = only(found, Gtid)
    assert len(begun) == 8
    gtids = MysqlGtids()
    for each in begun:
        assert isinstance(each.gtid, MysqlGtid)
        assert each.gtid not in before.gtids
        assert abs(each.commit_time / 1e6 - each.header.timestamp) < 2
        gtids = gtids.add(each.gtid)
    assert before.gtids <= before.gtids | gtids
    assert (before.gtids | gtids) - gtids == before.gtids
    ends = [*[each.header.end - each.header.size for each in begun[1:]], found[-2].header.end]
    starts = [each.header.end - each.header.size for each in begun]
    assert [each.length for each in begun] == [e - s for s, e in zip(starts, ends, strict=True)]


def test_a_tag_is_part_of_a_gtid() -> None:
    found = events("mysql97/tagged")
    tags = [each.gtid.tag for each in only(found, Gtid) if isinstance(each.gtid, MysqlGtid)]
    assert tags == ["", "nightly", ""]
    assert all(each.commit_time and each.length for each in only(found, Gtid))


def test_statements_come_with_their_default_schema() -> None:
    for server in ("mariadb", "mysql80"):
        sql = [each.sql for each in only(events(f"{server}/statements"), Query)]
        assert "ALTER TABLE `säb` ADD COLUMN more int FIRST" in sql
        assert "TRUNCATE TABLE `säb`" in sql
        assert {each.database for each in only(events(f"{server}/statements"), Query)} == {
            "recorded"
        }


def test_invisible_columns_are_in_the_rows() -> None:
    (first, *_) = only(events("mysql80/statements"), TableMap)
    assert [(column.name, column.visible) for column in first.columns] == [
        ("id", True),
        ("hidden", False),
    ]
    assert replayed("mariadb/statements") == {
        "säb": {b'{"id":3}': {"more": b"null", "id": b"3", "hidden": b"5"}}
    }


def test_branches_are_told_when_they_are_prepared() -> None:
    (prepared, at_once) = only(events("mysql80/xa"), XaPrepare)
    assert (prepared.gtrid, prepared.bqual, prepared.format_id) == (b"one", b"b", 3)
    assert (prepared.one_phase, at_once.one_phase) == (False, True)
    begun = only(events("mariadb/xa"), Gtid)
    assert [each.prepared_xa for each in begun[1:3]] == [True, False]


@pytest.mark.parametrize("name", ["mysql80/payload", "mysql97/payload"])
def test_a_compressed_transaction_holds_the_events_of_one_that_is_not(name: str) -> None:
    found = events(name)
    assert len(only(found, Payload)) == 7
    kinds = [each.kind for each in only(found, RowsEvent)]
    assert kinds == [each.kind for each in only(events("mysql80/full"), RowsEvent)]
    assert all(len(each.compressed) < each.size for each in only(found, Payload))


def test_rows_and_statements_that_mariadb_compressed_are_the_same() -> None:
    found = events("mariadb/compressed")
    assert {165, 166, 167, 168} & {each.header.kind for each in found} >= {165, 166, 167}
    assert [each.sql for each in only(found, Query)] == [
        each.sql for each in only(events("mariadb/full"), Query)
    ]


def test_a_minimal_image_leaves_out_what_neither_changed_nor_identifies() -> None:
    for server in ("mariadb", "mysql80", "mysql97"):
        name = f"{server}/minimal"
        updates = [row for _, kind, row in found_rows(name) if kind is RowsKind.UPDATE]
        key, before, kind, after, changed, unchanged = updates[0]
        assert (key, before, kind) == (b'{"id":1}', b'{"id":1}', "key")
        assert after == b'{"id":1,"name":"b"}'
        assert changed is None  # the old name was not sent
        assert unchanged == ("paid", "note", "picture", "n")
        moved = updates[-1]
        assert moved[:2] == (b'{"id":40}', b'{"id":4}')
        assert moved[4] == ("id",)
        inserted = [row for _, kind, row in found_rows(name) if kind is RowsKind.INSERT]
        assert inserted[2][3] == b'{"id":3,"name":"c"}'
        assert inserted[2][5] == ("paid", "note", "picture", "n")


def test_an_image_without_blobs_has_all_else() -> None:
    for server in ("mariadb", "mysql80"):
        name = f"{server}/noblob"
        updates = [row for _, kind, row in found_rows(name) if kind is RowsKind.UPDATE]
        key, before, kind, after, changed, unchanged = updates[0]
        assert (key, before, kind) == (b'{"id":1}', b'{"id":1}', "key")
        assert after == b'{"id":1,"name":"b","paid":true,"n":4000000000}'
        assert changed == ("name",)
        assert unchanged == ("note", "picture")
        assert updates[1][5] == ("picture",)
        assert updates[1][4] is None  # whether the note differs is not known


def test_a_full_image_tells_what_changed() -> None:
    for server in ("mariadb", "mysql80"):
        found = found_rows(f"{server}/full")
        (_, _, first), *_ = [each for each in found if each[1] is RowsKind.UPDATE]
        assert first[0] == b'{"id":1}'
        assert first[1] == (
            b'{"id":1,"name":"a","paid":true,"note":"note","picture":"cGlj","n":4000000000}'
        )
        assert first[2] == "full"
        assert first[4:] == (("name",), ())
        (_, _, gone) = found[-1]
        assert gone[0] == b'{"id":3}'
        assert gone[2] == "full"
        assert gone[3] is None


def found_rows(name: str) -> list[tuple[str, RowsKind, Row]]:
    return list(rows(events(name), recorded(name)))


def test_a_vector_is_refused_by_name() -> None:
    with pytest.raises(DecodeError, match="column v is of type VECTOR"):
        found_rows("mysql97/vector")


# --- what servers do not often write -------------------------------------------------------------


def test_a_wrong_checksum_is_noticed() -> None:
    for name, file in FILES.items():
        if name.endswith("unchecked"):
            continue
        form, second, *_ = raw_events(file.read_bytes())
        described = parse(form, UNKNOWN)
        assert isinstance(described, FormatDescription)
        broken = bytes([second[0] ^ 1]) + second[1:]
        with pytest.raises(ProtocolError, match="checksum"):
            parse(broken, described)


def test_a_format_is_right_whether_its_file_is_in_use_or_closed() -> None:
    form, *_ = raw_events(FILES["mariadb/full"].read_bytes())
    in_use = form[:17] + bytes([form[17] | 1]) + form[18:]
    assert isinstance(parse(in_use, UNKNOWN), FormatDescription)


@pytest.mark.parametrize("checksum", [True, False])
def test_the_first_rotation_is_read_before_it_is_known_whether_there_are_checksums(
    checksum: bool,
) -> None:
    data = event(4, struct.pack("<Q", 4) + b"mysql-bin.000007", flags=0x20, checksum=checksum)
    rotate = parse(data, UNKNOWN)
    assert isinstance(rotate, Rotate)
    assert (rotate.file, rotate.position) == ("mysql-bin.000007", 4)
    assert rotate.header.artificial


def test_an_incident_says_what_was_lost() -> None:
    found = parse(event(26, b"\x01\0\x04lost"), PLAIN)
    assert isinstance(found, Incident)
    assert (found.number, found.message) == (1, "lost")


def test_heartbeats_tell_where_the_server_is() -> None:
    old = parse(event(27, b"bin.000003", end=500), PLAIN)
    new = parse(
        event(41, b"\x01\x0abin.000003\x02\x09\xfe" + struct.pack("<Q", 1 << 33) + b"\0"), PLAIN
    )
    assert isinstance(old, Heartbeat)
    assert isinstance(new, Heartbeat)
    assert (old.file, old.position) == ("bin.000003", 500)
    assert (new.file, new.position) == ("bin.000003", 1 << 33)


def test_an_anonymous_transaction_has_no_gtid() -> None:
    begun = parse(event(34, bytes(42)), PLAIN)
    assert isinstance(begun, Gtid)
    assert begun.gtid is None


def test_an_unknown_event_is_passed_over_only_when_it_says_so() -> None:
    assert isinstance(parse(event(99, b"new", flags=0x80), PLAIN), IgnoredEvent)
    with pytest.raises(ProtocolError, match="type 99") as failed:
        parse(event(99, b"new"), PLAIN)
    assert failed.value.hint
    assert not failed.value.retry


def test_rows_that_cannot_be_made_whole_are_refused_with_the_setting() -> None:
    with pytest.raises(SourceRefused, match="partial JSON") as failed:
        parse(event(39, bytes(40)), PLAIN)
    assert "binlog_row_value_options" in failed.value.hint
    with pytest.raises(ProtocolError, match="type 172"):
        parse(event(172, bytes(40)), MARIADB)


def test_a_server_that_encrypts_its_binlog_sends_it_decrypted() -> None:
    assert isinstance(parse(event(164, bytes(17), flags=0x80), MARIADB), IgnoredEvent)
    with pytest.raises(ProtocolError, match="type 164"):  # as it stands in the file
        parse(event(164, bytes(17)), MARIADB)


def test_an_event_is_as_long_as_it_says() -> None:
    data = event(16, bytes(8))
    for cut in (data[:-1], data + b"\0", data[:12], b""):
        with pytest.raises(ProtocolError):
            parse(cut, PLAIN)


def test_a_statement_is_in_the_clients_character_set() -> None:
    # 4: character_set_client, 8 is latin1; 1: sql_mode; 128 microseconds.
    status = b"\x01" + struct.pack("<Q", 4) + b"\x04\x08\0\x08\0\x08\0" + b"\x80" + b"\x01\0\0"
    body = struct.pack("<IIBHH", 9, 0, 2, 0, len(status)) + status + b"db\0" + b"DROP TABLE \xe9"
    found = parse(event(2, body), MARIADB)
    assert isinstance(found, Query)
    assert (found.sql, found.database, found.thread) == ("DROP TABLE é", "db", 9)
    assert (found.sql_mode, found.microseconds) == (4, 1)
