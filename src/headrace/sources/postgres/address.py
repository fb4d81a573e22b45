"""How to reach a PostgreSQL server, and what its errors mean to us."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import conninfo

from ...errors import ConfigError, PositionLost, SourceError, SourceRefused, SourceUnavailable
from ...secret import Secret
from .replication import Replication
from .values import SESSION_SETTINGS

# A long copy or an idle stream is not a mistake.
_NO_TIMEOUTS = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "jit": "off",  # compiling a look at the catalogs takes a hundred times as long as looking
}
# A row that a policy hides from our role is an error, never a row that is missing in silence.
_ALL_ROWS = {"row_security": "off"}
# A path that swallows everything is noticed within about a minute, not by TCP's own patience.
_NETWORK = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

_UNDEFINED = "42704"
_DUPLICATE = "42710"
_SNAPSHOT_GONE = ("22023", _UNDEFINED)  # the session that exported it has ended
_NO_SNAPSHOT = "invalid snapshot identifier"
# Data exceptions, violated constraints, what functions raise: a row filter or a policy may fail.
_ABOUT_VALUES = ("22", "23", "P0")
_NOT_NOW = ("08", "53", "57", "58", "40", "25006", "55006", "55P03", "XX")
# What a server says while it cannot take a session but will.
_BUSY = (
    "the database system is",  # starting up, shutting down, recovering, not accepting yet
    "terminating connection",
    "too many",
    "remaining connection slots",
    "max_wal_senders",
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the database is and how sessions there are set up."""

    url: Secret
    application: str  # what pg_stat_activity shows
    # A server that does not know its encoding (SQL_ASCII) must send bytes as they are: asked to
    # vouch for UTF-8 it would end the whole stream at the first value that is not.
    encoding: str = "UTF8"

    def connect(self) -> psycopg.Connection[Any]:
        """An ordinary session, in autocommit."""
        return self._connect()

    def replicate(self, closing: threading.Event) -> Replication:
        """A session that can create slots and stream; `closing` ends its waiting."""
        return Replication(self._connect(replication="database"), closing, error_for)

    def _connect(self, **extra: str) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(self._conninfo(**extra), autocommit=True)
        except psycopg.Error as error:
            raise _connecting_failed(error) from error

    def _conninfo(self, **extra: str) -> str:
        url = self.url.reveal()
        try:
            given = conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # The reason would quote the text, password and all.
            raise SourceRefused(
                "the source's url is no connection string of PostgreSQL",
                hint="Write postgresql://user:password@host:port/database.",
            ) from None
        settings = SESSION_SETTINGS | _NO_TIMEOUTS | _ALL_ROWS | {"client_encoding": self.encoding}
        pinned = " ".join(f"-c {name}={value}" for name, value in settings.items())
        return conninfo.make_conninfo(
            url,
            options=f"{given.get('options') or ''} {pinned}".strip(),
            application_name=self.application,
            **{name: given.get(name) or value for name, value in _NETWORK.items()},
            client_encoding=self.encoding,
            **extra,
        )


def check_url(source: str, url: Secret) -> None:
    """Refuse what libpq cannot read."""
    try:
        conninfo.conninfo_to_dict(url.reveal())
    except psycopg.Error:
        # Not chained: libpq quotes what it cannot read, and that may be the password.
        raise ConfigError(
            f"the url of source {source} is no connection string; "
            "write postgresql://user:password@host/database"
        ) from None


def host_of(url: Secret) -> str:
    """The server's name in a url; a socket is a server on this machine."""
    given = conninfo.conninfo_to_dict(url.reveal())
    name = str(given.get("host") or given.get("hostaddr") or "")
    return "localhost" if not name or name.startswith(("/", "@")) else name


def classify(error: psycopg.Error, what: str) -> SourceError:
    """Our error for one of PostgreSQL's to a query."""
    text = _first_line(error)
    if error.sqlstate == _UNDEFINED and "publication" in text:
        # Somebody dropped it while the catalogs were read; the next session creates it.
        return SourceUnavailable(f"{what}: {text}")
    return error_for(error.sqlstate or "08000", what, text)


def error_for(sqlstate: str, what: str, text: str) -> SourceError:
    """Our error for a code and text of PostgreSQL's; `what` failed."""
    if sqlstate.startswith(_ABOUT_VALUES) and not text.startswith(_NO_SNAPSHOT):
        text = f"error {sqlstate} of the server; its text, in the server's log, may have a value"
    message = f"{what}: {text}"
    if "replication slot" in message and (sqlstate == _UNDEFINED or "can no longer" in message):
        return PositionLost(message)
    if sqlstate == _UNDEFINED and "publication" in message:
        # The slot stands where the publication did not exist yet, and cannot be read past that.
        return PositionLost(message)
    if sqlstate == _DUPLICATE and "replication slot" in message:
        # Somebody was faster, such as a process that was killed meanwhile; that one will do.
        return SourceUnavailable(message)
    if sqlstate.startswith(_NOT_NOW) or (sqlstate in _SNAPSHOT_GONE and "snapshot" in message):
        return SourceUnavailable(message)
    return SourceRefused(message)


def _connecting_failed(error: psycopg.Error) -> SourceError:
    # libpq gives no code here, only words.
    message = f"cannot connect: {_first_line(error)}"
    if "FATAL" in message and not any(words in message for words in _BUSY):
        return SourceRefused(message)
    return SourceUnavailable(message)


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]
