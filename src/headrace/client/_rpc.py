"""The changefeed's Subscribe, for both clients."""

from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import grpc

from ..errors import ConfigError, ServerAbsent, ServerBusy, ServerError
from ..secret import Secret
from ..v1 import changefeed_pb2 as v1
from ..v1.changefeed_pb2_grpc import ChangeFeedStub
from ._told import Event, Gap, Opened, Scanned, Told

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a row may have any size
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once, whatever failed before
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.enable_http_proxy", 0),
)
_ABSENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)


class Target(NamedTuple):
    """Where gRPC answers, and the key for it."""

    address: str  # host:port; https://host:port means with TLS
    key: Secret | None

    @property
    def place(self) -> str:
        """As gRPC writes it."""
        if not self.address:
            raise ConfigError(
                "transport grpc needs to know where gRPC answers",
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
            credentials = grpc.ssl_channel_credentials()
            return library.secure_channel(self.place, credentials, options=_OPTIONS)
        return library.insecure_channel(self.place, options=_OPTIONS)


def subscribed(target: Target, request: v1.SubscribeRequest) -> Generator[Told, None, None]:
    """What the server tells, until it goes away."""
    with target.channel(grpc) as channel:
        call = ChangeFeedStub(channel).Subscribe(request, metadata=target.metadata)
        try:
            yield from _opened(call.initial_metadata())
            for response in call:
                yield from _told(response)
        except grpc.RpcError as error:
            raise _failed(target, error) from error
        finally:
            call.cancel()
    raise ServerAbsent(f"the server at {target.place} went away")


async def subscribed_async(
    target: Target, request: v1.SubscribeRequest
) -> AsyncGenerator[Told, None]:
    """The same on an event loop."""
    async with target.channel(grpc.aio) as channel:
        call = ChangeFeedStub(channel).Subscribe(request, metadata=target.metadata)
        try:
            for opened in _opened(await call.initial_metadata()):
                yield opened
            async for response in call:
                for told in _told(response):
                    yield told
        except grpc.RpcError as error:
            raise _failed(target, error) from error
        finally:
            call.cancel()
    raise ServerAbsent(f"the server at {target.place} went away")


def _opened(metadata: Any) -> list[Opened]:
    # A call that failed may have none; its error comes with the first message.
    return [Opened(value) for name, value in metadata or () if name == "x-headrace-epoch"]


def _told(response: v1.SubscribeResponse) -> list[Told]:
    match response.WhichOneof("told"):
        case "gap":
            return [Gap(response.gap.first, response.gap.last)]
        case "scanned":
            return [Scanned(response.scanned)]
    return [Event(event.id, event.sequence, event) for event in response.events]


def _failed(target: Target, error: Any) -> ServerError:
    code, details = error.code(), error.details()
    if code in _ABSENT:
        return ServerAbsent(f"no Headrace answers at {target.place}: {details}")
    kind = ServerBusy if code in _BUSY else ServerError
    return kind(f"{target.place} answers {code.name}: {details}")
