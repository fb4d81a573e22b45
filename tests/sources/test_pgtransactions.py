"""The assembler turns what a server says into transactions, and survives whatever it says."""

import struct
from base64 import b64decode
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.change.event import Change, Op, Table
from headrace.errors import DecodeError, ProtocolError
from headrace.sources._annotations import LIMIT
from headrace.sources.postgres.pgoutput import WalBegin, WalCommit, WalRelation, parse
from headrace.sources.postgres.transactions import PostgresAssembler
from tests.changes import wal_position
from tests.conftest import Servers
from tests.sources.capturing import image
from tests.sources.recorded import Describing, Recorded, record, text_tuple

XID = 0x5_0000_0007  # the fifth turn of the 32-bit counter


@pytest.fixture(scope="module")
def recorded(servers: Servers) -> Iterator[Recorded]:
    """Messages of a real server."""
    with servers[16].database() as database:
        yield record(database)


class Registered:
    """Gives tables versions, as the log does."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def __call__(self, table: Table) -> Table:
        for known in self.tables:
            if msgspec.structs.replace(known, version=0) == table:
                return known
        added = msgspec.structs.replace(table, version=len(self.tables) + 1)
        self.tables.append(added)
        return added


def relations(recorded: Recorded) -> dict[int, str]:
    parsed = [parse(data) for _, data in recorded.messages if data[:1] == b"R"]
    return {r.id: f"{r.schema}.{r.name}" for r in parsed if isinstance(r, WalRelation)}


def assembler_for(recorded: Recorded, *, after: int = 0, xid: int = 0) -> PostgresAssembler:
    assembler = PostgresAssembler(Describing(recorded.types), Registered(), after=after, xid=xid)
    assembler.renew(relations(recorded), {}, {})
    return assembler


def assembled(recorded: Recorded, **given: int) -> list[Change]:
    assembler = assembler_for(recorded, **given)
    for lsn, data in recorded.messages:
        assembler.feed(lsn, data)
    assert assembler.between_transactions
    return assembler.done


# --- what a server says --------------------------------------------------------------------------


def test_real_messages_become_transactions_in_commit_order(recorded: Recorded) -> None:
    changes = assembled(recorded)
    assert [change.op for change in changes if change.op is not Op.SCHEMA] == [
        Op.INSERT, Op.INSERT, Op.UPDATE, Op.UPDATE, Op.INSERT, Op.UPDATE, Op.DELETE,
        Op.MESSAGE, Op.MESSAGE, Op.INSERT, Op.DELETE, Op.TRUNCATE, Op.TRUNCATE,
    ]  # fmt: skip
    commits = [change.position.commit for change in changes]
    assert commits == sorted(commits)
    ends = [change.last for change in changes]
    starts = [change.ordinal == 1 for change in changes]
    assert starts == [True, *ends[:-1]]
    assert ends[-1]


@pytest.mark.requirement("S0-34")
def test_reading_again_gives_the_same_ids_and_no_id_twice(recorded: Recorded) -> None:
    first, again = assembled(recorded), assembled(recorded)
    assert [change.id for change in first] == [change.id for change in again]
    assert len({change.id for change in first}) == len(first)


@pytest.mark.requirement("S2-21", "S0-34")
def test_whatever_the_position_exactly_the_transactions_after_it_come(recorded: Recorded) -> None:
    everything = assembled(recorded)
    ends = [
        message.end_lsn
        for _, data in recorded.messages
        if isinstance(message := parse_or_none(data), WalCommit)
    ]
    for end in ends:
        rest = [change.id for change in everything if change.position.commit >= end]
        resumed = [c.id for c in assembled(recorded, after=end) if c.op is not Op.SCHEMA]
        assert resumed == [c.id for c in everything if c.id in rest and c.op is not Op.SCHEMA]


def parse_or_none(data: bytes) -> object:
    return None if data[:1] in (b"I", b"U", b"D") else parse(data)


def test_a_transaction_id_has_64_bits(recorded: Recorded) -> None:
    begins = [m for _, data in recorded.messages if isinstance(m := parse_or_none(data), WalBegin)]
    numbers = [
        int(change.transaction.id)
        for change in assembled(recorded, xid=XID)
        if change.transaction.id.isdigit()
    ]
    assert {number & 0xFFFFFFFF for number in numbers} <= {begin.xid for begin in begins}
    assert {number >> 32 for number in numbers} == {5}


@pytest.mark.parametrize(
    ("near", "xid", "expected"),
    [
        (10, 20, 20),
        (0x1_0000_0005, 0xFFFF_FFF0, 0xFFFF_FFF0),  # began before the counter turned
        (0xFFFF_FFF0, 5, 0x1_0000_0005),  # the counter has turned
        (0x3_FFFF_FFFF, 3, 0x4_0000_0003),
        (0x4_0000_0003, 0xFFFF_FFFF, 0x3_FFFF_FFFF),
    ],
)
def test_the_turn_of_the_32_bit_counter_is_followed(near: int, xid: int, expected: int) -> None:
    said = Said(near)
    said.transaction(said.insert(b"1"), xid=xid)
    assert [change.transaction.id for change in said.done] == [str(expected)]


# --- conversations made up here ------------------------------------------------------------------

OID = 16400


class Said:
    """An assembler for one table (id, name), and sentences to feed it."""

    def __init__(self, xid: int = 0) -> None:
        self.assembler = PostgresAssembler(Describing({}), Registered(), after=0, xid=xid)
        self.assembler.renew({OID: "public.things"}, {}, {})
        self.lsn = 1000

    @property
    def done(self) -> list[Change]:
        """What is complete, without the table's description."""
        return [change for change in self.assembler.done if change.op is not Op.SCHEMA]

    def feed(self, *messages: bytes) -> None:
        for message in messages:
            self.lsn += 8
            self.assembler.feed(self.lsn, message)

    def begin(self, xid: int = 7) -> bytes:
        return struct.pack(">cQqI", b"B", self.lsn + 500, 0, xid)

    def commit(self) -> bytes:
        self.lsn += 500
        return struct.pack(">cBQQq", b"C", 0, self.lsn, self.lsn + 8, 0)

    def transaction(self, *messages: bytes, xid: int = 7) -> None:
        self.feed(self.begin(xid), self.relation(), *messages)
        self.feed(self.commit())

    @staticmethod
    def relation(oid: int = OID) -> bytes:
        columns = b"\1id\0" + struct.pack(">Ii", 23, -1) + b"\0name\0" + struct.pack(">Ii", 25, -1)
        return struct.pack(">cI", b"R", oid) + b"public\0things\0d\0\2" + columns

    @staticmethod
    def insert(number: bytes, name: bytes | None = b"x", oid: int = OID) -> bytes:
        return b"I" + oid.to_bytes(4, "big") + b"N" + text_tuple([number, name])

    @staticmethod
    def message(prefix: str, content: bytes, *, transactional: bool = True, lsn: int = 0) -> bytes:
        head = struct.pack(">cBQ", b"M", transactional, lsn) + prefix.encode() + b"\0"
        return head + struct.pack(">I", len(content)) + content


def metadata(changes: list[Change]) -> list[object]:
    return [image(change.transaction.metadata) for change in changes]


def test_annotations_belong_to_every_change_of_their_transaction() -> None:
    said = Said()
    said.transaction(
        said.insert(b"1"),
        said.message("headrace", b'{"user":"ann","n":1}'),
        said.insert(b"2"),
        said.message("headrace", b'{"n":2,"why":["x"]}'),
    )
    said.transaction(said.insert(b"3"))
    annotated = {"user": "ann", "n": 2, "why": ["x"]}
    assert metadata(said.done) == [annotated, annotated, None]


def test_an_annotation_spread_over_lines_is_kept_on_one() -> None:
    said = Said()
    said.transaction(said.insert(b"1"), said.message("headrace", b'{\n "a": [\r\n1,\t2]\n}'))
    [change] = said.done
    assert metadata([change]) == [{"a": [1, 2]}]
    assert not set(b"\n\r\t") & set(change.transaction.metadata or b"\n")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[1]",
        b'"text"',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":"\n"}',
        b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a":1} and more',
        b"x" * LIMIT,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_an_annotation_that_is_no_object_is_shown_as_its_text(content: bytes) -> None:
    said = Said()
    said.transaction(
        said.message("headrace", b'{"user":"ann"}'),
        said.insert(b"1"),
        said.message("headrace", content),
        said.message("headrace", b'{"why":"x"}'),
    )
    [insert] = said.done
    assert metadata([insert]) == [{"user": "ann", "why": "x", "annotation_error": content.decode()}]


@pytest.mark.parametrize(
    "content", [b'{"a":"\xff"}', b'{"\xff":1}', b"\xff", b'{"a":"\xed\xa0\x80"}']
)
def test_an_annotation_that_is_not_utf8_is_shown_and_its_bytes_are_kept(content: bytes) -> None:
    said = Said()
    said.transaction(said.insert(b"1"), said.message("headrace", content))
    insert, message = said.done
    assert metadata([insert]) == [{"annotation_error": content.decode(errors="replace")}]
    assert spoken(message) == content


@pytest.mark.parametrize(
    "content",
    [
        msgspec.json.encode({"a": "é" * LIMIT}),
        b"x" * (LIMIT + 1),
        b"\xff" * (LIMIT + 1),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_an_annotation_that_is_too_large_is_shown_in_part_and_kept_whole(content: bytes) -> None:
    said = Said()
    said.transaction(
        said.insert(b"1"),
        said.message("headrace", content),
        said.message("headrace", b'{"user":"ann"}'),
    )
    insert, message = said.done
    shown = content.decode(errors="replace")[:1000] + f"… ({len(content)} bytes)"
    assert metadata([insert]) == [{"user": "ann", "annotation_error": shown}]
    assert spoken(message) == content


def test_an_annotation_of_just_64_kb_is_taken() -> None:
    said = Said()
    content = b'{"a":"%b"}' % (b"x" * (LIMIT - 8))
    assert len(content) == LIMIT
    said.transaction(said.insert(b"1"), said.message("headrace", content))
    assert [change.transaction.metadata for change in said.done] == [content]


def test_annotations_that_are_too_large_together_stop_where_the_room_ends() -> None:
    said = Said()
    large = [b'{"%d":"%b"}' % (n, b"x" * (LIMIT // 2)) for n in range(3)]
    said.transaction(said.insert(b"1"), *(said.message("headrace", each) for each in large))
    insert, message = said.done
    told = image(insert.transaction.metadata) or {}
    assert sorted(told) == ["0", "annotation_error"]
    assert told["annotation_error"].encode() == large[1]
    assert spoken(message) == large[2]


def test_of_several_wrong_annotations_the_first_is_shown_and_none_is_lost() -> None:
    said = Said()
    said.transaction(
        said.message("headrace", b"one"),
        said.insert(b"1"),
        said.message("headrace", b"two"),
        said.message("headrace", b'{"user":"ann"}'),
    )
    insert, message = said.done
    assert metadata([insert]) == [{"annotation_error": "one", "user": "ann"}]
    assert spoken(message) == b"two"


def spoken(message: Change) -> bytes:
    """What a MESSAGE change keeps."""
    assert message.op is Op.MESSAGE
    said = image(message.after) or {}
    if "content" in said:
        return str(said["content"]).encode()
    return b64decode(said["content_base64"])


@given(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode)))
def test_whatever_annotations_say_the_metadata_can_be_read(contents: list[bytes]) -> None:
    said = Said()
    said.transaction(said.insert(b"1"), *(said.message("headrace", each) for each in contents))
    told = metadata(said.done)[0]
    assert told is None if not contents else isinstance(told, dict)


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none()))
def test_any_object_is_an_annotation(annotation: dict[str, object]) -> None:
    said = Said()
    said.transaction(said.insert(b"1"), said.message("headrace", msgspec.json.encode(annotation)))
    assert metadata(said.done) == [annotation]


def test_other_messages_keep_their_place_prefix_and_content() -> None:
    said = Said()
    said.transaction(
        said.insert(b"1"),
        said.message("audit", "hëllo".encode()),
        said.message("audit", b"\xff\x00"),
        said.insert(b"2"),
    )
    assert [change.op for change in said.done] == [Op.INSERT, Op.MESSAGE, Op.MESSAGE, Op.INSERT]
    text, binary = (image(change.after) for change in said.done[1:3])
    assert text == {"prefix": "audit", "transactional": True, "content": "hëllo"}
    assert binary == {"prefix": "audit", "transactional": True, "content_base64": "/wA="}


def test_a_message_outside_transactions_is_one_by_itself_and_comes_once() -> None:
    said = Said()
    spoken = said.message("audit", b"now", transactional=False, lsn=1004)
    said.feed(spoken)
    said.transaction(said.insert(b"1"))
    message, _ = said.done
    assert (message.ordinal, message.last) == (1, True)
    assert image(message.after) == {"prefix": "audit", "transactional": False, "content": "now"}
    again = Said()
    again.assembler.position = said.assembler.position
    again.feed(spoken)
    assert again.assembler.done == []


def test_a_commit_that_begins_where_a_message_ends_is_taken() -> None:
    said = Said()
    said.feed(said.message("audit", b"now", transactional=False, lsn=1508))
    said.transaction(said.insert(b"1"))
    assert [(change.op, change.position.commit) for change in said.done] == [
        (Op.MESSAGE, 1508),
        (Op.INSERT, 1508),
    ]


def test_a_heartbeat_is_not_a_change() -> None:
    said = Said()
    said.feed(said.begin(), said.message("headrace.heartbeat", b""))
    said.feed(said.commit())
    assert said.assembler.done == []
    assert said.assembler.position == said.lsn


def test_rows_of_tables_that_are_not_captured_are_passed_over() -> None:
    said = Said()
    said.transaction(said.relation(OID + 1), said.insert(b"1", oid=OID + 1), said.insert(b"2"))
    [change] = said.done
    assert (image(change.after), change.ordinal) == ({"id": 2, "name": "x"}, 2)


def test_a_value_that_cannot_be_read_stops_its_table_and_keeps_the_bytes() -> None:
    said = Said()
    bad = said.insert(b"2", b"\xff")
    said.transaction(said.insert(b"1"), bad, said.insert(b"3"))
    assert [change.op for change in said.done] == [Op.INSERT, Op.MESSAGE, Op.MESSAGE]
    kept = image(said.done[1].after)
    assert kept is not None
    assert kept["operation"] == "INSERT"
    assert msgspec.json.decode(msgspec.json.encode(kept["pgoutput"]), type=bytes) == bad
    assert "UTF-8" in kept["error"]
    assert list(said.assembler.errored) == ["public.things"]


def test_the_last_change_of_a_transaction_knows_where_its_commit_ends(recorded: Recorded) -> None:
    commits = [
        m for _, data in recorded.messages if isinstance(m := parse_or_none(data), WalCommit)
    ]
    ends = {commit.commit_lsn: commit.end_lsn for commit in commits}
    outside = 0
    for change in assembled(recorded):
        at = wal_position(change)
        if not change.last:
            assert at.end_lsn == 0
        elif change.transaction.id.startswith("message-"):
            outside += 1
            assert at.end_lsn == at.commit_lsn  # it is its own commit, and ends there
        else:
            assert at.end_lsn == ends[at.commit_lsn] > at.commit_lsn
    assert outside == 1


def test_rows_come_in_pieces_before_their_transaction_ends() -> None:
    said = Said()
    said.feed(said.begin(), said.relation(), *(said.insert(b"%d" % n) for n in range(5)))
    piece = said.assembler.take_open()
    said.feed(said.insert(b"5"))
    said.feed(said.commit())
    changes = piece + said.assembler.done
    assert [change.ordinal for change in changes] == list(range(1, len(changes) + 1))
    assert [change.last for change in changes] == [False] * (len(changes) - 1) + [True]
    assert [wal_position(change).end_lsn for change in changes[-2:]] == [0, said.lsn]


@pytest.mark.parametrize(
    "sentences",
    [
        lambda said: [said.begin(), said.begin()],
        lambda said: [said.commit()],
        lambda said: [said.relation(), said.insert(b"1")],
        lambda said: [said.begin(), said.insert(b"1", oid=99)],
        lambda said: [struct.pack(">cIBI", b"T", 1, 0, OID)],
        lambda said: [said.message("audit", b"x")],
        lambda said: [b"I"],
        lambda said: [b""],
    ],
)
def test_a_conversation_that_the_protocol_does_not_allow_is_refused(sentences: object) -> None:
    said = Said()
    assert callable(sentences)
    with pytest.raises(ProtocolError):
        said.feed(*sentences(said))


# --- whatever it says ----------------------------------------------------------------------------


class Edit(NamedTuple):
    """Replace some bytes of one message."""

    message: int
    at: int
    removed: int
    put: bytes


EDITS = st.builds(
    Edit,
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from([0, 1, 2, 3, 1000]),
    st.binary(max_size=6),
)


@given(edits=st.lists(EDITS, max_size=4))
def test_mutated_conversations_give_changes_or_an_error_of_ours(
    recorded: Recorded, edits: list[Edit]
) -> None:
    messages = list(recorded.messages)
    for edit in edits:
        number = edit.message % len(messages)
        lsn, data = messages[number]
        messages[number] = lsn, data[: edit.at] + edit.put + data[edit.at + edit.removed :]
    assembler = assembler_for(recorded)
    try:
        for lsn, data in messages:
            assembler.feed(lsn, data)
    except (ProtocolError, DecodeError):
        return


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_arbitrary_conversations_give_an_error_of_ours(messages: list[bytes]) -> None:
    said = Said()
    try:
        said.feed(said.begin(), said.relation(), *messages)
    except (ProtocolError, DecodeError):
        return


DDL = {
    "tag": "ALTER TABLE",
    "sql": "ALTER TABLE things ADD x int",
    "tables": [
        {
            "oid": OID,
            "schema": "public",
            "name": "things",
            "identity": "default",
            "columns": [{"name": "id", "type_id": 23, "modifier": -1, "key": True}],
        }
    ],
}


@given(
    st.binary()
    | st.recursive(
        st.none() | st.integers() | st.text() | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(msgspec.json.encode)
    | st.sampled_from(["tag", "sql", "tables"]).map(
        lambda key: msgspec.json.encode({k: v for k, v in DDL.items() if k != key})
    )
)
def test_a_message_that_only_looks_like_ddl_stays_a_message(content: bytes) -> None:
    said = Said()
    said.transaction(said.message("headrace.ddl", content))
    assert [change.op for change in said.done] == [Op.MESSAGE]


def test_ddl_is_told_where_it_happened() -> None:
    said = Said()
    said.transaction(said.insert(b"1"), said.message("headrace.ddl", msgspec.json.encode(DDL)))
    told = said.assembler.done[-1]
    assert told.op is Op.SCHEMA
    assert image(told.after) == {
        "columns": [{"name": "id", "type": "", "key": True}],
        "ddl_type": "ALTER_TABLE",
        "ddl_command": "ALTER TABLE things ADD x int",
    }
