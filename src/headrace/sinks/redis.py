"""Redis Streams: each table's events in a stream of its own.

    a window ─▶ one transaction (MULTI … EXEC) of XADDs ─▶ its entries' ids ─▶ accepted

A window is in its streams as a whole or not at all, so no event overtakes one that was not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConfigError, SinkUnavailable
from .push import (
    ACCEPTED,
    UNSENT,
    BrokerSettings,
    DeliveryOutcome,
    Event,
    OperationNames,
    Reply,
    Routes,
    Template,
    escaped,
)
from .push.wire import Host, Wire, first_that_answers, unavailable, why

try:
    from hiredis import HiredisError, Reader, ReplyError, pack_command
except ModuleNotFoundError as error:
    raise ConfigError(
        "a sink of type redis needs hiredis: pip install 'headrace[redis]'"
    ) from error

_PORT = 6379
_STREAM = Template("cdc:${schema}:${table}")
_OPERATIONS = OperationNames(str.encode)

_STRANGE = "it does not speak as Redis does"

# What a server says of itself and not of an event: waiting costs nothing.
_ELSEWHERE = {
    "READONLY": "it is a replica and takes no writes; name the primary",
    "LOADING": "it is reading its data",
    "MASTERDOWN": "it is a replica, and its primary is down",
    "CLUSTERDOWN": "its cluster is down",
    "MOVED": "another node of its cluster has the stream; clusters are not supported",
    "ASK": "another node of its cluster has the stream; clusters are not supported",
    "CROSSSLOT": "it is a node of a cluster; clusters are not supported",
    "NOAUTH": "it wants a username and a password",
    "NOREPLICAS": "too few of its replicas are there",
    "UNKILLABLE": "a script keeps it busy",
    "BUSY": "a script keeps it busy",
    "MISCONF": "it cannot write its data to disk and takes no writes",
}
# What no later attempt changes, as long as the event and the stream are what they are.
_REFUSED = {
    "WRONGTYPE": "the key is there, and is no stream",
    "NOPERM": "the user may not write to it",
}
_FAILED = {"OOM": "the server's memory is full (maxmemory)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Redis(BrokerSettings):
    """Events in streams of Redis."""

    username: str = "default"
    stream: Template = _STREAM
    max_length: int = 0  # about how many entries a stream keeps; 0: all
    database: int = 0

    # A transaction holds up the server's other clients, so it is not too large.
    batch_size: int = 1_000
    batch_bytes: int = 2_000_000
    max_event_bytes: int = 5_000_000

    def __post_init__(self) -> None:
        BrokerSettings.__post_init__(self)
        self.hosts(_PORT)
        if not self.stream.text:
            raise ConfigError("stream: an empty text is no stream's name")
        for name in ("max_length", "database"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0")

    def connect(self) -> RedisChannel:
        """Open a connection, or raise SinkUnavailable."""
        return RedisChannel(self)


class _Route(NamedTuple):
    """What the events of a table share."""

    stream: str
    command: tuple[bytes, ...]  # its beginning
    table: bytes


class RedisChannel:
    """Redis, from one of Spark's Python processes."""

    def __init__(self, sink: Redis) -> None:
        self._sink = sink
        self._trim = (b"MAXLEN", b"~", b"%d" % sink.max_length) if sink.max_length else ()
        self._route = Routes(self._new_route)
        self._line: _Line | None = None
        self._open()

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Hand over some events, in order, as one transaction.

        Where some are refused, the others follow as another one.
        """
        replies: dict[int, Reply] = {}
        held: set[str] = set()
        left = list(range(len(events)))
        try:
            line = self._line if self._line is not None and self._line.alive() else self._open()
            while left:
                run, judged = self._transaction(line, [events[at] for at in left])
                for at, reply in zip(left, judged, strict=True):
                    if reply is not None:
                        replies[at] = UNSENT if events[at].row in held else reply
                        held.add(events[at].row)
                left = [] if run else [at for at in left if events[at].row not in held]
        except (OSError, HiredisError) as error:
            reason = why(error) if isinstance(error, OSError) else _STRANGE
            lost = Reply(DeliveryOutcome.UNREACHABLE, str(self._unavailable(reason)))
            self.close()
            replies.update(dict.fromkeys(left, lost))
        if not replies:
            return [ACCEPTED] * len(events)
        return [
            replies.get(at) or (UNSENT if event.row in held else ACCEPTED)
            for at, event in enumerate(events)
        ]

    def close(self) -> None:
        """Let go of the connection."""
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _transaction(
        self, line: _Line, events: Sequence[Event]
    ) -> tuple[bool, Sequence[Reply | None]]:
        """Whether it was run, and what is wrong with an event; None: nothing.

        OSError: it was perhaps run, or only in part.
        """
        begun, *queued, done = line.ask([_MULTI, *map(self._command, events), _EXEC])
        # Without it each command stood alone, and without its end all of them still wait.
        if complaint := self._complaint(begun) or self._complaint(done, about="NOPERM"):
            raise ConnectionAbortedError(complaint)
        if isinstance(done, list):
            # Only a key that is no stream is found as late as here.
            return True, self._replies(done, events)
        judged = self._replies(queued, events)
        if not any(judged):
            # It took every command, and not the whole.
            whole = Reply(DeliveryOutcome.FAILED, "the transaction was not run")
            return False, [self._reply(done, event) or whole for event in events]
        return False, judged

    def _replies(self, replies: list[Any], events: Sequence[Event]) -> list[Reply | None]:
        if len(replies) != len(events):
            raise ConnectionAbortedError(_STRANGE)
        return [self._reply(*pair) for pair in zip(replies, events, strict=True)]

    def _command(self, event: Event) -> bytes:
        route = self._route(event)
        payload = event.payload or b""
        time = b"%d" % (event.commit_time // 1000)
        return _written(
            *route.command,
            *(b"id", event.id.encode(), b"operation", _OPERATIONS[event.op]),
            *(b"table", route.table, b"timestamp", time, b"event", payload),
        )

    def _new_route(self, event: Event) -> _Route:
        name = self._sink.stream.fill(
            source=event.source, schema=event.schema, table=event.table, escape=escaped
        )
        command = (b"XADD", name.encode(), *self._trim, b"*")
        return _Route(name, command, event.table.encode())

    def _reply(self, reply: Any, event: Event) -> Reply | None:
        if isinstance(reply, bytes):
            return None
        if not isinstance(reply, ReplyError):
            raise ConnectionAbortedError(_STRANGE)
        said = self._sink.without_secrets(str(reply))
        code = said.partition(" ")[0]
        if code in _ELSEWHERE:
            reason = str(self._unavailable(_ELSEWHERE[code]))
            return Reply(DeliveryOutcome.UNREACHABLE, reason)
        told = _REFUSED.get(code) or _FAILED.get(code) or said
        answer = DeliveryOutcome.REFUSED if code in _REFUSED else DeliveryOutcome.FAILED
        return Reply(answer, f"stream {self._route(event).stream}: {told}")

    # --- connecting ------------------------------------------------------------------------------

    def _open(self) -> _Line:
        self.close()
        sink = self._sink
        context = sink.context()

        def greet(wire: Wire) -> _Line:
            if context is not None:
                wire.secure(context, sink.timeout_seconds)
            line = _Line(wire, sink.timeout_seconds)
            try:
                complaint = self._greet(line)
            except HiredisError as error:
                raise ConnectionAbortedError("it is no Redis") from error
            if complaint:
                raise ConnectionRefusedError(complaint)
            return line

        line = first_that_answers("Redis", sink.hosts(_PORT), sink.timeout_seconds, greet)
        self._line = line
        return line

    def _greet(self, line: _Line) -> str:
        """Tell who we are; what is wrong with it, if anything is."""
        sink = self._sink
        if sink.password:
            [reply] = line.ask([_packed("AUTH", sink.username, sink.password.reveal())])
            if isinstance(reply, ReplyError):
                return f"username or password is wrong for {sink.username}"
        if sink.database:
            [reply] = line.ask([_packed("SELECT", str(sink.database))])
            if isinstance(reply, ReplyError):
                return _said(reply) or f"database {sink.database}: {reply}"
        role, begun, done = line.ask([_packed("ROLE"), _MULTI, _EXEC])
        if isinstance(role, list) and role[0] == b"slave":
            return _ELSEWHERE["READONLY"]
        return self._complaint(begun) or self._complaint(done)

    def _complaint(self, reply: Any, about: str = "") -> str:
        """What is wrong with the begin or the end of a transaction; "": nothing."""
        if not isinstance(reply, ReplyError) or about not in str(reply):
            return ""
        needs = f"{self._sink.username} needs the commands multi, exec and xadd"
        return _said(reply) or f"it runs no transaction, {needs}: {reply}"

    def _unavailable(self, reason: str) -> SinkUnavailable:
        return unavailable("Redis", self._line.host if self._line else self._sink.servers, reason)


class _Line:
    """Commands and their replies."""

    def __init__(self, wire: Wire, timeout: float) -> None:
        self._wire = wire
        self._timeout = timeout
        self._reader = Reader()

    @property
    def host(self) -> Host:
        return self._wire.host

    def ask(self, commands: Sequence[bytes]) -> list[Any]:
        """The replies to some commands; an error that is a reply is a ReplyError among them."""
        reader = self._reader
        self._wire.send(b"".join(commands), reader.feed, self._timeout)
        replies: list[Any] = []
        while len(replies) < len(commands):
            reply = reader.gets()
            if reply is False:
                reader.feed(self._wire.receive(self._timeout))
            else:
                replies.append(reply)
        return replies

    def alive(self) -> bool:
        """Whether the server has not hung up since."""
        try:
            return not self._wire.available()
        except OSError:
            return False

    def close(self) -> None:
        self._wire.close()


def _said(reply: ReplyError) -> str:
    """What a server says of itself; "": it is about something else."""
    return _ELSEWHERE.get(str(reply).partition(" ")[0], "")


def _packed(*words: str) -> bytes:
    return _written(*(word.encode() for word in words))


def _written(*words: bytes) -> bytes:
    written: bytes = pack_command(words)  # type: ignore[arg-type]  # of any length
    return written


_MULTI, _EXEC = _packed("MULTI"), _packed("EXEC")
