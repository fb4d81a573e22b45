"""HTTP on an event loop: one question and its answer, over a connection of their own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httptools
import msgspec

from ..errors import ServerAbsent
from ._address import ANSWER_SECONDS, CONNECT_SECONDS, Address, refusal

_PIECE = 64 << 10


class Question(NamedTuple):
    """What is asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: object = None  # a JSON document

    def encoded(self, address: Address) -> bytes:
        """The request's bytes."""
        body = b"" if self.body is None else msgspec.json.encode(self.body)
        host = f"[{address.host}]" if ":" in address.host else address.host
        fields = {"Host": f"{host}:{address.port}", "Connection": "close", **self.headers}
        if self.body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return (
            f"{self.method} {address.path}{self.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1")
            + body
        )


class Answer:
    """What comes back; httptools calls its `on_…` methods."""

    def __init__(self, reader: asyncio.StreamReader, what: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader = reader
        self._what = what
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        self._complete = True

    async def begin(self) -> None:
        """Wait for the status; ServerAbsent when none comes."""
        while not self.status:
            if not await self._more(ANSWER_SECONDS):
                raise ServerAbsent(f"{self._what} is not answered")

    async def expect_success(self) -> None:
        """Raise what the answer says, unless it is a good one."""
        if self.status >= 300:
            what, after = f"{self._what} answers {self.status}", self.headers.get("retry-after")
            raise refusal(what, self.status, await self._whole(), after=after)

    async def json(self) -> Any:
        """The answer's document."""
        try:
            return msgspec.json.decode(await self._whole())
        except msgspec.DecodeError as error:
            raise ServerAbsent(f"what answers {self._what} is no Headrace") from error

    async def lines(self, silence: float) -> AsyncIterator[bytes]:
        """Whole lines as they come, until the answer ends; `silence` is in seconds."""
        looked = 0  # a long line comes in many pieces, and each is looked at once
        while True:
            while (end := self._body.find(b"\n", looked)) >= 0:
                line, looked = bytes(self._body[:end]), 0
                del self._body[: end + 1]
                yield line.removesuffix(b"\r")
            looked = len(self._body)
            if not await self._more(silence):
                return

    async def _whole(self) -> bytes:
        while await self._more(ANSWER_SECONDS):
            pass
        return bytes(self._body)

    async def _more(self, seconds: float) -> bool:
        """Take what comes next; False: nothing does."""
        if self._complete:
            return False
        try:
            async with asyncio.timeout(seconds):
                piece = await self._reader.read(_PIECE)
            if piece:
                self._parser.feed_data(piece)
        except (OSError, httptools.HttpParserError) as error:  # a TimeoutError is one, too
            raise ServerAbsent(f"{self._what}: the server went away") from error
        return bool(piece)


@asynccontextmanager
async def ask(address: Address, question: Question) -> AsyncIterator[Answer]:
    """The answer to a question; the connection ends with the context."""
    secured = ssl.create_default_context() if address.tls else None
    what = f"{address.host}:{address.port}{address.path}{question.path}"
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=secured)
    except OSError as error:
        raise ServerAbsent(f"no Headrace answers at {address.host}:{address.port}") from error
    try:
        writer.write(question.encoded(address))
        answer = Answer(reader, what)
        await answer.begin()
        yield answer
    finally:
        writer.transport.abort()
