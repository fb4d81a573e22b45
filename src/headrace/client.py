"""The running server as the command line sees it."""

import http.client
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from .errors import ServerAbsent, ServerError

NDJSON = "application/x-ndjson"

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0


class Client:
    """Asks a running Headrace over HTTP, never through a proxy: it is on this machine or near."""

    def __init__(self, url: str) -> None:
        self.url = url
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80

    def get(self, path: str, **query: object) -> Any:
        """The JSON at a path."""
        with self._request("GET", _with_query(path, query)) as answer:
            return self._json(path, answer)

    def post(self, path: str, body: object) -> Any:
        """What the server answers to a JSON document."""
        with self._request("POST", path, body=body) as answer:
            return self._json(path, answer)

    def lines(self, path: str, **query: object) -> Iterator[bytes]:
        """The lines of a document, as they come, without their ends."""
        with self._request("GET", _with_query(path, query), accept=NDJSON) as answer:
            self._expect_success(path, answer)
            try:
                for line in answer:
                    yield line.rstrip(b"\r\n")
            except (OSError, http.client.HTTPException) as error:
                raise ServerAbsent(f"the server at {self.url} went away") from error

    def _request(
        self, method: str, path: str, *, body: object = None, accept: str = "application/json"
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_SECONDS)
        headers = {"Accept": accept, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerAbsent(f"no Headrace answers at {self.url}") from error

    def _json(self, path: str, answer: http.client.HTTPResponse) -> Any:
        self._expect_success(path, answer)
        try:
            return msgspec.json.decode(answer.read())
        except msgspec.DecodeError as error:
            raise ServerAbsent(f"what answers at {self.url}{path} is no Headrace") from error

    def _expect_success(self, path: str, answer: http.client.HTTPResponse) -> None:
        # /health answers 503 with a document that says why.
        if answer.status < 300 or (path == "/health" and answer.status == 503):
            return
        raise ServerError(f"{self.url}{path} answers {answer.status}: {_reason(answer.read())}")


def _with_query(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def _reason(body: bytes) -> str:
    """What an error document says."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
    if isinstance(document, dict):
        return str(document.get("detail") or document.get("error") or document)
    return str(document)
