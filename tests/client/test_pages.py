"""What a client makes of a stream: whole messages, and an error where the rest is missing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.client import Client
from headrace.client.client import EventPage, PageRequest
from headrace.errors import ServerAbsent

FIRST = b'retry: 1000\n\nid: 1\ndata: {"n":1}\n\n: heartbeat\n\n'
SECOND = b'data: {"n":2}\n\nid: 2\ndata: {"n":2.5}\n\n'
REST = b"id: 9\n\n"  # nothing there is wanted


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that says this once, in good order."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join()


def read(body: bytes, pages: list[EventPage], *, after: int = 0, upto: int | None) -> None:
    with answering(body) as url:
        pages.extend(Client(url).pages(after, upto, PageRequest()))


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"", []),
        (FIRST, [b'{"n":1}']),
        (FIRST + SECOND, [b'{"n":1}', b'{"n":2}', b'{"n":2.5}']),
        (FIRST + SECOND[:7], [b'{"n":1}']),
        (FIRST + SECOND + REST[:-1], [b'{"n":1}', b'{"n":2}', b'{"n":2.5}']),
    ],
)
def test_a_stream_that_ends_too_early_is_an_error(body: bytes, events: list[bytes]) -> None:
    pages: list[EventPage] = []
    with pytest.raises(ServerAbsent, match="went away"):
        read(body, pages, upto=9)
    assert [event for page in pages for event in page.events] == events


def test_a_stream_is_complete_when_it_has_passed_the_last_sequence() -> None:
    pages: list[EventPage] = []
    read(FIRST + SECOND + REST, pages, upto=9)
    assert pages == [EventPage([b'{"n":1}']), EventPage([b'{"n":2}']), EventPage([b'{"n":2.5}'])]
    read(b"retry: 1000\n\n", pages, after=9, upto=9)


def test_a_stream_without_end_that_ends_is_an_error() -> None:
    with pytest.raises(ServerAbsent, match="went away"):
        read(FIRST + SECOND + REST, [], upto=None)


def test_a_gap_is_a_page_of_its_own() -> None:
    pages: list[EventPage] = []
    read(b'event: gap\ndata: {"first":1,"last":8}\n\nid: 9\ndata: {}\n\n', pages, upto=9)
    assert pages == [EventPage([], "1-8"), EventPage([b"{}"])]
