"""The HTTP/1.1 connections to one endpoint: which addresses they use, and those that are kept."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import httptools

from .address import Endpoint, not_allowed, special
from .response import HttpResponse

LONGEST_HEAD = 64 << 10  # bytes of a response before its body
LONGEST_BODY = 4 << 10  # bytes of a body that are read at all
BODY_SECONDS = 1.0  # how long a body is waited for: the status is enough
IDLE_SECONDS = 30.0  # after which a kept connection is not trusted: routers forget it silently
RESOLVED_SECONDS = 30.0  # how long resolved addresses are used
CONNECT_SECONDS = 10.0  # for all addresses together


class ResponseLost(Exception):
    """No response came; `unseen`: the endpoint may have closed before it read the request."""

    def __init__(self, message: str, *, unseen: bool = False) -> None:
        super().__init__(message)
        self.unseen = unseen


class ResponseTimeout(ResponseLost):
    """No response came in time."""


class HttpConnection(asyncio.Protocol):
    """One request at a time; httptools calls the `on_…` methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[HttpResponse] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._responses = 0
        self._begin()

    def _begin(self) -> None:
        self._status = 0
        self._retry_after = ""
        self._body = b""
        self._received = 0  # bytes of this response
        self._draining = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def _awaits_response(self) -> bool:
        return self._waiting is not None

    async def request(self, request: bytes, seconds: float) -> HttpResponse:
        """Send a request; ResponseLost when no response comes within so many seconds."""
        if self._transport is None or self._transport.is_closing():
            raise ResponseLost("it closed the connection", unseen=True)
        self._begin()
        self._waiting = self._loop.create_future()
        self._timer = self._loop.call_later(seconds, self._timed_out)
        try:
            self._transport.write(request)
            return await self._waiting
        finally:
            self._timer.cancel()
            if self._waiting is not None:  # given up: a response that still comes is dropped
                self._waiting = None
                self.close()

    def close(self) -> None:
        """Abort it: what was not sent is not to be sent any more."""
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of another class

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if not self._awaits_response():
            self.close()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(ResponseLost("what it answered is not HTTP/1.1"))
            return
        if not self._awaits_response():
            return
        if self._status:
            self._expect_the_rest()
        elif self._received > LONGEST_HEAD:
            self._end(ResponseLost(f"its answer has more than {LONGEST_HEAD >> 10} KB of headers"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._awaits_response():
            return
        if self._status:
            self._end(self._response())
        else:
            unseen = self._responses > 0 and self._received == 0
            self._end(ResponseLost("it closed the connection without an answer", unseen=unseen))

    # --- what the parser calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._awaits_response():
            self.close()  # a second response would be taken for that of the next request

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._status = 0 if 100 <= status < 200 and status != 101 else status

    def on_body(self, piece: bytes) -> None:
        if len(self._body) < LONGEST_BODY:
            self._body = (self._body + piece)[:LONGEST_BODY]

    def on_message_complete(self) -> None:
        if not self._status:
            return  # 100 Continue and the like: the response is still to come
        keep, self._responses = self._parser.should_keep_alive(), self._responses + 1
        self._end(self._response(), keep=keep)

    # --- the end of a request --------------------------------------------------------------------

    def _expect_the_rest(self) -> None:
        """The status is there and the body is not: it is read only to keep the connection."""
        if len(self._body) >= LONGEST_BODY:
            self._end(self._response())
        elif self._timer is not None and not self._draining:
            self._draining = True
            self._timer.cancel()
            self._timer = self._loop.call_later(BODY_SECONDS, self._timed_out)

    def _timed_out(self) -> None:
        self._end(self._response() if self._status else ResponseTimeout("no answer in time"))

    def _response(self) -> HttpResponse:
        return HttpResponse(self._status, self._retry_after, self._body)

    def _end(self, outcome: HttpResponse | ResponseLost, *, keep: bool = False) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            if isinstance(outcome, ResponseLost):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)
        if not keep:
            self.close()


class EndpointUnreachable(Exception):
    """The endpoint cannot be connected to; the message has no secret."""


class ResolvedAddress(NamedTuple):
    """An address as the system's resolver gave it."""

    family: int
    address: Any  # what a socket connects to


def resolve(endpoint: Endpoint, *, private: bool) -> list[ResolvedAddress]:
    """The addresses of the host; if one of them is not allowed, none is used."""
    try:
        found = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError):
        raise EndpointUnreachable(f"the address of {endpoint.host} is not known") from None
    addresses = list(dict.fromkeys(ResolvedAddress(entry[0], entry[4]) for entry in found))
    if not private:
        for each in addresses:
            _expect_public(endpoint, str(each.address[0]))
    return addresses


def _expect_public(endpoint: Endpoint, found: str) -> None:
    address = ipaddress.ip_address(found.partition("%")[0])
    if kind := special(address):
        raise EndpointUnreachable(not_allowed(endpoint.host, address, kind))


class ConnectionPool:
    """Keeps connections; the addresses that were checked are those that are connected to."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: Endpoint,
        *,
        tls: ssl.SSLContext | None,
        private: bool,
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._tls = tls
        self._private = private
        self._idle: list[tuple[float, HttpConnection]] = []  # when it was last used
        self._addresses: asyncio.Future[list[ResolvedAddress]] | None = None
        self._addresses_until = 0.0

    async def request(self, request: bytes, seconds: float, *, anew: bool = False) -> HttpResponse:
        """Send a request; ResponseLost: no response came, EndpointUnreachable: it was not sent.

        With `anew` no kept connection is used.
        """
        deadline = self._loop.time() + seconds
        connection = None if anew else self._kept()
        if connection is None:
            connection = await self._dial(min(seconds, CONNECT_SECONDS))
        response = await connection.request(request, max(deadline - self._loop.time(), 0.0))
        if connection.usable:
            self._idle.append((self._loop.time(), connection))
        return response

    async def reach(self) -> None:
        """Connect, and close again without a request; EndpointUnreachable when that fails."""
        (await self._dial(CONNECT_SECONDS)).close()

    def _kept(self) -> HttpConnection | None:
        trusted = self._loop.time() - IDLE_SECONDS
        while self._idle:
            since, connection = self._idle.pop()
            if connection.usable and since >= trusted:
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Close all connections."""
        if self._addresses is not None:
            self._addresses.cancel()
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    # --- new connections -------------------------------------------------------------------------

    async def _dial(self, seconds: float) -> HttpConnection:
        deadline = self._loop.time() + seconds
        addresses = await self._resolved(seconds)
        for tried, address in enumerate(addresses):
            left = deadline - self._loop.time()
            try:
                async with asyncio.timeout(max(left, 0.0) / (len(addresses) - tried)):
                    return await self._connect(address)
            except (OSError, TimeoutError) as error:
                reason = _why(error, self._endpoint)
        self._addresses = None  # it may have moved
        raise EndpointUnreachable(reason)

    async def _connect(self, resolved: ResolvedAddress) -> HttpConnection:
        opened = socket.socket(resolved.family, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(opened, resolved.address)
            _, connection = await self._loop.create_connection(
                lambda: HttpConnection(self._loop),
                sock=opened,
                ssl=self._tls,
                server_hostname=self._endpoint.host if self._tls else None,
            )
        except BaseException:
            opened.close()
            raise
        return connection

    async def _resolved(self, seconds: float) -> Sequence[ResolvedAddress]:
        """The host's addresses; connections that are opened together resolve them once."""
        if self._addresses is None or time.monotonic() > self._addresses_until:
            self._addresses_until = time.monotonic() + RESOLVED_SECONDS
            self._addresses = asyncio.ensure_future(
                asyncio.to_thread(resolve, self._endpoint, private=self._private)
            )
            self._addresses.add_done_callback(_retrieve_error)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._addresses)
        except TimeoutError:
            self._addresses = None
            raise EndpointUnreachable(
                f"the resolver does not answer for {self._endpoint.host}"
            ) from None
        except EndpointUnreachable:
            self._addresses = None
            raise


def _retrieve_error(resolving: asyncio.Future[list[ResolvedAddress]]) -> None:
    """Keep asyncio from logging the error of a resolver that is not awaited any more."""
    if not resolving.cancelled():
        resolving.exception()


def _why(error: OSError | TimeoutError, endpoint: Endpoint) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {endpoint.origin} is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{endpoint.origin} does not speak TLS as it should: {error.reason or 'no reason'}"
    if isinstance(error, TimeoutError):
        return f"{endpoint.origin} cannot be connected to: no answer"
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return f"{endpoint.origin} cannot be connected to: {reason}"
