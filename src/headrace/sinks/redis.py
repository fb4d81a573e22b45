"""Redis Streams: each table's events in a stream of its own, by redis-py.

    a window ─▶ one transaction (MULTI … EXEC) of XADDs ─▶ its entries' ids ─▶ accepted

A window is in its streams as a whole or not at all, so no event overtakes one that was not added.
In a cluster each stream has a transaction of its own: a stream is on one node, and so is a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, SinkUnavailable
from ..secret import Secret
from .push import (
    BrokerSettings,
    DeliveryOutcome,
    Event,
    OperationNames,
    Reply,
    ReplyWindow,
    Routes,
    Template,
    escaped,
    without_secrets,
)
from .push.broker import host_of
from .push.wire import Host, unavailable, why

try:
    from redis import exceptions as errors
    from redis.cluster import ClusterNode, RedisCluster
    from redis.connection import Connection, SSLConnection, parse_url
    from redis.sentinel import Sentinel
except ModuleNotFoundError as error:
    raise ConfigError("a sink of type redis needs redis: pip install 'headrace[redis]'") from error

T = TypeVar("T")

_PORT, _SENTINEL_PORT = 6379, 26379
_STREAM = Template("cdc:${schema}:${table}")
_OPERATIONS = OperationNames(str.encode)
_PAUSE = 0.2  # seconds between two attempts at a node of a cluster that is away

_URL_PARTS = {"host", "port", "username", "password", "db", "connection_class"}

_NO_REDIS = "it does not speak as Redis does"

# Errors that are about the server and not about an event; what redis-py has classes for is below.
_UNAVAILABLE = {
    "READONLY": "it is a replica and takes no writes; name the primary",
    "LOADING": "it is reading its data",
    "MASTERDOWN": "it is a replica, and its primary is down",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster is moving the stream",
    "MOVED": "another node of its cluster has the stream; set cluster: true",
    "ASK": "another node of its cluster has the stream; set cluster: true",
    "CROSSSLOT": "it is a node of a cluster; set cluster: true",
    "NOAUTH": "it wants a username and a password",
    "NOREPLICAS": "too few of its replicas are there",
    "UNKILLABLE": "a script keeps it busy",
    "BUSY": "a script keeps it busy",
    "MISCONF": "it cannot write its data to disk and takes no writes",
}
# Errors that no later attempt changes, as long as the event and the stream are what they are.
_REFUSED = {
    "WRONGTYPE": "the key is there, and is no stream",
    "NOPERM": "the user may not write to it",
}
_FAILED = {"OOM": "the server's memory is full (maxmemory)"}
_CODES: dict[type[Exception], str] = {
    errors.ReadOnlyError: "READONLY",
    errors.BusyLoadingError: "LOADING",
    errors.NoPermissionError: "NOPERM",
    errors.OutOfMemoryError: "OOM",
    errors.AuthenticationError: "NOAUTH",
    errors.MovedError: "MOVED",
    errors.AskError: "ASK",
    errors.ClusterDownError: "CLUSTERDOWN",
    errors.MasterDownError: "MASTERDOWN",
    errors.TryAgainError: "TRYAGAIN",
    errors.ClusterCrossSlotError: "CROSSSLOT",
}


# What redis-py raises where there is no reply; an error of its cluster is no RedisError.
_FAILURES = (errors.RedisError, errors.RedisClusterException, OSError)


class RedisSentinel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sentinels that know which server is the primary."""

    master: str  # the name under which they watch it
    nodes: tuple[str, ...]  # host:port of some of them
    username: str = ""  # of the sentinels themselves
    password: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redis(BrokerSettings):
    """Events in streams of Redis: a server, a cluster, or what sentinels watch."""

    task_packages: ClassVar[Mapping[str, str]] = MappingProxyType({"redis": "redis"})

    servers: str = ""  # host:port, with commas between; the first primary is taken
    username: str = "default"
    url: Secret | None = None  # redis://user:password@host:port/database, or rediss:// for TLS
    cluster: bool = False  # the servers are nodes of a Redis Cluster
    sentinel: RedisSentinel | None = None  # instead of servers
    stream: Template = _STREAM
    max_length: int = 0  # about how many entries a stream keeps; 0: all
    database: int = 0

    # A transaction holds up the server's other clients, so it is not too large.
    batch_size: int = 1_000
    batch_bytes: int = 2_000_000
    max_event_bytes: int = 5_000_000

    def __post_init__(self) -> None:
        if self.url is not None:
            self._read_url(self.url.reveal())
        BrokerSettings.__post_init__(self)
        if self.sentinel is not None:
            if self.servers or self.cluster:
                raise ConfigError("sentinel finds the server; leave out servers, url and cluster")
            if not self.sentinel.master or not self.sentinel.nodes:
                raise ConfigError("sentinel: set master and nodes")
            self.sentinels()
        else:
            self.hosts(_PORT)
        if not self.stream.text:
            raise ConfigError("stream: an empty text is no stream's name")
        for name in ("max_length", "database"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0")
        if self.cluster and self.database:
            raise ConfigError("database: a cluster has only database 0")

    def _read_url(self, url: str) -> None:
        if not url.startswith(("redis://", "rediss://")):
            raise ConfigError("url: it does not begin with redis:// or rediss://")
        try:
            parts = parse_url(url)
        except ValueError:
            raise ConfigError("url: it cannot be read") from None
        # redis-py takes database 0 where it cannot read one; what else it reads, we would not use.
        if (path := urlsplit(url).path.strip("/")) and not path.isdecimal():
            raise ConfigError("url: after the server comes the number of a database")
        if others := sorted(parts.keys() - _URL_PARTS):
            raise ConfigError(
                f"url: {', '.join(others)}: only servers, login and database go there"
            )
        host = str(parts.get("host") or "localhost")
        given: dict[str, Any] = {
            "servers": str(Host(host, int(parts.get("port") or _PORT))),
            "tls": self.tls or url.startswith("rediss://"),
            "username": parts.get("username") or self.username,
            "password": Secret(parts["password"]) if parts.get("password") else self.password,
            "database": parts.get("db") or self.database,
        }
        if self.servers not in ("", given["servers"]):
            raise ConfigError("url and servers are both set; leave one out")
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def address(self) -> str:
        """The servers, or the sentinels."""
        return self.servers if self.sentinel is None else ",".join(self.sentinel.nodes)

    def sentinels(self) -> list[Host]:
        """The addresses of the sentinels."""
        nodes = self.sentinel.nodes if self.sentinel else ()
        return [host_of(each.strip(), _SENTINEL_PORT) for each in nodes]

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
        self._servers: _Server | _Cluster = _opened(sink)
        self._away_until = 0.0  # when a node that is away may be tried again

    def send(self, events: Sequence[Event]) -> Sequence[Reply]:
        """Add some events, in order, as one transaction, or in a cluster as one for each stream.

        Where some are refused, the others follow as another one.
        """
        window = ReplyWindow(events)
        time.sleep(max(self._away_until - time.monotonic(), 0.0))
        if not self._servers.alive():
            self.close()
            self._servers = _opened(self._sink)
        for places in self._transactions(events):
            self._add(window, places)
        return window.replies()

    def close(self) -> None:
        """Close the connections."""
        self._servers.close()

    def _transactions(self, events: Sequence[Event]) -> Iterable[list[int]]:
        if not self._sink.cluster:
            return [list(range(len(events)))]
        streams: dict[str, list[int]] = {}
        for at, event in enumerate(events):
            streams.setdefault(self._route(event).stream, []).append(at)
        return streams.values()

    def _add(self, window: ReplyWindow, places: list[int]) -> None:
        """Add the events at some places; what is wrong with an event is in the window then."""
        left, stream = places, self._route(window.events[places[0]]).stream
        host: object = self._sink.address
        try:
            connection = self._servers.connection(stream)
            host = _host(connection)
            while left:
                ran = self._transaction(connection, window, left)
                left = [at for at in left if window.events[at].row not in window.failed_rows]
                if ran:
                    for at in left:
                        window.accept(at)
                    break
        except _FAILURES as error:
            lost = self._lost(host, error)
            self.close()
            for at in left:
                window.fail(at, lost)

    def _lost(self, host: object, error: Exception) -> Reply:
        reason = str(unavailable("Redis", host, _why(error, self._sink)))
        if not self._sink.cluster:
            return Reply(DeliveryOutcome.UNREACHABLE, reason)
        # Other nodes may accept events meanwhile, and these must not become dead letters for it.
        self._away_until = time.monotonic() + _PAUSE
        return Reply(DeliveryOutcome.UNSENT, reason, _PAUSE)

    def _transaction(
        self, connection: Connection, window: ReplyWindow, places: Sequence[int]
    ) -> bool:
        """Whether it ran; events that were refused are in the window.

        ConnectionError: it may have run.
        """
        events = [window.events[at] for at in places]
        begun, *queued, done = _exchange(connection, [_MULTI, *map(self._command, events), _EXEC])
        # Without MULTI each command stood alone, and without EXEC all of them still wait.
        if isinstance(begun, errors.ResponseError):
            raise errors.ConnectionError(_complaint(begun, self._sink))
        if isinstance(done, errors.ResponseError) and "permission" in str(done):
            raise errors.ConnectionError(_complaint(done, self._sink))
        ran = isinstance(done, list)
        # Only a key that is no stream is found as late as in EXEC.
        replies = done if ran else queued
        if len(replies) != len(events):
            raise errors.InvalidResponse(_NO_REDIS)
        for at, event, reply in zip(places, events, replies, strict=True):
            self._note(window, at, event, reply)
        if not ran and not window.failed_rows & {event.row for event in events}:
            whole = Reply(DeliveryOutcome.FAILED, "the transaction was not run")
            for at, event in zip(places, events, strict=True):
                if not self._note(window, at, event, done):
                    window.fail(at, whole)
        return ran

    def _note(self, window: ReplyWindow, at: int, event: Event, reply: Any) -> bool:
        """Note what is wrong with an event, if the reply is an error."""
        if isinstance(reply, bytes):
            return False
        if not isinstance(reply, errors.ResponseError):
            raise errors.InvalidResponse(_NO_REDIS)
        code, text = _code(reply), without_secrets(str(reply), self._sink.password)
        if code in _UNAVAILABLE:
            raise reply
        outcome = DeliveryOutcome.REFUSED if code in _REFUSED else DeliveryOutcome.FAILED
        reason = _REFUSED.get(code) or _FAILED.get(code) or text
        window.fail(at, Reply(outcome, f"stream {self._route(event).stream}: {reason}"))
        return True

    def _command(self, event: Event) -> tuple[bytes, ...]:
        route = self._route(event)
        timestamp = b"%d" % (event.commit_time // 1000)
        return (
            *route.command,
            *(b"id", event.id.encode(), b"operation", _OPERATIONS[event.op]),
            *(b"table", route.table, b"timestamp", timestamp, b"event", event.payload or b""),
        )

    def _new_route(self, event: Event) -> _Route:
        name = self._sink.stream.fill(
            source=event.source, schema=event.schema, table=event.table, escape=escaped
        )
        return _Route(name, (b"XADD", name.encode(), *self._trim, b"*"), event.table.encode())


# --- connections ---------------------------------------------------------------------------------


class _Server:
    """A connection to the primary."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def connection(self, _stream: str) -> Connection:
        return self._connection

    def alive(self) -> bool:
        return _alive(self._connection)

    def close(self) -> None:
        self._connection.disconnect()


class _Cluster:
    """Connections to the nodes of a cluster; redis-py knows which node has a stream."""

    def __init__(self, sink: Redis) -> None:
        self._sink = sink
        self._nodes: dict[str, Connection] = {}
        starts = [ClusterNode(*host) for host in sink.hosts(_PORT)]
        settings = _settings(sink)
        if sink.tls:
            settings["ssl"] = True
        self._cluster = RedisCluster(startup_nodes=starts, require_full_coverage=False, **settings)
        self._open = True

    def connection(self, stream: str) -> Connection:
        node = self._cluster.get_node_from_key(stream)
        if node is None:
            raise errors.ClusterDownError("no node has the stream")
        known = self._nodes.get(node.name)
        if known is not None and _alive(known):
            return known
        connection = _connected(self._sink, Host(str(node.host), int(node.port)))
        self._nodes[node.name] = connection
        return connection

    def alive(self) -> bool:
        return self._open

    def close(self) -> None:
        self._open = False
        for connection in self._nodes.values():
            connection.disconnect()
        self._nodes.clear()
        self._cluster.close()


def _opened(sink: Redis) -> _Server | _Cluster:
    """The first server that is a primary and lets us write, or a cluster; or SinkUnavailable."""
    if sink.tls:
        sink.context()  # a file that cannot be read is named
    if sink.cluster:
        try:
            return _Cluster(sink)
        except IndexError as error:  # of redis-py, when no node has a slot
            raise unavailable("Redis", sink.servers, _UNAVAILABLE["CLUSTERDOWN"]) from error
        except _FAILURES as error:
            # Its own words say only that it cannot connect, and not why.
            cause = error.__cause__ if isinstance(error.__cause__, _FAILURES) else error
            reason = _why(cause, sink, connecting=True)
            raise unavailable("Redis", sink.servers, reason) from error
    reasons = []
    for host in sink.hosts(_PORT) if sink.sentinel is None else _primaries(sink, sink.sentinel):
        try:
            return _Server(_connected(sink, host))
        except _FAILURES as error:
            reasons.append(f"{host}: {_why(error, sink, connecting=True)}")
    raise SinkUnavailable(f"Redis at {'; '.join(reasons)}")


def _primaries(sink: Redis, watched: RedisSentinel) -> list[Host]:
    """The server that sentinels say is the primary."""
    login = {"password": watched.password.reveal()} if watched.password else {}
    if login and watched.username:
        login["username"] = watched.username
    settings = {"socket_timeout": sink.timeout_seconds, "ssl": sink.tls, **_tls(sink), **login}
    sentinel = Sentinel([(each.name, each.port) for each in sink.sentinels()], 0, settings)
    try:
        host, port = sentinel.discover_master(watched.master)
        return [Host(str(host), int(port))]
    except errors.RedisError as error:
        reason = f"no sentinel knows a primary {watched.master} that is there"
        raise unavailable("Redis sentinel", sink.address, reason) from error
    finally:
        for each in sentinel.sentinels:
            each.close()


def _settings(sink: Redis) -> dict[str, Any]:
    """What every connection is made with."""
    given: dict[str, Any] = {
        "db": sink.database,
        "protocol": 2,
        "socket_timeout": sink.timeout_seconds,
        "socket_connect_timeout": sink.timeout_seconds,
        "socket_keepalive": True,
    }
    if sink.password:
        given |= {"username": sink.username, "password": sink.password.reveal()}
    if sink.cluster:
        del given["db"]
    return given | _tls(sink)


def _tls(sink: Redis) -> dict[str, Any]:
    """The certificates of a connection, to a server or a sentinel; nothing without TLS."""
    if not sink.tls:
        return {}
    return {
        "ssl_ca_certs": sink.ca_file or None,
        "ssl_certfile": sink.certificate_file or None,
        "ssl_keyfile": sink.key_file or None,
        "ssl_check_hostname": True,
    }


def _connected(sink: Redis, host: Host) -> Connection:
    """A connection to a primary that lets us run transactions."""
    kind = SSLConnection if sink.tls else Connection
    connection = kind(host=host.name, port=host.port, **_settings(sink))
    try:
        connection.connect()
        role, begun, done = _exchange(connection, [(b"ROLE",), _MULTI, _EXEC])
        if isinstance(role, list) and role[:1] == [b"slave"]:
            raise errors.ReadOnlyError("a replica")
        for reply in (begun, done):
            if isinstance(reply, errors.ResponseError):
                raise errors.ConnectionError(_complaint(reply, sink))
    except BaseException:
        connection.disconnect()
        raise
    return connection


def _exchange(connection: Connection, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
    """The replies to some commands; an error reply is a ResponseError among them."""
    connection.send_packed_command(connection.pack_commands(commands))
    return [_read(connection) for _ in commands]


def _read(connection: Connection) -> Any:
    try:
        return connection.read_response()
    except errors.ResponseError as error:
        return error


def _alive(connection: Connection) -> bool:
    """Whether it is open; data that nobody requested means that it is not usable."""
    try:
        return connection.is_connected and not connection.can_read()
    except _FAILURES:
        return False


def _host(connection: Connection) -> Host:
    return Host(str(connection.host), int(connection.port))


def _code(error: Exception) -> str:
    return _CODES.get(type(error)) or str(error).partition(" ")[0]


def _complaint(reply: errors.ResponseError, sink: Redis) -> str:
    """Why a transaction cannot begin or end."""
    needs = f"{sink.username} needs the commands multi, exec and xadd"
    known = _UNAVAILABLE.get(_code(reply), "")
    return known or f"it runs no transaction, {needs}: {without_secrets(str(reply), sink.password)}"


def _why(error: Exception, sink: Redis, *, connecting: bool = False) -> str:
    """An error of redis-py in words."""
    if isinstance(error, errors.AuthenticationError) and sink.password:
        return f"username or password is wrong for {sink.username}"
    if known := _UNAVAILABLE.get(_code(error)):
        return known
    if isinstance(error, errors.InvalidResponse):
        return _NO_REDIS
    if isinstance(error, errors.TimeoutError) and not connecting:
        return "no answer in time"
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError):
        return why(cause)
    return without_secrets(str(error) or type(error).__name__, sink.password)


_MULTI, _EXEC = (b"MULTI",), (b"EXEC",)
