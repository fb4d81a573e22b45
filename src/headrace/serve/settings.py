"""The server's settings."""

import ipaddress
from typing import Annotated

import msgspec

from ..sinks.report import PipelineFolder
from .ws.session import Rules

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, and what it calls unhealthy."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 3000  # 0: any free one
    grpc_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None  # None: no gRPC
    enabled: bool = True  # whether /changefeed answers
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100  # events in a page by default
    max_lag_seconds: Seconds = 60.0  # a source further behind is unhealthy
    stall_seconds: Seconds = 90.0  # a source silent for longer is unhealthy
    allow_remote: bool = False  # something else decides who reaches the server; no key is needed
    websocket: Rules = Rules()
    require_key: bool = False  # also from programs on this machine
    pipeline: PipelineFolder | None = None  # one that /metrics tells of

    @property
    def key_required(self) -> bool:
        """Whether a request without an API key is refused."""
        return self.require_key or not (self.allow_remote or is_loopback(self.host))


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
