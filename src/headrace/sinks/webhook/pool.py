"""The connections to one endpoint: where they may lead, and those that are kept."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .address import Endpoint, not_allowed, special
from .answer import Reply
from .connection import Connection

IDLE_SECONDS = 30.0  # after which a kept connection is not trusted: routers forget it silently
RESOLVED_SECONDS = 30.0  # how long an answer of the resolver is used
CONNECT_SECONDS = 10.0  # for all addresses together


class Unreached(Exception):
    """The endpoint cannot be asked at all; the message says why, and nothing secret."""


class Place(NamedTuple):
    """An address as the system's resolver gave it."""

    family: int
    address: Any  # what a socket connects to


def resolve(endpoint: Endpoint, *, private: bool) -> list[Place]:
    """Where the host is. One address that is not allowed makes all of them suspect."""
    try:
        found = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except (OSError, UnicodeError):
        raise Unreached(f"the address of {endpoint.host} is not known") from None
    places = list(dict.fromkeys(Place(entry[0], entry[4]) for entry in found))
    if not private:
        for place in places:
            _expect_public(endpoint, str(place.address[0]))
    return places


def _expect_public(endpoint: Endpoint, found: str) -> None:
    address = ipaddress.ip_address(found.partition("%")[0])
    if kind := special(address):
        raise Unreached(not_allowed(endpoint.host, address, kind))


class Pool:
    """Connections to an endpoint; what was checked is what is connected to."""

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
        self._idle: list[tuple[float, Connection]] = []  # since when
        self._places: asyncio.Future[list[Place]] | None = None
        self._places_until = 0.0

    async def ask(self, request: bytes, seconds: float, *, anew: bool = False) -> Reply:
        """Send a request; Lost when no answer comes, Unreached when it could not be sent.

        With `anew` no kept connection is used.
        """
        deadline = self._loop.time() + seconds
        connection = None if anew else self._kept()
        if connection is None:
            connection = await self._dial(min(seconds, CONNECT_SECONDS))
        reply = await connection.ask(request, max(deadline - self._loop.time(), 0.0))
        if connection.usable:
            self._idle.append((self._loop.time(), connection))
        return reply

    def _kept(self) -> Connection | None:
        trusted = self._loop.time() - IDLE_SECONDS
        while self._idle:
            since, connection = self._idle.pop()
            if connection.usable and since >= trusted:
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Let go of all that are kept."""
        if self._places is not None:
            self._places.cancel()
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    # --- new connections -------------------------------------------------------------------------

    async def _dial(self, seconds: float) -> Connection:
        deadline = self._loop.time() + seconds
        places = await self._resolved(seconds)
        for tried, place in enumerate(places):
            left = deadline - self._loop.time()
            try:
                async with asyncio.timeout(max(left, 0.0) / (len(places) - tried)):
                    return await self._connect(place)
            except (OSError, TimeoutError) as error:
                reason = _why(error, self._endpoint)
        self._places = None  # it may have moved
        raise Unreached(reason)

    async def _connect(self, place: Place) -> Connection:
        opened = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(opened, place.address)
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._loop),
                sock=opened,
                ssl=self._tls,
                server_hostname=self._endpoint.host if self._tls else None,
            )
        except BaseException:
            opened.close()
            raise
        return connection

    async def _resolved(self, seconds: float) -> Sequence[Place]:
        """The host's addresses; connections that are opened together ask once."""
        if self._places is None or time.monotonic() > self._places_until:
            self._places_until = time.monotonic() + RESOLVED_SECONDS
            self._places = asyncio.ensure_future(
                asyncio.to_thread(resolve, self._endpoint, private=self._private)
            )
            self._places.add_done_callback(_heard)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._places)
        except TimeoutError:
            self._places = None
            raise Unreached(f"the resolver does not answer for {self._endpoint.host}") from None
        except Unreached:
            self._places = None
            raise


def _heard(asked: asyncio.Future[list[Place]]) -> None:
    """Take note of what a resolver says when nobody waits for it any more."""
    if not asked.cancelled():
        asked.exception()


def _why(error: OSError | TimeoutError, endpoint: Endpoint) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {endpoint.origin} is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"{endpoint.origin} does not speak TLS as it should: {error.reason or 'no reason'}"
    if isinstance(error, TimeoutError):
        return f"{endpoint.origin} cannot be connected to: no answer"
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return f"{endpoint.origin} cannot be connected to: {reason}"
