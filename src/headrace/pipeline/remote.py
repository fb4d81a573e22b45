"""A log behind a server, read over HTTP."""

import http.client
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from ..change.event import Table
from ..errors import ConfigError, LogError, LogUnreachable, ServerError
from ..log import PIECE_HEAD, Piece, Ranges
from .options import Options
from .reading import Disk, Range, Reading, expect_epoch

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 30.0
PATIENCE_SECONDS = 10.0  # a server that restarts is waited for so long
_LONGEST_PAUSE = 1.0
_PASSING = (429, 502, 503, 504)  # the server, or a proxy before it, may answer later

T = TypeVar("T")


class TableVersions(msgspec.Struct, frozen=True):
    """What the server tells of its tables."""

    epoch: str
    tables: list[Table]


@dataclass(frozen=True, slots=True)
class Server:
    """A log behind a running Headrace. Where its key is kept is told, never the key."""

    url: str
    key_env: str = ""
    key_file: str = ""

    def ranges(
        self, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
    ) -> Ranges:
        """How readers may share what follows `after`."""
        given = {"after": after, "limit": limit, "upto": upto, "parts": parts}
        return self._ask("/v1/ranges", given, Ranges)

    def pieces(self, wanted: Range) -> Iterator[Piece]:
        """The changes of a range, those that are still there; a broken connection is mended."""
        after, patience = wanted.after, _Patience(self.url)
        while after < wanted.upto:
            try:
                for piece in self._stream(wanted.epoch, after, wanted.upto):
                    yield piece
                    after = piece.last
                    patience = _Patience(self.url)
                if self._has_no_more(wanted, after):
                    return
            except (OSError, http.client.HTTPException) as error:
                patience.spend(error)

    def _has_no_more(self, wanted: Range, after: int) -> bool:
        """Whether an answer ended where the log does, or was trimmed; else it was cut short.

        An answer that breaks off within its headers looks like a short one, or another log's.
        """
        now = self.ranges(after, upto=after)
        expect_epoch(wanted.epoch, now.epoch)
        if after < wanted.upto <= now.latest_sequence and now.first_sequence <= after + 1:
            raise http.client.IncompleteRead(b"")
        return True

    def table(self, epoch: str, version: int) -> Table:
        """A version of a table's columns."""
        known = _versions.setdefault((self.url, epoch), [])
        if version > len(known):
            answer = self._ask("/v1/tables", {"after": len(known)}, TableVersions)
            expect_epoch(epoch, answer.epoch)
            known.extend(answer.tables)
        if not 0 < version <= len(known) or known[version - 1].version != version:
            raise LogError(f"the log at {self.url} has no table version {version}")
        return known[version - 1]

    def _ask(self, path: str, query: dict[str, Any], document: type[T]) -> T:
        patience = _Patience(self.url)
        while True:
            try:
                return msgspec.json.decode(self._get(_with_query(path, query)), type=document)
            except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                patience.spend(error)

    def _get(self, path: str) -> bytes:
        """An answer, over the connection that served the last one if it still stands."""
        connection = _connections.pop(self.url, None) or self._connect()
        try:
            answer = self._request(connection, path)
            body = answer.read()
        except BaseException:
            connection.close()
            raise
        _connections[self.url] = connection
        return body

    def _stream(self, epoch: str, after: int, upto: int) -> Iterator[Piece]:
        with self._connected() as connection:
            query = {"after": after, "upto": upto}
            answer = self._request(connection, _with_query("/v1/records", query))
            if answer.headers.get("X-Headrace-Epoch", "") != epoch:
                return
            while head := answer.read(PIECE_HEAD.size):
                first, count, size = PIECE_HEAD.unpack(_whole(head, PIECE_HEAD.size))
                yield Piece(first, count, _whole(answer.read(size), size))

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = self._connect()
        try:
            yield connection
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise ServerError(
                f"the certificate of {self.url} is not trusted: {error.verify_message}",
                hint="Name your certificate authority's file in the variable SSL_CERT_FILE.",
            ) from error
        connection.sock.settimeout(ANSWER_SECONDS)
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, path: str
    ) -> http.client.HTTPResponse:
        key = self._key()
        headers = {"X-API-Key": key} if key else {}
        connection.request("GET", urlsplit(self.url).path + path, headers=headers)
        answer = connection.getresponse()
        if answer.status in _PASSING:
            raise _Passing(f"{self.url} answers {answer.status}")
        if answer.status != 200:
            raise _refusal(f"{self.url} answers {answer.status}", answer.read())
        return answer

    def _key(self) -> str:
        if self.key_file:
            return _key_in(Path(self.key_file))
        if not self.key_env:
            return ""
        if not os.environ.get(self.key_env):
            raise ConfigError(
                f"the environment variable {self.key_env}, which apiKeyEnv names, is not set",
                hint="Set it for the driver and for every executor.",
            )
        return os.environ[self.key_env]


# For as long as the process lives: asking is the driver's every-second work.
_connections: dict[str, http.client.HTTPConnection] = {}
_versions: dict[tuple[str, str], list[Table]] = {}


class _Passing(http.client.HTTPException):
    """The server says that it cannot answer now."""


class _Patience:
    """How long a server that does not answer is asked again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._pause = 0.0  # a connection that went stale is replaced at once

    def spend(self, error: Exception) -> None:
        """Wait a little before the next attempt; LogUnreachable when there is none left."""
        if time.monotonic() + self._pause > self._until:
            raise LogUnreachable(f"no Headrace answers at {self._url}") from error
        time.sleep(self._pause)
        self._pause = min(max(self._pause * 2, 0.1), _LONGEST_PAUSE)


def _key_in(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the file {file}, which apiKeyFile names, cannot be read: {error.strerror}",
            hint="It must be there for the driver and for every executor.",
        ) from error


def _whole(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise http.client.IncompleteRead(data, size - len(data))
    return data


def _with_query(path: str, query: dict[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}"


def _refusal(what: str, body: bytes) -> ServerError:
    """The error that an answer's document describes."""
    try:
        said = msgspec.json.decode(body, type=_Said)
    except msgspec.DecodeError:
        return ServerError(f"{what}, as no Headrace does", hint="Check the url.")
    return ServerError(f"{what}: {said.message}", hint=said.hint)


class _Said(msgspec.Struct):
    message: str
    hint: str = ""


def reading(options: Options) -> Reading:
    """The log that the options name."""
    if options.path:
        return Disk(options.path)
    return Server(options.url, options.api_key_env, options.api_key_file)
