"""The gRPC server: the changefeed, health and reflection, on the event loop that also serves HTTP.

Health and reflection ask for no key: they tell nothing of any row.
"""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..errors import ConfigError
from ..v1 import changefeed_pb2 as v1
from .rpcs import ChangeFeed
from .service import Service

NAME = v1.DESCRIPTOR.services_by_name["ChangeFeed"].full_name

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two servers on one port would each get some of the clients
    ("grpc.max_receive_message_length", 64 << 10),  # of a request
    ("grpc.max_concurrent_streams", 1000),  # of a connection
    # A client that vanished without closing answers no ping, and its streams end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # a client may look after us, too
)


class GrpcServer:
    """Answers at `server.grpc_port`, from `start` to `stop`; all of it on one event loop."""

    def __init__(self, service: Service) -> None:
        self._settings = service.settings
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=_OPTIONS)
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
