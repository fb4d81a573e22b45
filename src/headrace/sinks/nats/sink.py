"""NATS JetStream: each table's events on a subject of its own.

    a window ─▶ messages with an inbox each ─▶ a stream has stored them, and says so ─▶ accepted

The event's id is the message's `Nats-Msg-Id`: a stream drops a repeat that comes within its
duplicate window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from ...errors import ConfigError
from ...plugins import Finding
from ...secret import Secret
from ..push import BrokerSettings, Template
from .channel import NatsChannel, Subjects
from .session import PORT, NatsLogin

_SUBJECT = Template("cdc.${schema}.${table}")
_STREAM = re.compile(r"[^\s.*>/\\]*")
_UNFIT = re.compile(r"[\s*>]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nats(BrokerSettings):
    """Events in streams of NATS JetStream."""

    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType({"cryptography": "cryptography"})

    subject: Template = _SUBJECT
    token: Secret | None = None
    credentials_file: str = ""  # as `nsc` writes it
    stream: str = ""  # make it, if it is not there; "": somebody has
    stream_settings: Mapping[str, str | int | bool] = field(default_factory=dict)

    batch_size: int = 2_000
    batch_bytes: int = 4_000_000
    max_event_bytes: int = 1_000_000  # servers take 1 MiB a message as they come

    def __post_init__(self) -> None:
        BrokerSettings.__post_init__(self)
        self.hosts(PORT)
        given = [bool(self.username), bool(self.token), bool(self.credentials_file)]
        if sum(given) > 1:
            raise ConfigError("only one of username, token and credentials_file can be set")
        if (bad := _UNFIT.search(self.subject.plain)) or not self.subject.text:
            raise ConfigError(
                f"subject: {self.subject} "
                + (f"has {bad[0]!r} in it" if bad else "is empty, and is no subject")
            )
        if "" in self.subject.fill(source="x", schema="x", table="x").split("."):
            raise ConfigError(f"subject: {self.subject} has nothing between two dots")
        if not _STREAM.fullmatch(self.stream):
            raise ConfigError(f"stream: {self.stream} has a character that no stream's name has")
        if self.stream_settings and not self.stream:
            raise ConfigError("stream_settings are not used without stream")

    def connect(self) -> NatsChannel:
        """Open a connection, or raise SinkUnavailable."""
        subjects = Subjects(
            subject=self.subject, stream=self.stream, stream_settings=dict(self.stream_settings)
        )
        return NatsChannel(NatsLogin(self, self.token, self.credentials_file), subjects)

    def _check_connection(self) -> Finding:
        # Without the stream, which connecting would make.
        plain = replace(self, stream="", stream_settings={})
        plain.connect().close()
        return Finding("connection", ok=True, detail="it answers, and takes the login")
