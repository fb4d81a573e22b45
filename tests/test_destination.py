"""A destination gets every event, in lists, from a log or a server, and goes on where it was."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.change.event import Op, Table
from headrace.destination import Checkpoint, Events, LogEvents, ServerEvents, deliver
from headrace.errors import LogError, ServerAbsent, ServerError
from headrace.formats.etl import Begin, Commit, Event, Insert, Relation, Truncate, events
from headrace.log import LogReader
from headrace.log.keys import KeyRequest
from headrace.serve import BackgroundServer, ServerSettings, create_app
from headrace.testing.processes import free_port
from tests.changes import Writer, make_change, make_table, opened_writer


class ListedKey:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []

    def write_events(self, events: list[Event]) -> None:
        self.batches.append(events)

    @property
    def events(self) -> list[Event]:
        return list(itertools.chain(*self.batches))

    @property
    def names(self) -> list[str]:
        return [event.table_row["id"] for event in self.events if isinstance(event, Insert)]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """A log with three transactions of two tables."""
    with opened_writer(tmp_path / "log") as writer:
        writer.put("users", "ann")
        writer.put_many("orders", 3)
        writer.put("users", "bob")
        yield writer


Place = Callable[..., Events]


@pytest.fixture(params=["log", "server"])
def place(request: pytest.FixtureRequest, writer: Writer) -> Iterator[Place]:
    """Reads the writer's events, with the `tables` that are requested."""
    with ExitStack() as stack:
        if request.param == "log":
            reader = stack.enter_context(LogReader.open(writer.log.path))
            yield lambda **wanted: LogEvents(reader, **wanted)
        else:
            settings = ServerSettings(port=0)
            app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
            server = stack.enter_context(BackgroundServer(app, settings))
            yield lambda **wanted: ServerEvents(server.url, **wanted)


@pytest.mark.requirement("S2-02", "S2-22", "S2-23")
def test_a_list_holds_events_of_several_tables_and_transactions(
    writer: Writer, place: Place
) -> None:
    destination = ListedKey()
    [reached] = deliver(place(), destination, upto=5)
    assert reached == Checkpoint(5, writer.log.epoch)
    [batch] = destination.batches
    assert batch == list(events(writer.log.read(0)))
    tables = {event.table_schema.name for event in batch if isinstance(event, Relation)}
    assert tables == {"users", "orders"}
    assert len({event.commit_lsn for event in batch}) == 3
    assert {type(event) for event in batch} == {Begin, Relation, Insert, Commit}


@pytest.mark.requirement("S2-21")
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_it_goes_on_after_the_last_checkpoint(place: Place, limit: int) -> None:
    whole = ListedKey()
    reached = list(deliver(place(), whole, upto=5, limit=limit))
    assert len(reached) > 1
    assert whole.names == ["ann", "1", "2", "3", "bob"]
    for checkpoint in reached:
        rest = ListedKey()
        list(deliver(place(), rest, after=checkpoint, upto=5))
        expected = [event for event in whole.events if event.sequence > checkpoint.sequence]
        markers = [event for event in rest.events if not isinstance(event, Relation)]
        assert markers == [event for event in expected if not isinstance(event, Relation)]


def test_what_stands_at_one_sequence_comes_in_one_list(place: Place) -> None:
    destination = ListedKey()
    list(deliver(place(), destination, upto=5, limit=1))
    ends = [batch[-1].sequence for batch in destination.batches]
    assert len(ends) == len(set(ends))
    for batch, following in itertools.pairwise(destination.batches):
        assert batch[-1].sequence < following[0].sequence


def test_what_a_destination_raises_ends_the_delivery_and_comes_again(place: Place) -> None:
    class Broken(ListedKey):
        def write_events(self, events: list[Event]) -> None:
            super().write_events(events)
            if len(self.batches) == 2:
                raise OSError("wrote, and then lost the line")

    broken, kept = Broken(), [Checkpoint()]
    with pytest.raises(OSError, match="lost the line"):
        kept.extend(deliver(place(), broken, upto=5, limit=3))
    mended = ListedKey()
    list(deliver(place(), mended, after=kept[-1], upto=5))
    again = {event.key for event in broken.batches[1]}
    assert again <= {event.key for event in mended.events}
    assert {*broken.names, *mended.names} == {"ann", "1", "2", "3", "bob"}


def test_only_tables_that_are_wanted_come(place: Place) -> None:
    destination = ListedKey()
    list(deliver(place(tables=["public.u*"]), destination, upto=5))
    assert destination.names == ["ann", "bob"]


def truncate(writer: Writer, *names: str) -> dict[str, int]:
    """Empty tables with one statement, between two rows; returns their numbers."""
    tables = [_numbered(writer, name, number) for number, name in enumerate(names, 11)]
    relations = {"relations": [table.relation for table in tables]}
    count = len(tables) + 2
    steps: list[tuple[Op, Table, dict[str, Any]]] = [(Op.INSERT, tables[0], {"id": "1"})]
    steps += [(Op.TRUNCATE, table, relations) for table in tables]
    steps += [(Op.INSERT, tables[-1], {"id": "2"})]
    writer.append(
        [
            make_change(op, table=table, after=after, ordinal=ordinal, last=ordinal == count)
            for ordinal, (op, table, after) in enumerate(steps, 1)
        ]
    )
    return {table.name: table.relation for table in tables}


def _numbered(writer: Writer, name: str, relation: int) -> Table:
    return writer.log.register(msgspec.structs.replace(make_table(name), relation=relation))


@pytest.mark.requirement("S2-09", "S2-20")
@pytest.mark.parametrize("wanted", [[], ["a"], ["b"], ["c"], ["a", "c"], ["elsewhere"]])
def test_a_truncate_is_the_same_event_at_any_page_size(
    writer: Writer, place: Place, wanted: list[str]
) -> None:
    numbers = truncate(writer, "a", "b", "c")
    latest = writer.log.latest_sequence
    expected = tuple(number for name, number in numbers.items() if not wanted or name in wanted)
    for limit in (1, 2, 3, 1000):
        destination = ListedKey()
        source = place(tables=wanted)
        list(deliver(source, destination, after=Checkpoint(5), upto=latest, limit=limit))
        emptied = [event for event in destination.events if isinstance(event, Truncate)]
        assert [event.rel_ids for event in emptied] == ([expected] if expected else [])
        for batch in destination.batches:
            known = {event.table_schema.id for event in batch if isinstance(event, Relation)}
            assert all(set(e.rel_ids) <= known for e in batch if isinstance(e, Truncate))
        keys = [e.key for e in destination.events if not isinstance(e, Relation)]
        assert len(keys) == len(set(keys))


def test_a_stream_may_be_of_one_source(writer: Writer, place: Place) -> None:
    other = msgspec.structs.replace(make_table("users"), source="crm")
    writer.append([make_change(table=writer.log.register(other), after={"id": "eve"})])
    found = {}
    for source in ("", "shop", "crm", "none"):
        destination = ListedKey()
        list(deliver(place(source=source), destination, upto=6, limit=2))
        sources = {e.table_schema.source for e in destination.events if isinstance(e, Relation)}
        begun = sum(isinstance(event, Begin) for event in destination.events)
        found[source] = (destination.names, sources, begun)
    shop = ["ann", "1", "2", "3", "bob"]
    assert found == {
        "": ([*shop, "eve"], {"shop", "crm"}, 4),
        "shop": (shop, {"shop"}, 3),
        "crm": (["eve"], {"crm"}, 1),
        "none": ([], set(), 0),
    }


def test_it_waits_for_more(writer: Writer, place: Place) -> None:
    destination = ListedKey()
    delivery = deliver(place(), destination)
    assert next(delivery).sequence == 5
    writer.put("users", "cyn", Op.UPDATE)
    assert next(delivery).sequence == 6
    assert destination.batches[-1][-1].sequence == 6


def test_trimmed_changes_are_not_passed_over_in_silence(writer: Writer, place: Place) -> None:
    writer.log.trim(4, force=True)
    destination = ListedKey()
    with pytest.raises(LogError, match="2-3 were trimmed") as caught:
        list(deliver(place(), destination, after=Checkpoint(1), upto=5))
    assert "headrace snapshot" in caught.value.hint
    assert destination.events == []


def test_another_log_is_noticed(place: Place) -> None:
    with pytest.raises(LogError, match="another one"):
        list(deliver(place(), ListedKey(), after=Checkpoint(1, "elsewhere"), upto=5))


def test_a_server_that_is_not_there_is_named() -> None:
    absent = ServerEvents(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServerAbsent, match=absent.url):
        absent.page(0, limit=10, wait=0)


def test_a_server_says_why_it_refuses(tmp_path: Path) -> None:
    settings = ServerSettings(port=0)
    with opened_writer(tmp_path / "log") as writer:
        app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
        with (
            BackgroundServer(app, settings) as server,
            pytest.raises(ServerError, match="limit"),
        ):
            ServerEvents(server.url).page(0, limit=0, wait=0)


def test_a_server_that_asks_for_a_key_gets_it(writer: Writer) -> None:
    settings = ServerSettings(port=0, require_key=True)
    app = create_app(writer.log, statuses=list, copy_again=None, settings=settings)
    key = app.state.service.keyring.create(KeyRequest()).secret
    with BackgroundServer(app, settings) as server:
        with pytest.raises(ServerError, match="401"):
            ServerEvents(server.url).page(0, limit=10, wait=0)
        assert ServerEvents(server.url, key).page(0, limit=100, wait=0).scanned == 5


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_what_is_no_headrace_is_not_believed() -> None:
    with HTTPServer(("127.0.0.1", 0), _Quiet) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ServerAbsent, match="not as a Headrace server does"):
            ServerEvents(f"http://127.0.0.1:{server.server_port}").page(0, limit=1, wait=0)
