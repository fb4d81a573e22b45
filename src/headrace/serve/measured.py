"""Requests over HTTP and gRPC, counted by what a server has, never by what a client sends."""

import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from ..log.counts import Histogram

T = TypeVar("T")
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"}
_STATUS = {"websocket.accept": 101, "websocket.close": 403}
_OK = grpc.StatusCode.OK
_CANCELLED = grpc.StatusCode.CANCELLED


class RequestCounts:
    """How many requests were answered how, and how long they waited for that."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, str]] = Counter()  # route, method, status
        self.http_seconds: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        self.grpc: Counter[tuple[str, str]] = Counter()  # method, code
        self.grpc_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)

    async def call(
        self, method: str, answer: Awaitable[T], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> T:
        """Await the answer to a call of gRPC, and count it when it ends."""
        began, code = time.perf_counter(), _CANCELLED
        try:
            answered = await answer
            code = _OK
        except grpc.aio.AbortError:
            code = _code(context.code())
            raise
        finally:
            self.grpc[method, code.name] += 1
            self.grpc_seconds[method].observe(time.perf_counter() - began)
        return answered


def _code(code: Any) -> grpc.StatusCode:
    """The status of an aborted call, which gRPC keeps as a number or as it was given."""
    known = (each for each in grpc.StatusCode if code in (each, each.value[0]))
    return next(known, grpc.StatusCode.UNKNOWN)


class MeasuredApp:
    """An app whose requests are counted when the head of their answer is sent.

    So a long poll counts with its waiting, and a stream without what follows.
    """

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":  # type: ignore[comparison-overlap]
            await self._app(scope, receive, send)
            return
        began, answered, gone = time.perf_counter(), False, False

        async def counting(message: Message) -> None:
            nonlocal answered, gone
            status = _STATUS.get(message["type"]) or message.get("status")
            if status is not None and not answered:
                answered = True
                self._count(scope, str(status), time.perf_counter() - began)
            try:
                await send(message)
            except RuntimeError as error:  # uvloop's, at the second of requests sent together
                gone = "handler is closed" in str(error)
                raise

        try:
            await self._app(scope, receive, counting)
        except Exception:
            if not gone:  # a client that has left is no failure
                raise

    def _count(self, scope: Any, status: str, seconds: float) -> None:
        # What no route answers has none: a path is what the client likes.
        route = scope.get("path_template", "")
        given = scope.get("method", "GET")
        method = given if given in _METHODS else ""
        self._counts.http[route, method, status] += 1
        self._counts.http_seconds[route, method].observe(seconds)
