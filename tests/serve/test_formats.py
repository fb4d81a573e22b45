"""Any format over HTTP: by poll, as lines, as a stream; whole at any page size."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from referencing import Registry, Resource

from headrace.change.event import Change, Op
from headrace.formats import AnyFormat
from headrace.formats.catalogue import Formats, names
from tests.changes import make_change
from tests.effort import times
from tests.serve.conftest import Site
from tests.serve.histories import HISTORIES, Told, parsed, told, without_relations, write
from tests.serve.sse import parse

LINES = {"Accept": "application/x-ndjson"}
MARKED = "savegress with marks"
FORMATS = [*names(), MARKED]
SIZES = (1, 2, 3, 7, 1000)

several = settings(
    max_examples=times(6, nightly=45),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def query(name: str) -> dict[str, str]:
    """How a request asks for a format."""
    if name == MARKED:
        return {"format": "savegress", "preserve_transactions": "true"}
    return {"format": name}


def format_of(name: str) -> AnyFormat:
    return Formats().named("savegress" if name == MARKED else name, markers=name == MARKED)


def page(site: Site, name: str, **parameters: object) -> Any:
    document = site.get("/v1/changes", **query(name), **parameters).json()
    events = document["changes" if name == "canonical" else "events"]
    assert document["count"] == len(events)
    return document | {"events": events}


def pages(site: Site, name: str, size: int, *, after: int = 0, **filters: object) -> list[Any]:
    """All events, page by page, each page begun where the last one ended."""
    events = []
    while after < site.log.latest_sequence:
        document = page(site, name, after=after, limit=size, **filters)
        assert document["scanned"] > after
        events += document["events"]
        after = document["scanned"]
    return events


def lines(site: Site, name: str, **parameters: object) -> list[Any]:
    given = {key: str(value) for key, value in parameters.items()} | query(name)
    response = site.http.get("/v1/changes", params=given, headers=LINES)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.content.splitlines()]


def stream(site: Site, name: str, **parameters: object) -> str:
    upto = parameters.pop("upto", site.log.latest_sequence)
    return site.get("/v1/changes/stream", **query(name), upto=upto, **parameters).text


def shop(site: Site) -> None:
    """A few transactions with everything that can happen."""
    users, orders = site.writer.table("users"), site.writer.table("orders")
    site.writer.put("users", "alice", name="Alice")
    ada = {"id": "ada", "name": "Ada"}
    changes = [
        make_change(table=users, key={"id": "ada"}, after=ada),
        make_change(Op.UPDATE, table=users, key={"id": "ada"}, before=ada, after=ada),
        make_change(table=orders, key={"id": "7"}, after={"id": "7", "name": "tea"}),
        make_change(Op.DELETE, table=users, key={"id": "ada"}, before=ada),
    ]
    site.writer.append(together(changes))
    site.writer.append(
        together(
            [
                make_change(Op.SCHEMA, table=orders, after={"columns": []}),
                make_change(Op.TRUNCATE, table=orders, after={}),
                make_change(Op.MESSAGE, table=users, after={"prefix": "p", "content": "hi"}),
            ]
        )
    )
    site.writer.delete("users", "alice")


def together(changes: list[Change]) -> list[Change]:
    """The same changes in one transaction."""
    return [
        make_change(
            change.op,
            table=change.table,
            ordinal=ordinal,
            last=ordinal == len(changes),
            **{
                name: json.loads(image)
                for name in ("key", "before", "after")
                if (image := getattr(change, name)) is not None
            },
        )
        for ordinal, change in enumerate(changes, 1)
    ]


def registry(site: Site) -> Registry[Any]:
    """All schemas by their paths: one may name another."""
    paths = site.get("/schemas").json()["schemas"]
    return Registry().with_resources(
        (path, Resource.from_contents(site.get(path).json())) for path in paths
    )


# --- the same events, however they are asked for --------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_the_same_by_poll_as_lines_and_as_a_stream(site: Site, name: str) -> None:
    shop(site)
    expected = parsed(told(site.log, format_of(name)))
    assert expected
    document = page(site, name)
    assert document["events"] == expected
    assert document.keys() >= {"count", "latest_sequence", "scanned", "epoch"}
    assert lines(site, name) == expected
    assert parse(stream(site, name)) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_schema_of_a_format_accepts_what_is_sent(site: Site, name: str) -> None:
    shop(site)
    validator = jsonschema.Draft202012Validator(
        site.get(f"/schemas/{query(name)['format']}.json").json(),
        registry=registry(site),
    )
    for event in page(site, name)["events"]:
        validator.validate(event)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(event | {"no such key": 1})


@pytest.mark.parametrize("name", FORMATS)
def test_pages_of_any_size_hold_the_same_events(site: Site, name: str) -> None:
    @several
    @given(HISTORIES)
    def check(history: list[list[Change]]) -> None:
        before = write(site.writer, history)
        expected = parsed(told(site.log, format_of(name), after=before))
        for size in SIZES:
            assert alike(pages(site, name, size, after=before)) == alike(expected), size
        assert lines(site, name, after=before) == expected
        assert parse(stream(site, name, after=before)) == expected

    # Each page is a stream of its own, and tells its tables.
    alike = without_relations if name == "etl" else list
    check()


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_may_begin_and_end_anywhere(site: Site, name: str) -> None:
    @several
    @given(HISTORIES, st.data())
    def check(history: list[list[Change]], data: st.DataObject) -> None:
        before = write(site.writer, history)
        latest = site.log.latest_sequence
        after, upto = sorted(before + data.draw(st.integers(0, latest - before)) for _ in "..")
        every = told(site.log, format_of(name), after=before)
        expected = alike(parsed([event for event in every if after < event.sequence <= upto]))
        assert alike(page(site, name, after=after, upto=upto)["events"]) == expected
        assert alike(lines(site, name, after=after, upto=upto)) == expected
        assert alike(parse(stream(site, name, after=after, upto=upto))) == expected

    alike = without_relations if name == "etl" else list
    check()


@pytest.mark.parametrize("name", [MARKED, "etl", "entity"])
def test_a_transaction_longer_than_any_page_is_told_whole(site: Site, name: str) -> None:
    site.writer.put("orders", "1")
    site.writer.put_many("users", 2500)
    site.writer.put("orders", "2")
    expected = parsed(told(site.log, format_of(name)))
    alike = without_relations if name == "etl" else list
    for size in (300, 10_000):
        assert alike(pages(site, name, size)) == alike(expected)
    assert lines(site, name) == expected
    assert parse(stream(site, name)) == expected


@pytest.mark.requirement("S2-12")
def test_every_stream_tells_a_table_before_its_first_row(site: Site) -> None:
    shop(site)
    for after in range(site.log.latest_sequence):
        events = page(site, "etl", after=after)["events"]
        known: set[int] = set()
        for event in events:
            if event["type"] == "Relation":
                known.add(event["table_schema"]["id"])
            assert "table_id" not in event or event["table_id"] in known


@pytest.mark.parametrize("name", [MARKED, "etl"])
def test_a_page_never_parts_events_of_one_sequence(site: Site, name: str) -> None:
    shop(site)
    counts: dict[int, int] = {}
    for event in told(site.log, format_of(name)):
        counts[event.sequence] = counts.get(event.sequence, 0) + 1
    assert max(counts.values()) > 1
    for after in range(site.log.latest_sequence):
        document = page(site, name, after=after, limit=1)
        events = without_relations(document["events"])
        assert len(events) >= 1
        assert document["scanned"] == after + 1


@pytest.mark.requirement("C-05")
def test_a_stream_names_a_sequence_with_its_last_event_only(site: Site) -> None:
    shop(site)
    text = stream(site, MARKED, upto=1)
    begin, row, commit = re.findall(r"^((?:id: \d+\n)?)data: (.*)$", text, re.MULTILINE)
    assert [begin[0], row[0], commit[0]] == ["", "", "id: 1\n"]
    # Whoever is cut off after BEGIN has not seen the id, and gets all three again.
    assert [json.loads(part[1])["operation"] for part in (begin, row, commit)] == [
        "BEGIN",
        "INSERT",
        "COMMIT",
    ]


# --- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/changes", "/v1/changes/stream"])
@pytest.mark.parametrize("name", ["avro", "", "Canonical"])
def test_a_format_that_is_not_there_is_refused_with_those_that_are(
    shared: Site, path: str, name: str
) -> None:
    refused = shared.http.get(path, params={"format": name})
    assert refused.status_code == 400
    problem = refused.json()
    assert (problem["parameter"], problem["value"]) == ("format", name)
    assert problem["message"] == f"format must be one of {', '.join(names())}"


@pytest.mark.parametrize("path", ["/v1/changes", "/v1/changes/stream"])
def test_marks_go_with_savegress_alone(shared: Site, path: str) -> None:
    for name in names():
        if name != "savegress":
            given = {"format": name, "preserve_transactions": "true", "upto": "1"}
            refused = shared.http.get(path, params=given)
            assert refused.status_code == 400
            assert refused.json()["parameter"] == "preserve_transactions"
    accepted = {"format": "canonical", "preserve_transactions": "false", "upto": "1"}
    assert shared.http.get(path, params=accepted).status_code == 200


@pytest.mark.requirement("S0-13")
def test_marks_come_when_they_are_asked_for(site: Site) -> None:
    shop(site)
    found = [event["operation"] for event in page(site, MARKED, after=1, upto=5)["events"]]
    assert found == ["BEGIN", "INSERT", "UPDATE", "INSERT", "DELETE", "COMMIT"]
    begin, row, commit = page(site, MARKED, upto=1)["events"]
    assert begin.keys() == commit.keys() == {"operation", "transaction_id", "timestamp"}
    assert begin["transaction_id"] == row["transaction_id"] == commit["transaction_id"]
    unmarked = [event["operation"] for event in page(site, "savegress")["events"]]
    assert not {"BEGIN", "COMMIT"} & set(unmarked)


def test_marks_stay_where_a_filter_leaves_out_their_changes(site: Site) -> None:
    shop(site)
    for size in SIZES:
        found = pages(site, MARKED, size, tables="orders", operations="insert")
        assert [event["operation"] for event in found] == [
            *["BEGIN", "COMMIT"],
            *["BEGIN", "INSERT", "COMMIT"],
            *["BEGIN", "COMMIT"],
            *["BEGIN", "COMMIT"],
        ]


@pytest.mark.requirement("C-02")
@pytest.mark.parametrize(("name", "field"), [("notification", "operation"), ("changefeed", "type")])
def test_what_is_no_row_comes_only_when_it_is_named(site: Site, name: str, field: str) -> None:
    shop(site)
    plain = {event[field] for event in page(site, name)["events"]}
    assert plain <= {"INSERT", "UPDATE", "DELETE", "PUT"}
    named = page(site, name, operations="truncate,schema,message")["events"]
    assert [event[field] for event in named] == ["SCHEMA", "TRUNCATE", "MESSAGE"]
    assert page(site, name, operations="insert,truncate")["events"][-1][field] == "TRUNCATE"
    assert "TRUNCATE" in stream(site, name, operations="truncate")


@pytest.mark.parametrize("name", names())
def test_a_filter_looks_at_the_change_where_an_event_stands(site: Site, name: str) -> None:
    shop(site)
    every = told(site.log, format_of(name))
    names = {change.sequence: change.table.name for change in site.log.read(0)}
    users = [event for event in every if names[event.sequence] == "users"]
    expected = parsed(users)
    if name == "etl":
        # Where transactions begin and end is told whatever the filter leaves out.
        expected = without_relations(parsed([e for e in every if e in users or _is_mark(e)]))
        found = without_relations(pages(site, name, 2, tables="users"))
        assert found == expected
        return
    for size in SIZES:
        assert pages(site, name, size, tables="users") == expected


def _is_mark(event: Told) -> bool:
    return json.loads(event.payload)["type"] in ("Begin", "Commit")


@pytest.mark.requirement("C-05")
@pytest.mark.parametrize("name", FORMATS)
def test_trimmed_changes_are_announced_in_every_format(site: Site, name: str) -> None:
    shop(site)
    site.log.trim(3)  # in the middle of a transaction
    response = site.get("/v1/changes", **query(name), after=1)
    assert response.headers["x-headrace-gap"] == "2-2"
    expected = parsed(told(site.log, format_of(name), after=2))
    assert page(site, name, after=1)["events"] == expected
    assert 'event: gap\ndata: {"first":2,"last":2,"reason":"trim"}\n\n' in stream(
        site, name, after=1
    )


# --- schemas -------------------------------------------------------------------------------------


def test_every_format_has_a_schema_to_fetch(shared: Site) -> None:
    listed = shared.get("/schemas").json()["schemas"]
    assert {f"/schemas/{name}.json" for name in names()} <= set(listed)
    for path in listed:
        response = shared.get(path)
        assert response.headers["content-type"] == "application/schema+json"
        assert response.json()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("file", ["avro.json", "canonical", "..", "%2e%2e%2fcanonical.py"])
def test_a_schema_that_is_not_there_gets_404(shared: Site, file: str) -> None:
    refused = shared.http.get(f"/schemas/{file}")
    assert refused.status_code == 404
    if file == "avro.json":
        assert "canonical.json" in refused.json()["known"]
