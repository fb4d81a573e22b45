"""What the commands do: through the running server, or without one on the log itself."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from ..change.event import Batch
from ..client import Client, TlsTrust
from ..config import Config, RemoteServer
from ..errors import (
    ConfigError,
    LogAbsent,
    LogError,
    PipelineInUse,
    ServerAbsent,
    ServerError,
)
from ..log import Cursor, Log, LogReader, Stats, Trimmed, keys
from ..log import backup as copying
from ..log.backup import BackupFolders, BackupManifest, Look, RestoredLog
from ..log.folder import make_private
from ..log.keys import IssuedKey, Key, KeyRequest, ListedKey
from ..run import OPERATOR_KEY, backup_folders, formats, server_settings
from ..secret import Secret
from ..serve.keyring import Keyring
from ..serve.retention import retention_of
from ..sinks import report
from ..sinks.report import PipelineOverview, lag_of
from ..sources import Removal, Status
from .parts import overview
from .tail import Changes, DiskChanges, before_moment


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """How everything is doing."""

    server: str | None  # where it answers; None: no server runs
    health: str | None
    sources: list[Status]
    log: Stats | None  # None: there is no log yet
    cursors: list[Cursor]
    room: list[str] = []  # who loses changes, or soon will, because the log has no room
    pipeline: PipelineOverview | None = None  # None: the config has none


class Bound(NamedTuple):
    """Up to where a log is trimmed; one of them is given."""

    sequence: int | None = None
    seconds: float | None = None
    size: int | None = None

    def before(self, log: LogReader) -> int:
        """The first sequence that stays."""
        if self.seconds is not None:
            return log.before_time(int((time.time() - self.seconds) * 1_000_000))
        if self.size is not None:
            return log.beyond_size(self.size)
        return self.sequence or 0


class KeyShown(msgspec.Struct, frozen=True):
    """A new key, which is shown only once."""

    secret: str
    key: ListedKey

    def __repr__(self) -> str:
        return f"KeyShown(secret='***', key={self.key.id})"


def connect(config: Config) -> Client | None:
    """The running server of this config; None when none answers.

    A server elsewhere must answer: there is no log on disk to turn to.
    """
    if config.remote is not None:
        return _connect_to(config.remote)
    client = Client(config.server.url, _operator_key(config), tls=_own_tls(config))
    try:
        log = client.health().get("log")
    except ServerAbsent:
        return None
    if log is None:
        raise ServerError(
            f"the server at {client.url} needs a key, and {config.data_dir} has none to read",
            hint=f"Run the command as the user that runs Headrace, where {OPERATOR_KEY} is.",
        )
    epoch = log["epoch"]
    try:
        with LogReader.open(config.log_dir) as log:
            same = log.epoch == epoch
    except LogAbsent:
        return client  # it may run on another machine
    if not same:
        raise ServerError(
            f"the server at {client.url} does not serve the log in {config.log_dir}",
            hint="Check data_dir and server.port in the config: two Headraces need two of each.",
        )
    return client


def _own_tls(config: Config) -> TlsTrust | None:
    """How a program beside the server trusts it, and is trusted where clients need to be."""
    tls = config.server.tls
    if tls is None:
        return None
    certificate = str(tls.certificate)
    if tls.client_ca is None:
        return TlsTrust(ca_file=certificate, own=True)
    return TlsTrust(
        ca_file=certificate, own=True, certificate=certificate, key=str(tls.key or certificate)
    )


def _connect_to(remote: RemoteServer) -> Client:
    client = Client(remote.url, remote.key)
    if client.health().get("log") is None:
        raise ServerError(
            f"the server at {client.url} needs an API key that sees everything",
            hint="Set HEADRACE_API_KEY, or name its file with --key-file.",
        )
    return client


def look(config: Config) -> Overview:
    """How everything is doing now."""
    client = connect(config)
    found = _look_on_disk(config) if client is None else _look_at_server(config, client)
    return msgspec.structs.replace(found, pipeline=_with_lag(config, found.log))


def look_at_pipeline(config: Config) -> PipelineOverview | None:
    """How the sinks are doing; None: the config has none."""
    if config.remote is not None:
        found = _connect_to(config.remote).get("/v1/sinks")
        return msgspec.convert(found, PipelineOverview) if found["sinks"] else None
    return None if config.pipeline is None else overview(config)


def _with_lag(config: Config, log: Stats | None) -> PipelineOverview | None:
    """The pipeline, with the lag of its sinks in the log as that is now."""
    seen = look_at_pipeline(config)
    if seen is None or log is None or config.pipeline is None or config.pipeline.url is not None:
        return seen
    sinks = [
        msgspec.structs.replace(
            sink, lag=lag_of(sink, first=log.first_sequence, latest=log.latest_sequence)
        )
        for sink in seen.sinks
    ]
    return msgspec.structs.replace(seen, sinks=sinks)


def _look_at_server(config: Config, client: Client) -> Overview:
    health = client.health()
    log = health["log"]
    return Overview(
        server=client.url,
        health=health["status"],
        sources=msgspec.convert(client.get("/v1/sources")["sources"], list[Status]),
        log=Stats(
            log["total_events"],
            log["first_sequence"],
            log["latest_sequence"],
            log["total_size_bytes"],
        ),
        room=log.get("reasons", []),
        cursors=_cursors(config) if config.remote is None else _remote_cursors(client),
    )


def _look_on_disk(config: Config) -> Overview:
    try:
        with LogReader.open(config.log_dir) as log:
            stats = log.stats()
            sources = [source.describe(log.resume(source.name)) for source in config.sources]
    except LogAbsent:
        stats = None
        sources = [source.describe(None) for source in config.sources]
    return Overview(server=None, health=None, sources=sources, log=stats, cursors=_cursors(config))


def _remote_cursors(client: Client) -> list[Cursor]:
    return msgspec.convert(client.get("/v1/cursors")["cursors"], list[Cursor])


def _cursors(config: Config) -> list[Cursor]:
    try:
        with LogReader.open(config.log_dir) as log:
            return log.cursors()
    except LogAbsent:
        return []


@contextmanager
def open_changes(config: Config) -> Iterator[tuple[Changes, int]]:
    """Where to read changes from, and the newest sequence there."""
    client = connect(config)
    if client is not None:
        yield client, client.health()["log"]["latest_sequence"]
        return
    with LogReader.open(config.log_dir) as log:
        yield DiskChanges(log, formats(config).of_log(log.epoch)), log.latest_sequence


def request_snapshot(config: Config, source: str, tables: Sequence[str]) -> str:
    """Request a new snapshot of tables (none: all); returns when it will be taken."""
    named = ", ".join(tables) or "all tables"
    client = connect(config)
    if client is not None:
        client.post(f"/v1/sources/{source}/snapshot", {"tables": list(tables)})
        return f"{source}: takes a new snapshot of {named}; `headrace status` shows its progress"
    chosen = config.source(source)
    resume = None
    with suppress(LogAbsent):
        LogReader.open(config.log_dir).close()  # opening for writing would create a log
        with _opened(config) as log:
            resume = chosen.copy_again(log.resume(source), tables)
            if resume is not None:
                log.append(source, Batch((), resume))
    if resume is None:
        return (
            f"{source}: never captured yet; the first `headrace run` takes a snapshot of all tables"
        )
    return f"{source}: the next `headrace run` takes a new snapshot of {named}"


def remove(config: Config, name: str, *, dry_run: bool) -> list[Removal]:
    """Take everything of Headrace out of a source's database; the log keeps its changes."""
    source = config.source(name)
    if not hasattr(source, "remove"):
        raise ConfigError(
            f"source {name} cannot be removed from its database: its type has no method `remove`",
            hint="Its package must take out what it has put there, or be renewed.",
        )
    if dry_run:
        return source.remove(_stored_resume(config, name), dry_run=True)
    client = connect(config)
    if client is not None and name in [s["source"] for s in client.get("/v1/sources")["sources"]]:
        raise ServerError(
            f"the server at {client.url} captures {name}",
            hint="Stop `headrace run` first; without the source in its config it may run again.",
        )
    try:
        LogReader.open(config.log_dir).close()  # opening for writing would create a log
    except LogAbsent:
        return source.remove(None)
    # Nobody can begin to capture while the log is open here.
    with _opened(config) as log:
        resume = log.resume(name)
        removed = source.remove(resume)
        again = source.copy_again(resume, ())
        if again is not None:
            log.append(name, Batch((), again))
    return removed


def _stored_resume(config: Config, source: str) -> bytes | None:
    try:
        with LogReader.open(config.log_dir) as log:
            return log.resume(source)
    except LogAbsent:
        return None


def trim(config: Config, bound: Bound, *, force: bool) -> Trimmed:
    """Remove old changes; what a named cursor or a sink still needs only by force."""
    client = connect(config)
    if client is None:
        LogReader.open(config.log_dir).close()  # opening for writing would create a log
        with _opened(config) as log:
            return retention_of(log, server_settings(config)).trim(bound.before(log), force=force)
    if config.remote is not None:
        before = _remote_bound(client, bound)
    else:
        with LogReader.open(config.log_dir) as reader:
            before = bound.before(reader)
    done = client.post("/changefeed/retention", {"before_sequence": before, "force": force})
    return Trimmed(
        done["deleted"], done["before_sequence"], done["held_by"], tuple(done.get("losers", ()))
    )


def _remote_bound(client: Client, bound: Bound) -> int:
    """The first sequence that stays in the log of a server elsewhere."""
    if bound.size is not None:
        raise ConfigError("--max-size needs the log itself; run it on the server's machine")
    if bound.seconds is None:
        return bound.sequence or 0
    moment = int((time.time() - bound.seconds) * 1_000_000)
    return before_moment(client, moment, client.health()["log"]["latest_sequence"]) + 1


def _opened(config: Config) -> Log:
    make_private(config.data_dir)
    return Log.open(config.log_dir)


def backup(config: Config, target: Path, look: Look) -> BackupManifest:
    """Copy the log and what sinks note of it into a new folder, also while all of it works."""
    _expect_here(config)
    target, folders = target.resolve(), backup_folders(config)
    copying.expect_empty(target)
    for setting, folder in {"data_dir": folders.data, "checkpoint_dir": folders.sinks}.items():
        place = folder.resolve()
        if target.is_relative_to(place) or place.is_relative_to(target):
            raise ConfigError(
                f"{target} is in {setting}, or has it inside", hint="Name another folder."
            )
    client = connect(config)
    if client is None:
        LogReader.open(config.log_dir).close()  # opening for writing would create a log
    with copying.alone(folders.data):
        staged = _staged(config, client, folders)
        try:
            return copying.copy(staged, target, look)
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _staged(config: Config, client: Client | None, folders: BackupFolders) -> Path:
    if client is not None:
        return Path(client.post("/v1/backup", None)["folder"])
    with _opened(config) as log:
        return copying.stage(log, folders)


def restore(config: Config, source: Path, look: Look) -> RestoredLog:
    """Make a log out of a backup, where there is none; nothing may be running."""
    _expect_here(config)
    client = connect(config)
    if client is not None:
        raise ServerError(
            f"a server runs at {client.url}", hint="Stop it, or set another server.port, first."
        )
    if report.read(config.pipeline_dir).running:
        raise PipelineInUse(f"a pipeline works in {config.pipeline_dir}")
    return copying.restore(source.absolute(), backup_folders(config), look)


def _expect_here(config: Config) -> None:
    if config.remote is not None:
        raise ConfigError("a backup is made and restored on the machine that has the log")


def create_key(config: Config, wanted: KeyRequest) -> KeyShown:
    """Make a key; where there is no log yet, it begins with it."""
    client = connect(config)
    if client is not None:
        limits = msgspec.structs.asdict(wanted.limits)
        expires = None if wanted.seconds is None else f"{wanted.seconds:.0f}s"
        request = msgspec.to_builtins(wanted) | limits | {"expires": expires}
        del request["limits"], request["seconds"]
        return msgspec.convert(client.post("/v1/keys", request), KeyShown)
    with _opened(config) as log:
        return _shown(Keyring(log).create(wanted))


def list_keys(config: Config) -> list[ListedKey]:
    """Every key, oldest first."""
    client = connect(config)
    if client is not None:
        return msgspec.convert(client.get("/v1/keys")["keys"], list[ListedKey])
    with LogReader.open(config.log_dir) as log:
        return [_listed(key) for key in sorted(log.keys(), key=lambda key: key.created_at)]


def revoke_key(config: Config, id: str) -> ListedKey:
    """End a key now."""
    client = connect(config)
    if client is not None:
        return msgspec.convert(client.delete(f"/v1/keys/{quote(id, safe='')}"), ListedKey)
    LogReader.open(config.log_dir).close()  # opening for writing would create a log
    with _opened(config) as log:
        revoked = Keyring(log).revoke(id)
    if revoked is None:
        raise _unknown_key(id)
    return _listed(revoked)


def rotate_key(config: Config, id: str, *, overlap: float) -> KeyShown:
    """Make a key with the rights of another, which ends after `overlap` seconds."""
    client = connect(config)
    if client is not None:
        request = {"overlap": f"{overlap:.0f}s"}
        path = f"/v1/keys/{quote(id, safe='')}/rotate"
        return msgspec.convert(client.post(path, request), KeyShown)
    LogReader.open(config.log_dir).close()  # opening for writing would create a log
    with _opened(config) as log:
        made = Keyring(log).rotate(id, overlap=overlap)
    if made is None:
        raise _unknown_key(id)
    return _shown(made)


def _shown(made: IssuedKey) -> KeyShown:
    return KeyShown(made.secret, _listed(made.key))


def _listed(key: Key) -> ListedKey:
    return keys.listed(key, now=time.time_ns() // 1000)


def _unknown_key(id: str) -> LogError:
    return LogError(f"there is no valid key {id!r}", hint="`headrace keys list` shows them.")


def _operator_key(config: Config) -> Secret | None:
    """What the running server left for the commands of this machine."""
    try:
        return Secret((config.data_dir / OPERATOR_KEY).read_text())
    except OSError:
        return None
