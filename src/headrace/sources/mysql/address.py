"""How to reach a MySQL or MariaDB server, and what its errors mean to us."""

from __future__ import annotations

import socket
import ssl
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from ...errors import ConfigError, PositionLost, SourceError, SourceRefused, SourceReplaced
from ...errors import SourceUnavailable as Unavailable
from ...secret import Secret

try:
    import pymysql
    from pymysql.err import MySQLError
except ModuleNotFoundError as error:
    raise ConfigError(
        "a source of type mysql needs PyMySQL: pip install 'headrace[mysql]'"
    ) from error

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

_OFF = ("0", "off", "false", "no")
_SCHEMES = ("mysql", "mariadb")
_OPTIONS = frozenset({"ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify", "unix_socket"})

# Values come as they are in the binary log, and a long snapshot or an idle stream is no mistake.
_SESSION = (
    "SET SESSION time_zone = '+00:00', sql_mode = '', wait_timeout = 31536000,"
    " net_write_timeout = 3600, net_read_timeout = 3600, lock_wait_timeout = 20,"
    " character_set_results = utf8mb4, autocommit = 1"
)
_OF_MARIADB = "SET SESSION max_statement_time = 0"
_OF_MYSQL = "SET SESSION max_execution_time = 0"
# A primary key that the server made is in the binary log, so the catalogue must show it.
_SHOW_KEYS = "SET SESSION show_gipk_in_create_table_and_information_schema = ON"

_CONNECT_SECONDS = 10  # until a new session is ready
_READ_SECONDS = 600  # the catalogue of very many tables takes long

# 1401: the user may not list prepared XA transactions.
_DENIED = frozenset({1044, 1045, 1049, 1130, 1142, 1143, 1227, 1370, 1401, 1698, 1820, 1862, 3118})
# Duplicate, truncated, incorrect and overflowing values, which the server quotes.
_ABOUT_VALUES = frozenset({1062, 1264, 1265, 1292, 1366, 1406, 1411, 1690, 3140, 3141, 4025})
_BINLOG = frozenset({1236, 4052})  # 4052: MariaDB's, of another reader with our server_id
_LOST = (
    "could not find first log file name",
    "purged required binary logs",
    "purged binary logs",
    "could not find gtid state",
    "start position",  # beyond the end of the file
    "impossible position",
    "position > file size",
    # Where no event begins, the server reads whatever stands there as the head of one.
    "max_allowed_packet",
    "bogus data",
)
_CUT = "truncated in the middle of event"
_DIVERGED = ("not in the master's binlog", "diverged", "has more gtids than")
_TWICE = "same server_uuid/server_id"


_NO_TLS = 2026
_TLS_FILES = "Let ssl_ca, ssl_cert and ssl_key in the source's url be PEM files that we may read."
_TLS_AUTHORITY = (
    "Set ssl_ca in the source's url to the certificate of the authority that signed the server's, "
    "and its host to a name that the server's certificate has."
)
_TLS_MISSING = "Set ssl_cert and ssl_key of the server, or write ssl=off in the source's url."


class TruncatedBinlog(Unavailable):
    """A file of the binary log ends within a transaction: the server died while it wrote it."""


class OpenConnections:
    """The connections of one stream, so that another thread can end whatever they wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Connection[Cursor]] = weakref.WeakSet()
        self._ended = False

    def add(self, connection: Connection[Cursor]) -> None:
        """Add a connection; after `end` it is closed at once."""
        with self._lock:
            self._open.add(connection)
            ended = self._ended
        if ended:
            shut(connection)

    def end(self) -> None:
        """Close all, so that no thread waits for the server any more."""
        with self._lock:
            self._ended = True
            found = list(self._open)
        for connection in found:
            shut(connection)


def shut(connection: Any) -> None:
    """End what another thread waits for."""
    if connection._sock is not None:
        with suppress(OSError):  # it is closed already
            connection._sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class MysqlAddress:
    """Where the server is and how sessions there are set up."""

    url: Secret
    sessions: OpenConnections | None = field(default=None, compare=False, repr=False)

    @property
    def plausible(self) -> bool:
        """Whether the url can be read at all."""
        try:
            parts = self._parts()
            known = _OPTIONS.issuperset(parse_qs(parts.query))
            return parts.scheme in _SCHEMES and known and (parts.port or 3306) > 0
        except ValueError:
            return False

    @property
    def host(self) -> str:
        """The server's name; a socket is a server on this machine."""
        return unquote(self._parts().hostname or "") or "localhost"

    @property
    def database(self) -> str:
        """The database in the url; "": none."""
        return unquote(self._parts().path.strip("/"))

    def connect(self) -> Connection[Cursor]:
        """A session in autocommit that shows values as the binary log has them."""
        connection = pymysql.connect(**self._arguments(), defer_connect=True)
        if self.sessions is not None:
            self.sessions.add(connection)
        try:
            connection.connect()
        except (MySQLError, OSError, RuntimeError) as error:
            raise _connecting_failed(error) from error
        try:
            _prepare(connection)
        except SourceError:
            connection.close()
            raise
        connection._read_timeout = _READ_SECONDS  # type: ignore[attr-defined]
        return connection

    def _parts(self) -> SplitResult:
        return urlsplit(self.url.reveal())

    def _arguments(self) -> dict[str, Any]:
        parts = self._parts()
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return {
            "host": self.host,
            "port": parts.port or 3306,
            "user": unquote(parts.username or ""),
            "password": unquote(parts.password or "").encode(),  # else it is sent in latin1
            "unix_socket": options.get("unix_socket"),
            "ssl": _tls(options),
            "ssl_disabled": options.get("ssl") in _OFF,  # else it is used where the server has it
            "charset": "utf8mb4",
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _CONNECT_SECONDS,
            "autocommit": True,
            "program_name": "headrace",
        }


def _prepare(connection: Connection[Cursor]) -> None:
    run(connection, _SESSION)
    version = str(run(connection, "SELECT VERSION()")[0][0])
    if "mariadb" in version.lower():
        run(connection, _OF_MARIADB)
        return
    run(connection, _OF_MYSQL)
    if run(connection, "SHOW VARIABLES LIKE 'show_gipk%%'"):  # since 8.0.30
        run(connection, _SHOW_KEYS)


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    """How to encrypt; None: not at all, or without looking at certificates."""
    if options.get("ssl") in _OFF or not any(name.startswith("ssl") for name in options):
        return None
    try:
        return _context(options)
    except OSError as error:  # no such file, or none of that kind
        raise SourceRefused(
            "the files that the source's url names for TLS cannot be read", hint=_TLS_FILES
        ) from error


def _context(options: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca"))
    verifies = options["ssl_verify"] not in _OFF if "ssl_verify" in options else "ssl_ca" in options
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "ssl_cert" in options:
        context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
    return context


def run(connection: Connection[Cursor], statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """The rows of a statement."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())
    except (MySQLError, OSError) as error:
        raise classify(error, "the server refused a query") from error


def quoted(*names: str) -> str:
    """Names as a statement has them: `shop`.`orders`."""
    return ".".join(f"`{name.replace('`', '``')}`" for name in names)


def classify(error: Exception, what: str) -> SourceError:
    """Our error for one of the server's."""
    code, message = _code_and_message(error)
    if code in _ABOUT_VALUES:
        message = f"error {code} of the server, whose text may have a value"
    return error_for(code, f"{what}: {message}")


def error_number(error: SourceError) -> int:
    """The server's number of an error that `run` raised; 0: it has none."""
    cause = error.__cause__
    return _code_and_message(cause)[0] if isinstance(cause, Exception) else 0


def error_for(code: int, message: str) -> SourceError:
    """Our error for a code and message of the server's."""
    if code in _BINLOG:
        return _dumping_failed(message)
    if code in _DENIED:
        return SourceRefused(message)
    # Whatever else goes wrong on a server (it stops, a table changes under
    # a snapshot, a lock is not to be had, the disk is full) may be gone the next time.
    return Unavailable(message)


def _dumping_failed(message: str) -> SourceError:
    small = message.lower()
    if _CUT in small:
        return TruncatedBinlog(message)
    if any(words in small for words in _LOST):
        return PositionLost(message)
    if any(words in small for words in _DIVERGED):
        return SourceReplaced(message)
    if _TWICE in small:
        return SourceRefused(
            message,
            hint="Another reader of the server, perhaps a second Headrace with this source, has "
            "the same server_id; stop it, or set server_id of the source to another number.",
        )
    return Unavailable(message)


def _connecting_failed(error: Exception) -> SourceError:
    code, message = _code_and_message(error)
    message = f"cannot connect: {message}"
    if isinstance(getattr(error, "original_exception", error), ssl.SSLCertVerificationError):
        return SourceRefused(message, hint=_TLS_AUTHORITY)
    if code == _NO_TLS:
        return SourceRefused(message, hint=_TLS_MISSING)
    # RuntimeError: an authentication of the server's that needs another package.
    if code in _DENIED or isinstance(error, RuntimeError):
        return SourceRefused(message)
    return Unavailable(message)


def _code_and_message(error: Exception) -> tuple[int, str]:
    arguments = error.args
    if len(arguments) >= 2 and isinstance(arguments[0], int):
        return arguments[0], str(arguments[1]).strip().partition("\n")[0]
    return 0, str(error).strip().partition("\n")[0] or type(error).__name__
