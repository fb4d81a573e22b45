"""What a reader asks for, as each transport says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import quote, urlencode

from ..errors import ConfigError
from ..v1 import changefeed_pb2 as v1

HEARTBEAT_MS = 10_000
FORMATS = {"sse": "canonical", "websocket": "notification", "grpc": "protobuf"}


class Filters(TypedDict, total=False):
    """Which changes, beyond their tables; what is left out always holds."""

    source: str  # one alone, by its name in the config
    operations: Sequence[str]  # insert, update, delete, …
    event_type: str  # of entities, a pattern such as entity:*
    entity_type: str
    tenant_id: str
    trigger: str  # a pattern such as api_*
    changed_fields: Sequence[str]  # at least one of them


@dataclass(frozen=True)
class Asked:
    """Which changes, in which format, over which transport."""

    tables: tuple[str, ...]
    transport: str
    format: str
    filters: Mapping[str, Any]

    @classmethod
    def of(
        cls, tables: Sequence[str], transport: str, format: str | None, filters: Filters
    ) -> "Asked":
        """The same, checked; ConfigError names what does not go together."""
        if isinstance(tables, str):
            raise ConfigError(f"tables must be a list of names or patterns, and not {tables!r}")
        if transport not in FORMATS:
            raise ConfigError(f"no transport called {transport!r}; there are: {', '.join(FORMATS)}")
        own = FORMATS[transport]
        if transport != "sse" and format not in (None, own):
            raise ConfigError(f"over {transport} events come as {own}, and not as {format!r}")
        if transport == "websocket" and (filters or not tables):
            raise ConfigError("over websocket tables must be named, and there are no other filters")
        return cls(tuple(tables), transport, format or own, {**filters})

    def path(self, after: int) -> str:
        """Where the events are streamed that follow a sequence."""
        query = {"after": after, "format": self.format, "heartbeat_ms": HEARTBEAT_MS}
        if self.tables:
            query["tables"] = ",".join(self.tables)
        for name, value in self.filters.items():
            query[name] = value if isinstance(value, str) else ",".join(value)
        return f"/v1/changes/stream?{urlencode(query)}"

    def message(self, after: int) -> v1.SubscribeRequest:
        """The same as a message."""
        filters = dict(self.filters)
        operations = [_known(name) for name in filters.pop("operations", ())]
        return v1.SubscribeRequest(
            after=after, tables=self.tables, operations=operations, together=True, **filters
        )


def cursor_path(name: str) -> str:
    """Where a cursor is."""
    return f"/v1/cursors/{quote(name, safe='')}"


def _known(operation: str) -> str:
    names = v1.Operation.keys()
    if operation.upper() not in names:
        known = ", ".join(names[1:]).lower()
        raise ConfigError(f"no operation called {operation!r} over gRPC; there are: {known}")
    return operation.upper()
