"""The server's settings."""

import ipaddress
from typing import Annotated

import msgspec

from ..errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server listens, and what it calls unhealthy."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 3000  # 0: any free one
    enabled: bool = True  # whether /changefeed answers
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100  # events in a page by default
    max_lag_seconds: Seconds = 60.0  # a source further behind is unhealthy
    stall_seconds: Seconds = 90.0  # a source silent for longer is unhealthy
    allow_remote: bool = False

    def __post_init__(self) -> None:
        if not self.allow_remote and not is_loopback(self.host):
            raise ConfigError(
                f"server.host {self.host!r} is not a loopback address, and the server asks nobody "
                "who they are",
                hint="Set server.host to 127.0.0.1; or let only trusted clients reach it "
                "(a reverse proxy with access control) and set server.allow_remote to true.",
            )


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
