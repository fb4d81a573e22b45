"""gRPC: `headrace.v1.ChangeFeed`, health and reflection, on the event loop that serves HTTP.

Health and reflection ask for no key: they show nothing of any row. Messages of the changefeed are
bytes before gRPC sees them: an event is encoded once, framed as field 1, and the result is a whole
SubscribeResponse as well as one of the `events` of a PollResponse.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..change.event import Change, Op
from ..errors import ConfigError, HeadraceError
from ..formats.protobuf import Protobuf
from ..formats.protostruct import framed
from ..formats.savegress import OPERATIONS
from ..v1 import changefeed_pb2 as v1
from .access import Access, authenticate, unauthenticated
from .filter import Filter, FilterParameters
from .keyring import LOOK_SECONDS
from .parameters import Names, ParameterRule
from .permissions import Permissions
from .problems import Problem, RequestRefused, invalid_parameter
from .query import MOST, UINT64, WAIT, read_value, rules
from .request import expect_permitted, expect_shared
from .service import Service
from .subscription import FeedPage, Subscription
from .tls import CertificateFiles

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Message)
Context = grpc.aio.ServicerContext[Any, bytes]
ChangesRequest = v1.SubscribeRequest | v1.PollRequest

IDLE_SECONDS = 15.0  # after which a reader that wanted nothing hears how far that was
PAGE_BYTES = 512 << 10  # of events on their way to one subscriber
END_SECONDS = 2.0  # for a client to take the status that ends its call
LARGEST_REQUEST = 64 << 10  # bytes
LARGEST_PAGE = 3 << 20  # clients refuse a message of more than 4 MiB unless set otherwise

_EVENTS = bytes([4 << 3 | 2])  # the tag of SubscribeResponse.events
_OPS: Mapping[int, frozenset[Op]] = {
    v1.Operation.Value(name): frozenset(op for op, known in OPERATIONS.items() if known == name)
    for name in OPERATIONS.values()
}
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True)
class EventMessages:
    """A format: messages that hold one event, as field 1."""

    event: Protobuf

    name: ClassVar[str] = "protobuf"
    media_type: ClassVar[str] = "application/x-protobuf"

    def encode(self, change: Change) -> bytes | None:
        """A SubscribeResponse with the event; None for what is not carried."""
        event = self.event.encode(change)
        return None if event is None else framed(1, event)


class MessageWriter:
    """A call's messages, on their way to a client that may not take them."""

    def __init__(self, access: Access, context: Context) -> None:
        self._access = access
        self._context = context
        self._waiting: asyncio.Timeout | None = None

    async def write(self, messages: list[bytes]) -> None:
        """Send as fast as the client has room."""
        try:
            async with asyncio.timeout(None) as self._waiting:
                for message in messages:
                    # A client that takes its time may not outlive its key.
                    if not self._access.valid():
                        raise unauthenticated()
                    # It waits until the client has room for it, and so do we.
                    await self._context.write(message)
        except TimeoutError as error:
            raise unauthenticated() from error
        except grpc.aio.InternalError as error:
            # The client vanished meanwhile: the call ends as one that it has cancelled.
            raise asyncio.CancelledError from error
        finally:
            self._waiting = None

    def let_go(self) -> None:
        """End the call if the client leaves a message untaken; else it ends by itself."""
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())


class ChangeFeed:
    """What the service does, on the server's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._format = EventMessages(Protobuf(service.formats.facts))

    async def subscribe(self, request: bytes, context: Context) -> None:
        """Every change after a sequence, until the client goes or has had its `limit`."""
        answer = _answered(self._subscribed(request, context), context)
        await self._service.requests.call("Subscribe", answer, context)

    async def poll(self, request: bytes, context: Context) -> bytes:
        """The next changes after a sequence."""
        answer = _answered(self._polled(request, context), context)
        return await self._service.requests.call("Poll", answer, context)

    async def _subscribed(self, raw: bytes, context: Context) -> None:
        access = self._admitted(context)
        request = _parsed(raw, v1.SubscribeRequest())
        writing = MessageWriter(access, context)
        with access.connected(writing.let_go):
            subscription = self._subscription(request, access)
            await context.send_initial_metadata(self._metadata())
            sent, reported = 0, request.after
            pages = subscription.follow(until=math.inf, idle=IDLE_SECONDS, room=PAGE_BYTES)
            async for whole in pages:
                page = _cut(whole, request.limit - sent if request.limit else 0)
                messages = _messages(page, reported, together=request.together)
                await writing.write(messages)
                count, reported = len(page.events), page.scanned
                del whole, page, messages  # they may be large, and nothing may come for long
                sent += count
                if request.limit and sent == request.limit:
                    return
                await self._rest(access.spend(count), access)
        raise _stopping() if access.valid() else unauthenticated()

    async def _polled(self, raw: bytes, context: Context) -> bytes:
        access = self._admitted(context)
        request = _parsed(raw, v1.PollRequest())
        limit = request.limit or self._service.settings.batch_size
        _expect(MOST.low <= limit <= MOST.high, "limit", limit, MOST.expects())
        _expect(request.wait_ms <= WAIT.high, "wait_ms", request.wait_ms, WAIT.expects())
        with access.connected():
            subscription = self._subscription(request, access)
            page = _fitting(await subscription.page(limit, wait=request.wait_ms / 1000))
        access.spend(len(page.events))
        return self._response(page)

    async def _rest(self, seconds: float, access: Access) -> None:
        """Send nothing for a while: the key has had what it may have for now."""
        now = asyncio.get_running_loop().time
        until = now() + seconds
        feed = self._service.feed
        while now() < until and access.valid() and not feed.closing:
            await feed.wait(UINT64, min(until, now() + LOOK_SECONDS))

    def _admitted(self, context: Context) -> Access:
        access = authenticate(self._service, _presented(context))
        access.admit()
        return access

    def _subscription(self, request: ChangesRequest, access: Access) -> Subscription:
        expect_permitted(self._service, access, request.tables)
        return Subscription(
            self._service.feed,
            self._format,
            filter=_filter(request),
            after=expect_shared(
                self._service, request.after, request.epoch or None, request.generation or None
            ),
            permissions=Permissions.of(access),
        )

    def _response(self, page: FeedPage) -> bytes:
        rest = v1.PollResponse(
            scanned=page.scanned,
            latest_sequence=self._service.log.latest_sequence,
            epoch=self._service.feed.epoch,
            generation=self._service.feed.generation,
            gap=v1.Gap(**page.gap._asdict()) if page.gap else None,
        )
        # Fields of a message may stand in any order, and those that repeat, anywhere.
        return b"".join([*page.payloads, rest.SerializeToString()])

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """What a subscriber must know of the log before its first event."""
        return (
            ("x-headrace-epoch", self._service.feed.epoch),
            ("x-headrace-generation", self._service.feed.generation),
            ("x-headrace-latest", str(self._service.log.latest_sequence)),
        )


def _presented(context: Context) -> str | None:
    """The key in the metadata; None: there is none."""
    metadata = [(name, str(value)) for name, value in context.invocation_metadata() or ()]
    given = [value for name, value in metadata if name == "x-api-key"]
    # A proxy's own scheme, such as Basic, is none of ours.
    tokens = [value.partition(" ") for name, value in metadata if name == "authorization"]
    given += [token.strip() for scheme, _, token in tokens if scheme.lower() == "bearer"]
    if len(given) > 1:
        message = "the API key must be given once: as x-api-key, or as a bearer token"
        raise RequestRefused(400, Problem("ambiguous_key", message))
    return given[0] if given else None


def _parsed(raw: bytes, request: R) -> R:
    # Here and not by gRPC, which would call it a failure of ours.
    if len(raw) > LARGEST_REQUEST:  # it came compressed
        message = f"a request has at most {LARGEST_REQUEST} bytes"
        raise RequestRefused(400, Problem("invalid_message", message))
    try:
        request.ParseFromString(raw)
    except DecodeError as error:
        message = f"these bytes are no {request.DESCRIPTOR.full_name}"
        raise RequestRefused(400, Problem("invalid_message", message)) from error
    return request


def _filter(request: ChangesRequest) -> Filter:
    for number in request.operations:
        _expect(number in _OPS, "operations", number, "must be INSERT, UPDATE, DELETE or DDL")
    known = rules(FilterParameters)
    given: dict[str, Any] = {
        field.name: _checked(field.name, value, known.get(field.name))
        for field, value in request.ListFields()
        if field.name in Filter.__struct_fields__
    }
    operations = frozenset[Op]().union(*(_OPS[number] for number in request.operations))
    return Filter(**given | {"operations": operations})


def _checked(name: str, value: Any, rule: ParameterRule | None) -> Any:
    if isinstance(value, str) and rule is not None:
        return read_value(name, value, rule)
    if not isinstance(rule, Names):
        return value
    try:
        return rule.checked(value)
    except ValueError as error:
        raise invalid_parameter(name, ",".join(value), f"{name} {rule.expects()}") from error


def _expect(right: bool, name: str, value: object, rule: str) -> None:
    if not right:
        raise invalid_parameter(name, str(value), f"{name} {rule}, and not {value!r:.200}")


def _messages(page: FeedPage, reported: int, *, together: bool) -> list[bytes]:
    """A page for a subscriber that knows everything up to `reported`."""
    messages = _joined(page) if together else page.payloads
    if page.gap:
        gap = v1.SubscribeResponse(gap=v1.Gap(**page.gap._asdict()))
        messages.insert(0, gap.SerializeToString())
    last = page.events[-1].sequence if page.events else reported
    if page.scanned > last:
        messages.append(v1.SubscribeResponse(scanned=page.scanned).SerializeToString())
    return messages


def _joined(page: FeedPage) -> list[bytes]:
    """The events of a page in as few messages as clients take."""
    messages = []
    while page.events:
        fitting = _fitting(page)
        messages.append(fitting.once(_together))
        page = FeedPage(page.events[len(fitting.events) :], page.scanned)
    return messages


def _together(page: FeedPage) -> bytes:
    # Framed as field 1, and here they are field 4; the rest of the frame is the same.
    return b"".join(_EVENTS + payload[1:] for payload in page.payloads)


def _fitting(page: FeedPage) -> FeedPage:
    """As much of a page as clients take in one message, but at least one event."""
    room = LARGEST_PAGE
    for count, event in enumerate(page.events):
        room -= len(event.payload)
        if room < 0 and count:
            return _cut(page, count)
    return page


def _cut(page: FeedPage, count: int) -> FeedPage:
    """The page as one that ends after so many events; 0: as it is."""
    if not count or len(page.events) <= count:
        return page
    kept = page.events[:count]
    return FeedPage(kept, kept[-1].sequence, page.gap)


async def _answered(answer: Awaitable[T], context: Context) -> T:
    """An answer, or the status that says why there is none."""
    try:
        return await answer
    except RequestRefused as refused:
        code = _CODES.get(refused.status_code, grpc.StatusCode.INTERNAL)
        problem = refused.problem
        words = _words(problem.message, problem.hint)
        try:
            async with asyncio.timeout(END_SECONDS):
                await context.abort(code, words, _named(problem.error))
        except TimeoutError as error:
            # It is on its way behind what the client has not taken; nobody waits for that.
            raise asyncio.CancelledError from error
    except HeadraceError as error:
        logger.error("grpc error=%s", error)
        words = _words(str(error), error.hint)
        await context.abort(grpc.StatusCode.UNAVAILABLE, words, _named("unavailable"))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        logger.error("grpc", exc_info=error)
        words = "the server failed; its log says why"
        await context.abort(grpc.StatusCode.INTERNAL, words, _named("server_error"))
    raise AssertionError("an aborted call goes no further")


def _stopping() -> RequestRefused:
    message = "the server stops; ask again after the last sequence you have"
    return RequestRefused(503, Problem("stopping", message))


def _words(message: str, hint: str | None) -> str:
    return f"{message}. {hint}" if hint else message


def _named(error: str) -> tuple[tuple[str, str]]:
    """The word for programs, beside the sentence for people."""
    return (("x-headrace-error", error),)


# --- the server ----------------------------------------------------------------------------------

NAME = v1.DESCRIPTOR.services_by_name["ChangeFeed"].full_name

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would each get some of the clients
    ("grpc.max_receive_message_length", LARGEST_REQUEST),
    # A few bytes could become many: no request is compressed.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_concurrent_streams", 1000),  # of a connection
    # A client that vanished without closing answers no ping, and its streams end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # a client may look after us, too
)


class GrpcServer:
    """Answers at `server.grpc_port`, from `start` to `stop`; all of it on one event loop."""

    def __init__(self, service: Service, tls: CertificateFiles | None = None) -> None:
        self._settings = service.settings
        self._tls = tls
        self._health = health.aio.HealthServicer()
        most = ("grpc.max_allowed_incoming_connections", self._settings.connections)
        self._server = grpc.aio.server(options=(*_OPTIONS, most))
        self._server.add_generic_rpc_handlers((_methods(ChangeFeed(service)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = self._bound()

    async def start(self) -> None:
        """Begin to answer."""
        await self._health.set(NAME, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Take no more calls, and end those that go on for longer than `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    def _bound(self) -> int:
        host, port = self._settings.host, self._settings.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is not None:
                return self._server.add_secure_port(address, self._tls.credentials())
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                f"server.grpc_port {port} on {host} cannot be listened on",
                hint="Stop the program that uses it, or set server.grpc_port to a free one "
                "above 1024; server.host must be an address of this machine.",
            ) from error


def _methods(feed: ChangeFeed) -> grpc.GenericRpcHandler:
    """The service by its methods, which take and return bytes."""
    return grpc.method_handlers_generic_handler(
        NAME,
        {
            "Subscribe": grpc.unary_stream_rpc_method_handler(feed.subscribe),
            "Poll": grpc.unary_unary_rpc_method_handler(feed.poll),
        },
    )
