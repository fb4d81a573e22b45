"""The changefeed's Subscribe, for both clients."""

from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import grpc

from ..errors import ConfigError, FeedReplaced, ServerAbsent, ServerBusy, ServerError
from ..secret import Secret
from ..v1 import changefeed_pb2 as v1
from ..v1.changefeed_pb2_grpc import ChangeFeedStub
from .messages import MissedChanges, Opened, ReceivedEvent, Scanned, StreamMessage
from .trust import TlsTrust

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a row may have any size
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once, whatever failed before
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.enable_http_proxy", 0),
)
_ABSENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)


class GrpcTarget(NamedTuple):
    """Where gRPC answers, and the key for it."""

    address: str  # host:port; https://host:port means with TLS
    key: Secret | None
    tls: TlsTrust | None = None

    @property
    def authority(self) -> str:
        """Host and port, as gRPC writes them."""
        if not self.address:
            raise ConfigError(
                "transport grpc needs the address at which gRPC answers",
                hint='Give it to the client: Client(url, key, grpc="127.0.0.1:50051").',
            )
        return self.address.removeprefix("https://").removeprefix("http://")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The key, as it goes with a call."""
        return () if self.key is None else (("x-api-key", self.key.reveal()),)

    def channel(self, library: Any) -> Any:
        """A channel of `grpc` or of `grpc.aio`."""
        if self.address.startswith("https://"):
            credentials = (self.tls or TlsTrust()).credentials()
            return library.secure_channel(self.authority, credentials, options=_OPTIONS)
        return library.insecure_channel(self.authority, options=_OPTIONS)


def subscribe(
    target: GrpcTarget, request: v1.SubscribeRequest
) -> Generator[StreamMessage, None, None]:
    """What the server sends, until it goes away."""
    with target.channel(grpc) as channel:
        call = ChangeFeedStub(channel).Subscribe(request, metadata=target.metadata)
        try:
            yield from _opened(call.initial_metadata())
            for response in call:
                yield from _messages(response)
        except grpc.RpcError as error:
            raise _failed(target, error) from error
        finally:
            call.cancel()
    raise ServerAbsent(f"the server at {target.authority} went away")


async def subscribe_async(
    target: GrpcTarget, request: v1.SubscribeRequest
) -> AsyncGenerator[StreamMessage, None]:
    """The same on an event loop."""
    async with target.channel(grpc.aio) as channel:
        call = ChangeFeedStub(channel).Subscribe(request, metadata=target.metadata)
        try:
            for opened in _opened(await call.initial_metadata()):
                yield opened
            async for response in call:
                for message in _messages(response):
                    yield message
        except grpc.RpcError as error:
            raise _failed(target, error) from error
        finally:
            call.cancel()
    raise ServerAbsent(f"the server at {target.authority} went away")


def _opened(metadata: Any) -> list[Opened]:
    # A call that failed may have none; its error comes with the first message.
    found = dict(metadata or ())
    epoch = found.get("x-headrace-epoch")
    return [] if epoch is None else [Opened(epoch, found.get("x-headrace-generation", ""))]


def _messages(response: v1.SubscribeResponse) -> list[StreamMessage]:
    match response.WhichOneof("item"):
        case "gap":
            return [MissedChanges(response.gap.first, response.gap.last)]
        case "scanned":
            return [Scanned(response.scanned)]
    return [ReceivedEvent(event.id, event.sequence, event) for event in response.events]


def _failed(target: GrpcTarget, error: Any) -> ServerError:
    code, details = error.code(), error.details()
    if code in _ABSENT:
        return ServerAbsent(f"no Headrace server answers at {target.authority}: {details}")
    kind = ServerBusy if code in _BUSY else ServerError
    if dict(error.trailing_metadata() or ()).get("x-headrace-error") == "other_log":
        kind = FeedReplaced
    return kind(f"{target.authority} answers {code.name}: {details}")
