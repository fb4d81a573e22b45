"""A log behind a server, read over HTTP."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from ..change.block import MARK, BlockRows
from ..change.event import Table
from ..change.span import LogSpan
from ..client.transport import HttpRequest, HttpTransport, with_query
from ..client.trust import TlsTrust
from ..errors import ConfigError, LogError, LogUnreachable, ServerAbsent, ServerError
from ..log import PIECE_HEAD, Piece, Ranges
from ..retry import Backoff
from .options import Options
from .reading import DiskLog, LogAccess, P, SequenceRange, expect_epoch

RESPONSE_SECONDS = 30.0
PATIENCE_SECONDS = 10.0  # how long a server that restarts is waited for
_BACKOFF = Backoff(first=0.1, longest=1.0)
_RECORDS = "application/x-headrace-records"
_BLOCKS = f"application/x-headrace-blocks, {_RECORDS}"  # an older server sends records alone
_PASSING = (0, 429, 502, 503, 504)  # no response, or one of a server or proxy that may recover

T = TypeVar("T")


class RemoteTables(msgspec.Struct, frozen=True):
    """Versions of tables, as the server lists them."""

    epoch: str
    tables: list[Table]


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """A log behind a running Headrace. It holds where its key is kept, never the key."""

    url: str
    key_env: str = ""
    key_file: str = ""
    ca_file: str = ""

    def ranges(
        self, after: int, *, limit: int | None = None, upto: int | None = None, parts: int = 1
    ) -> Ranges:
        """How readers may share what follows `after`."""
        given = {"after": after, "limit": limit, "upto": upto, "parts": parts}
        return self._get("/v1/ranges", given, Ranges)

    def pieces(self, wanted: SequenceRange) -> Iterator[Piece]:
        """The changes of a range, those that are still there; it reconnects when it must."""
        return self._parts(wanted, self._stream)

    def stored(self, wanted: SequenceRange) -> Iterator[Piece | BlockRows]:
        """The same, with blocks of rows as they are, if the server knows how to send them."""
        return self._parts(wanted, self._stream_stored)

    def _parts(
        self, wanted: SequenceRange, stream: Callable[[str, int, int], Iterator[P]]
    ) -> Iterator[P]:
        after, patience = wanted.after, _Patience(self.url)
        while after < wanted.upto:
            try:
                for part in stream(wanted.epoch, after, wanted.upto):
                    yield part
                    after = part.last
                    patience = _Patience(self.url)
                if self._has_no_more(wanted, after):
                    return
            except ServerError as error:
                patience.spend(error)

    def _has_no_more(self, wanted: SequenceRange, after: int) -> bool:
        """Whether a response ended where the log does, or was trimmed; else it was cut short.

        A response that breaks off within its headers looks like a short one, or another log's.
        """
        now = self.ranges(after, upto=after)
        expect_epoch(wanted.epoch, now.epoch)
        if after < wanted.upto <= now.latest_sequence and now.first_sequence <= after + 1:
            raise ServerAbsent(f"a response of {self.url} was cut short")
        return True

    def spans(self, wanted: SequenceRange) -> list[LogSpan]:
        """Nothing: a server does not tell."""
        return []

    def table(self, epoch: str, version: int) -> Table:
        """A version of a table's columns."""
        known = _versions.setdefault((self.url, epoch), [])
        if version > len(known):
            listed = self._get("/v1/tables", {"after": len(known)}, RemoteTables)
            expect_epoch(epoch, listed.epoch)
            known.extend(listed.tables)
        if not 0 < version <= len(known) or known[version - 1].version != version:
            raise LogError(f"the log at {self.url} has no table version {version}")
        return known[version - 1]

    def tables(self) -> list[Table]:
        """Every version of every table's columns that there is now."""
        return self._get("/v1/tables", {"after": 0}, RemoteTables).tables

    def since(self, moment: int) -> int:
        """The first sequence that was captured at a time or after it."""
        return self._get("/v1/ranges", {"after": 0, "upto": 0, "since": moment}, Ranges).since

    def hold(self, name: str, sequence: int) -> None:
        """Keep what follows a sequence from being removed, by a named cursor on the server."""
        http = HttpTransport(self.url, self._key, self._tls)
        body = {"sequence": sequence, "force": True}
        http.read(HttpRequest("PUT", f"/v1/cursors/{name}", body, seconds=RESPONSE_SECONDS))

    def _get(self, path: str, query: dict[str, Any], document: type[T]) -> T:
        patience = _Patience(self.url)
        while True:
            try:
                return msgspec.json.decode(self._read(with_query(path, query)), type=document)
            except (ServerError, msgspec.DecodeError) as error:
                patience.spend(error)

    def _read(self, path: str) -> bytes:
        """A response's body, over the connection of the last one if it still stands."""
        # One step: another thread may take the connection between a test and a pop.
        kept = _connections.pop(self, None)
        http, connections = kept or self._connect()
        try:
            body, _ = http.read(_request(path), connections)
        except BaseException:
            connections.close()
            raise
        _connections[self] = http, connections
        return body

    @property
    def _tls(self) -> TlsTrust:
        return TlsTrust(ca_file=self.ca_file)

    def _connect(self) -> tuple[HttpTransport, httpx.Client]:
        http = HttpTransport(self.url, self._key, self._tls)
        return http, http.connections()

    def _stream_stored(self, epoch: str, after: int, upto: int) -> Iterator[Piece | BlockRows]:
        for first, count, content in self._stream_raw(epoch, after, upto, _BLOCKS):
            if content[0] == MARK:
                yield BlockRows.unpacked(first, count, content)
            else:
                yield Piece(first, count, content)

    def _stream(self, epoch: str, after: int, upto: int) -> Iterator[Piece]:
        for first, count, records in self._stream_raw(epoch, after, upto, _RECORDS):
            yield Piece(first, count, records)

    def _stream_raw(
        self, epoch: str, after: int, upto: int, accept: str
    ) -> Iterator[tuple[int, int, bytes]]:
        http = HttpTransport(self.url, self._key, self._tls)
        path = with_query("/v1/records", {"after": after, "upto": upto})
        request = HttpRequest("GET", path, accept=accept, seconds=RESPONSE_SECONDS)
        with http.open(request) as response:
            self._note_generation(epoch, response.headers.get("X-Headrace-Generation", ""))
            if response.headers.get("X-Headrace-Epoch", "") != epoch:
                return
            body = _Body(http.pieces(response))
            while head := body.read(PIECE_HEAD.size):
                first, count, size = PIECE_HEAD.unpack(self._whole(head, PIECE_HEAD.size))
                yield first, count, self._whole(body.read(size), size)

    def _note_generation(self, epoch: str, generation: str) -> None:
        """Forget the tables of a log that may have been put back from a copy with others."""
        known = _generations.setdefault((self.url, epoch), generation)
        if known != generation:
            _versions.pop((self.url, epoch), None)
            _generations[self.url, epoch] = generation

    def _whole(self, data: bytes, size: int) -> bytes:
        if len(data) < size:
            raise ServerAbsent(f"a response of {self.url} was cut short")
        return data

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


# For as long as the process lives: the driver makes a request every second.
_connections: dict[RemoteLog, tuple[HttpTransport, httpx.Client]] = {}
_versions: dict[tuple[str, str], list[Table]] = {}
_generations: dict[tuple[str, str], str] = {}  # in which these were read


class _Body:
    """A body that comes in pieces, read in parts of known size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = bytearray()

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        while len(self._buffer) < size and (piece := next(self._pieces, None)) is not None:
            self._buffer += piece
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
        del self._buffer[:size]
        return data


class _Patience:
    """How long a request to a server that does not answer is repeated."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._failures = 0

    def spend(self, error: Exception) -> None:
        """Wait a little before the next attempt; LogUnreachable when there is none left."""
        if isinstance(error, ServerError) and error.status not in _PASSING:
            hint = "Check the url." if isinstance(error, ServerAbsent) else error.hint
            raise ServerError(str(error), hint=hint) from error
        if isinstance(error, ServerError) and not error.retry:
            raise error
        # A connection that went stale is replaced at once.
        pause = _BACKOFF.wait(self._failures) if self._failures else 0.0
        if time.monotonic() + pause > self._until:
            raise LogUnreachable(f"no Headrace server answers at {self._url}") from error
        time.sleep(pause)
        self._failures += 1


def _request(path: str) -> HttpRequest:
    return HttpRequest("GET", path, seconds=RESPONSE_SECONDS)


def _key_in(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the file {file}, which apiKeyFile names, cannot be read: {error.strerror}",
            hint="It must be there for the driver and for every executor.",
        ) from error


def reading(options: Options) -> LogAccess:
    """The log that the options name."""
    if options.path:
        return DiskLog(options.path)
    return RemoteLog(options.url, options.api_key_env, options.api_key_file, options.ca_file)
