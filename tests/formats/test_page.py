"""What docs/formats.md shows is what the formats write."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import plugins
from headrace.change.event import (
    BeforeKind,
    Change,
    Column,
    Op,
    Reference,
    Table,
    Transaction,
)
from headrace.formats.catalogue import Formats
from headrace.formats.cloudevents import CloudEvents
from headrace.formats.facts import Facts, SourceServer
from headrace.formats.savegress import Savegress, batch
from headrace.sources.postgres.position import PostgresPosition
from headrace.testing import PostgresDatabase
from tests.changes import make_change, opened_writer
from tests.formats.test_schemas import ON_REQUEST, events
from tests.sources.capturing import captured

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
BLOCKS: dict[str, str] = dict(
    re.findall(r"^```(?:json|http) ([a-z ]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
)
CODE: dict[str, str] = dict(
    re.findall(r"^```python ([a-z]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
)
NOT_CARRIED = "—"

# --- the changes that the page shows -------------------------------------------------------------

ORDERS = Table(
    "shop",
    "postgres",
    "postgres:7412345678901234567:shop",
    "shop",
    "public",
    "orders",
    (
        Column("id", "bigint", key=True, type_id=20),
        Column("customer_id", "integer", type_id=23),
        Column("status", "text", type_id=25),
        Column("total", "numeric(12,2)", type_id=1700, modifier=786438),
        Column("placed_at", "timestamp with time zone", type_id=1184),
        Column("note", "text", type_id=25),
    ),
    identity="full",
    relation=16412,
    version=3,
    references=(Reference(("customer_id",), "public", "customers", ("id",)),),
)
# In the order of the page.
NAMES = (
    *("canonical", "changefeed", "savegress", "notification"),
    *("debezium", "cloudevents", "etl", "entity"),
)
# As the server makes them for its log, whose epoch is so long.
FORMATS = Formats(
    Facts(servers=(SourceServer("shop", "db.example.com", "shop-1"),), version="1.0.0")
).of_log("6f1c2a9d04be4f0c8e1d5a7b93c2e6f4")
SAID = {
    "trigger": "api_update",
    "request_id": "req_5d3f0c1e-8a41-4b02-9a3c-2f6f1f8f0d11",
    "user_id": "user_17",
    "user_roles": ["clerk"],
}
TRANSACTION = Transaction(
    "741", 1_736_937_000_123_456, 1_736_937_000_125_021, msgspec.json.encode(SAID)
)
SILENT = msgspec.structs.replace(TRANSACTION, metadata=None)
ROW = {
    "id": 7,
    "customer_id": 42,
    "status": "new",
    "total": "1299.95",
    "placed_at": "2025-01-15T10:28:31.5+00:00",
    "note": None,
}
FACT: dict[str, Any] = {
    "table": ORDERS,
    "transaction": TRANSACTION,
    "ordinal": 1,
    "position": PostgresPosition(0x16B3800, 0x16B3748, 0x16B3830),
    "last": True,
    "sequence": 1042,
}
UPDATE = make_change(
    Op.UPDATE,
    key={"id": 7},
    before=ROW,
    after=ROW | {"status": "paid"},
    changed=("status",),
    **FACT,
)
STATEMENT = "ALTER TABLE orders ADD COLUMN note text"
ALTER = make_change(
    Op.SCHEMA,
    after={"columns": [], "ddl_type": "ALTER_TABLE", "ddl_command": STATEMENT},
    **FACT | {"transaction": SILENT},
)


def format_named(name: str, **wishes: Any) -> Any:
    return FORMATS.named(name, include=ON_REQUEST, **wishes)


# --- examples ------------------------------------------------------------------------------------


def written(name: str, change: Change, **wishes: Any) -> Any:
    """What a format makes of a transaction of one change."""
    told = events(format_named(name, **wishes), [change])
    return told[0] if len(told) == 1 else told


def as_request(change: Change) -> str:
    """An event in CloudEvents' binary mode, without the body that another example shows."""
    headers, _ = CloudEvents(FORMATS.facts).binary(change)
    return "\n".join(f"{name}: {value}" for name, value in headers.items()) + "\n"


def marks(change: Change) -> list[Any]:
    """What stands around the rows of a transaction; a mark has no id."""
    told = written("savegress", change, markers=True)
    return [event for event in told if "id" not in event]


def sent_together(*changes: Change) -> Any:
    """A batch, without the events that other examples show."""
    told = json.loads(batch([encoded(change) for change in changes]))
    return told | {"events": [{"…": "…"} for _ in told["events"]]}


def encoded(change: Change) -> bytes:
    return Savegress(FORMATS.facts).encode(change) or b""


EXAMPLES: dict[str, Any] = {name: written(name, UPDATE) for name in NAMES}
EXAMPLES |= {
    "savegress ddl": written("savegress", ALTER),
    "savegress marks": marks(UPDATE),
    "savegress batch": sent_together(UPDATE, ALTER),
    # Its data is the first example once more.
    "cloudevents": EXAMPLES["cloudevents"] | {"data": {"…": "…"}},
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_what_the_format_writes(example: str) -> None:
    assert json.loads(BLOCKS[example]) == EXAMPLES[example]


def test_the_page_has_every_format() -> None:
    assert sorted(NAMES) == plugins.names(plugins.FORMATS)


def test_every_example_is_looked_at() -> None:
    assert BLOCKS.keys() == EXAMPLES.keys() | {"cloudevents binary"}


def test_the_binary_example_is_what_the_format_writes() -> None:
    assert BLOCKS["cloudevents binary"] == as_request(UPDATE)


# --- code ----------------------------------------------------------------------------------------


def test_every_block_of_code_is_run() -> None:
    assert CODE.keys() == {"batch", "protobuf", "destination"}


def test_a_batch_is_signed_as_the_page_shows() -> None:
    exec(CODE["batch"], {"events": [encoded(UPDATE), encoded(ALTER)]})


def test_a_message_is_made_as_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(CODE["protobuf"], {"change": UPDATE, "facts": FORMATS.facts})
    assert capsys.readouterr().out.startswith(f'{UPDATE.id} orders paid b\'{{"id":7,')


def test_a_destination_is_written_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened_writer(tmp_path / "data" / "log") as writer:
        writer.put("users", "ann")
        exec(CODE["destination"], {})
    assert capsys.readouterr().out.splitlines() == [
        "2702869430 is public.users",
        "2702869430 {'id': 'ann'}",
        "stored up to 1",
    ]


# --- tables --------------------------------------------------------------------------------------


def table_under(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, the header's first."""
    section = f"\n{PAGE}".split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    rows = [line.strip("|").split("|") for line in lines[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("-: ")]


def test_every_format_is_listed_with_its_media_type_and_schema() -> None:
    _, *rows = table_under("# The formats")
    assert [row[0] for row in rows] == [f"`{name}`" for name in NAMES]
    assert [row[-2] for row in rows] == [f"`{format_named(name).media_type}`" for name in NAMES]
    assert [row[-1] for row in rows] == [f"`/schemas/{name}.json`" for name in NAMES]


SAYS: Mapping[str, Callable[[Any], str]] = {
    "canonical": lambda event: str(event["op"]),
    "changefeed": lambda event: str(event["type"]),
    "savegress": lambda event: str(event["operation"]),
    "notification": lambda event: str(event["operation"]),
    "debezium": lambda event: str(event["op"]),
    "cloudevents": lambda event: str(event["type"]).removeprefix("headrace.change."),
    "etl": lambda event: str(event["type"]),
    "entity": lambda event: str(event["operation"]["type"]),
}
AROUND = {"Begin", "Commit"}  # of the etl format; a Relation only where it is the event itself


def change_of(op: Op) -> Change:
    said: dict[str, Any] = {"columns": [], "prefix": "p", "content": "c", "relations": [16412]}
    images: Mapping[Op, dict[str, Any]] = {
        Op.INSERT: {"after": ROW},
        Op.READ: {"after": ROW},
        Op.UPDATE: {"before": ROW, "after": ROW, "changed": ()},
        Op.DELETE: {"before": ROW},
    }
    key = {"id": 7} if op in images else None
    return make_change(op, key=key, **(images.get(op, {"after": said}) | FACT))


def called(name: str, op: Op) -> str:
    """What a format calls an operation."""
    names = [SAYS[name](event) for event in events(format_named(name), [change_of(op)])]
    names = [each for each in names if each not in AROUND]
    return names[-1] if names else NOT_CARRIED


@pytest.mark.requirement("C-02")
def test_the_map_of_operations_is_the_formats() -> None:
    header, *rows = table_under("## Operations")
    assert header == ["", *(f"`{name}`" for name in NAMES)]
    shown = {row[0]: [cell.strip("`*") for cell in row[1:]] for row in rows}
    assert shown == {op.value: [called(name, op) for name in NAMES] for op in Op}


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize("name", ["changefeed", "notification"])
def test_a_star_marks_what_comes_only_on_request(name: str) -> None:
    header, *rows = table_under("## Operations")
    column = header.index(f"`{name}`")
    starred = {Op(row[0]) for row in rows if row[column].endswith("*")}
    plain = FORMATS.named(name)
    assert starred == {op for op in Op if not events(plain, [change_of(op)])} == ON_REQUEST


# --- what is not known ---------------------------------------------------------------------------

BIG = {name: value for name, value in ROW.items() if name != "note"}
NOT_SENT = msgspec.structs.replace(ORDERS, identity="default")
_WHERE = FACT | {"table": NOT_SENT, "transaction": SILENT}
_OLD_KEY: dict[str, Any] = {"before": {"id": 7}, "before_kind": BeforeKind.KEY}
UNKNOWN: Mapping[str, list[Change]] = {
    "a column was not sent": [
        make_change(Op.UPDATE, key={"id": 7}, after=BIG, unchanged=("note",), **_WHERE)
    ],
    "only the old key was sent": [
        make_change(Op.DELETE, key={"id": 7}, **_OLD_KEY, **_WHERE),
        make_change(Op.UPDATE, key={"id": 8}, after=ROW | {"id": 8}, **_OLD_KEY, **_WHERE),
    ],
    "no old row was sent": [make_change(Op.UPDATE, key={"id": 7}, after=ROW, **_WHERE)],
}


@pytest.mark.requirement("C-03")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_known_looks_as_the_page_says(name: str) -> None:
    header, *rows = table_under("## What is not known")
    assert header == ["", *UNKNOWN]
    cells = next(row[1:] for row in rows if row[0] == f"`{name}`")
    for cell, changes in zip(cells, UNKNOWN.values(), strict=True):
        told = [event for change in changes for event in told_of(name, change)]
        shown = "".join(json.dumps(event, separators=(",", ":")) for event in told)
        fragments = re.findall(r"`([^`]+)`", cell)
        assert fragments
        assert [each for each in fragments if each not in shown] == [], shown


def told_of(name: str, change: Change) -> Sequence[Any]:
    return events(format_named(name), [change])


def test_values_look_as_the_page_says(pg: PostgresDatabase, tmp_path: Path) -> None:
    _, *rows = table_under("### Values out of range")
    literals = [row[0].strip("`") for row in rows]
    columns = ", ".join(f"{literal} AS c{at}" for at, literal in enumerate(literals))
    with pg.connect() as connection:
        connection.execute(f"CREATE TABLE odd AS SELECT {columns}".encode())
        connection.commit()
    with captured(pg, tmp_path) as feed:
        (read,) = feed.changes(Op.READ)
    values = msgspec.json.decode(read.after or b"", type=dict[str, msgspec.Raw])
    assert [bytes(value).decode() for value in values.values()] == [
        row[1].strip("`") for row in rows
    ]
