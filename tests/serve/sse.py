"""A client of server-sent events, as the changefeed's document describes it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from headrace.testing import wait_until


def parse(text: str) -> list[dict[str, Any]]:
    """Split on blank lines, take the `data: ` lines, parse the JSON."""
    return [
        json.loads(line.removeprefix("data: "))
        for frame in text.split("\n\n")
        for line in frame.split("\n")
        if line.startswith("data: ")
    ]


class Reader:
    """Reads a stream in a thread of its own and keeps all of it, with the time it came."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = urlsplit(url)
        self._headers = dict(headers or {})
        self._bytes = bytearray()
        self.ended = threading.Event()
        self.arrivals: list[tuple[float, bytes]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        address = self._url
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        self._connection.request("GET", f"{address.path}?{address.query}", headers=self._headers)
        self.response = self._connection.getresponse()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended.is_set():
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.response.close()
        self._connection.close()

    @property
    def text(self) -> str:
        """What came so far, in whole frames."""
        return self._bytes[: self._bytes.rfind(b"\n\n") + 2].decode()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        return parse(self.text)

    def await_events(self, count: int, *, timeout: float = 120.0) -> list[dict[str, Any]]:
        """The events, once there are so many."""
        wait_until(
            lambda: self._bytes.count(b"data: ") >= count and len(self.events) >= count,
            timeout=timeout,
            message=f"{count} events came",
        )
        return self.events

    def await_text(self, text: str, *, timeout: float = 120.0) -> None:
        """Return once the stream has said this."""
        wait_until(lambda: text in self.text, timeout=timeout, message=f"it says {text!r}")

    def _read(self) -> None:
        try:
            while chunk := self.response.read1(65536):
                self.arrivals.append((time.time(), chunk))
                self._bytes += chunk
        except (http.client.HTTPException, OSError, ValueError):
            pass  # closed by this side
        finally:
            self.ended.set()
