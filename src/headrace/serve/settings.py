"""The server's settings."""

import ipaddress

from ..config.settings import CdcSection, ServerSection
from ..errors import ConfigError
from ..log import RetentionSettings
from ..log.backup import BackupFolders
from ..log.files import connections, file_limit, reserved_files
from ..sinks.report import PipelineFolder

_CDC = CdcSection()


class ServerSettings(ServerSection, frozen=True, kw_only=True):
    """The section `server` of the config, and what the server needs of other sections.

    Port 0 means any free one.
    """

    enabled: bool = _CDC.enabled  # whether /changefeed answers
    batch_size: int = _CDC.batch_size  # events in a page by default
    pipeline: PipelineFolder | None = None  # the one that /metrics reports
    retention: RetentionSettings = RetentionSettings()
    backup: BackupFolders | None = None  # what a backup copies

    @property
    def key_required(self) -> bool:
        """Whether a request without an API key is refused."""
        return self.require_key or not (self.allow_remote or is_loopback(self.host))

    @property
    def connections(self) -> int:
        """How many clients may be connected at once, by HTTP and by gRPC each."""
        limit, ports = file_limit(), 1 if self.grpc_port is None else 2
        if self.max_connections is None:
            return max(connections(limit) // ports, 1)
        needed = self.max_connections * ports + reserved_files(limit)
        if needed > limit:
            raise ConfigError(
                f"server.max_connections {self.max_connections} needs {needed} open files, and "
                f"this process may open {limit}",
                hint="Raise the limit (`ulimit -n`, or LimitNOFILE= of a systemd unit), or lower "
                "server.max_connections.",
            )
        return self.max_connections


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure(settings: ServerSettings) -> list[str]:
    """What whoever reaches the server's address, or listens on the way to it, may learn."""
    if is_loopback(settings.host):
        return []
    warnings = []
    if settings.allow_remote:
        warnings.append(
            "is open to whoever reaches it, without an API key, because server.allow_remote is "
            "true: let only a proxy or a private network reach it"
        )
    elif settings.tls is None:
        warnings.append(
            "is served without TLS: rows and API keys can be read on their way; set server.tls"
        )
    return warnings
