"""Settings that every message broker shares: servers, login, TLS."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

from ...errors import ConfigError
from ...secret import MASK, Secret
from .settings import PushSettings
from .wire import Host, client_context

_HOST = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<name>[^:\[\]/@\s]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(PushSettings):
    """A push sink that has one connection to a server."""

    servers: str  # host:port, with commas between; the first that answers is taken
    username: str = ""
    password: Secret | None = None
    tls: bool = False
    ca_file: str = ""  # PEM; "": the machine's own authorities
    certificate_file: str = ""  # PEM, for servers that ask for one
    key_file: str = ""
    timeout_seconds: float = 30.0  # in which a window is accepted

    def __post_init__(self) -> None:
        PushSettings.__post_init__(self)
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be above 0, not {self.timeout_seconds}")
        for name in ("ca_file", "certificate_file", "key_file"):
            if getattr(self, name) and not self.tls:
                raise ConfigError(f"{name} is not used without tls; set tls: true")
        if self.key_file and not self.certificate_file:
            raise ConfigError("key_file needs certificate_file")
        if self.password and not self.username:
            raise ConfigError("password needs username")

    @property
    def address(self) -> str:
        """The servers."""
        return self.servers

    def hosts(self, port: int) -> tuple[Host, ...]:
        """The servers; `port` is for those that name none."""
        return tuple(host_of(each.strip(), port) for each in self.servers.split(","))

    def context(self) -> ssl.SSLContext | None:
        """The TLS context; None: the connection is plain."""
        if not self.tls:
            return None
        return client_context(self.ca_file, self.certificate_file, self.key_file)

    def without_secrets(self, text: str) -> str:
        """A server's text without our password."""
        return without_secrets(text, self.password)


def without_secrets(text: str, *secrets: Secret | None) -> str:
    """The text with secrets masked."""
    for secret in secrets:
        if secret and secret.reveal():
            text = text.replace(secret.reveal(), MASK)
    return text


def host_of(text: str, port: int) -> Host:
    """A server from host:port; `port` is for one that names none."""
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"] or port) < 65536:
        # It may have a password in it, so it is not shown.
        raise ConfigError("servers: name each server as host:port, without a user or a scheme")
    return Host(found["six"] or found["name"], int(found["port"] or port))
