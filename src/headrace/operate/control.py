"""One source or sink paused, resumed or begun again: in the running process, or on disk."""

import time

import msgspec

from ..change.path import path_matches, split_path
from ..client import Client
from ..config import Config, ConfigDifference
from ..errors import LogAbsent, ServerError
from ..log import LogReader
from ..run import OPERATOR_KEY, Run
from ..serve.service import PartKind
from ..sinks import Sink
from ..sinks.report import PipelineOverview
from ..sinks.requests import Beginning
from .commands import connect, request_snapshot
from .parts import Part, incomplete, overview, part_named, requests_of, reset_effect, sink_named
from .reload import ConfigReload

# --- in the process that captures ---------------------------------------------------------------


class RunControl:
    """What an operator does to a process at work; `serve.service.Control`."""

    def __init__(self, run: Run, config: ConfigReload) -> None:
        self._run = run
        self._reload = config

    @property
    def _config(self) -> Config:
        return self._run.config

    def names(self, kind: PartKind) -> list[str]:
        """The sources or the sinks there are."""
        if kind is PartKind.SOURCE:
            return list(self._run.captures)
        pipeline = self._config.pipeline
        return [sink.name for sink in pipeline.sinks] if pipeline else []

    def sinks(self) -> PipelineOverview:
        """How the sinks are doing."""
        return overview(self._config)

    def pause(self, kind: PartKind, name: str) -> None:
        """Stop one, until it is resumed."""
        requests = requests_of(self._config, kind, name)
        requests.pause()  # first: a crash from here on leaves it paused
        if kind is PartKind.SOURCE:
            self._run.captures[name].pause(requests.paused_at or time.time_ns() // 1000)

    def resume(self, kind: PartKind, name: str) -> None:
        """Let one go on."""
        requests = requests_of(self._config, kind, name)
        requests.resume()
        if kind is PartKind.SOURCE:
            requests.take_resume()
            self._run.captures[name].resume()

    def reset(self, kind: PartKind, name: str, beginning: Beginning, *, dry_run: bool) -> str:
        """Let one begin again; returns what that does."""
        config, log = self._config, self._run.log
        after = log.latest_sequence if beginning == "now" else None
        effect = reset_effect(config, kind, name, after)
        if kind is PartKind.SOURCE:
            if not dry_run:
                self._run.copy_again(name, ())
            return effect
        renewed = self._renewed(sink_named(config, name)) if incomplete(config, name, log) else {}
        if not dry_run:
            # The snapshots first: if this is interrupted, they only cost time.
            for source, tables in renewed.items():
                self._run.copy_again(source, tables)
            requests = requests_of(config, kind, name)
            requests.reset(*((log.epoch, after) if after is not None else ()))
        return effect + _snapshots(renewed)

    def reload(self, *, dry_run: bool) -> ConfigDifference:
        """Take up the config file as it is now."""
        return self._reload.reload(dry_run=dry_run)

    def _renewed(self, sink: Sink) -> dict[str, list[str]]:
        """The tables of which the log no longer has every row, by source."""
        return {
            status.source: tables
            for status in self._run.statuses()
            if (tables := [copy.table for copy in status.copies if _wants(sink, copy.table)])
        }


def _wants(sink: Sink, table: str) -> bool:
    schema, name = split_path(table)
    return not sink.tables or any(path_matches(schema, name, glob) for glob in sink.tables)


def _snapshots(renewed: dict[str, list[str]]) -> str:
    if not renewed:
        return ""
    named = ", ".join(renewed)
    return (
        f". The log no longer has every row, so {named} takes a new snapshot of these tables; "
        "clients and the other sinks get those rows again"
    )


# --- for the commands ----------------------------------------------------------------------------


class PartHandle:
    """A source or sink in a command's hand: through the server, or on disk where none runs."""

    def __init__(self, config: Config, given: str) -> None:
        self._config = config
        self._client = connect(config)
        self.part = _part(config, self._client, given)

    def pause(self) -> str:
        """Pause it; returns what comes of it."""
        if self._client is not None:
            self._client.post(f"{self.part.path}/pause", None)
            return f"{self.part.name}: paused; `headrace resume {self.part.name}` lets it go on"
        requests_of(self._config, *self.part).pause()
        return f"{self.part.name}: paused, also when Headrace is started"

    def resume(self) -> str:
        """Let it go on; returns what comes of it."""
        if self._client is not None:
            self._client.post(f"{self.part.path}/resume", None)
            return f"{self.part.name}: goes on"
        requests_of(self._config, *self.part).resume()
        return f"{self.part.name}: goes on when Headrace is started"

    def reset_effect(self, beginning: Beginning) -> str:
        """What a reset would do."""
        if self._client is not None:
            return self._post_reset(self._client, beginning, dry_run=True)
        _, after = self._log_end(beginning)
        return reset_effect(self._config, *self.part, after)

    def reset(self, beginning: Beginning) -> str:
        """Let it begin again; returns what comes of it."""
        name = self.part.name
        if self._client is not None:
            self._post_reset(self._client, beginning, dry_run=False)
            return f"{name}: begins again; `headrace status` shows how far it is"
        if self.part.kind is PartKind.SOURCE:
            return request_snapshot(self._config, name, ())
        epoch, after = self._log_end(beginning)
        note = self._without_server(name)
        requests_of(self._config, *self.part).reset(*((epoch, after) if after is not None else ()))
        return f"{name}: begins again when the pipeline runs{note}"

    def _post_reset(self, client: Client, beginning: Beginning, *, dry_run: bool) -> str:
        body: dict[str, object] = {"dry_run": dry_run}
        if self.part.kind is PartKind.SINK:
            body["from"] = beginning
        answer = client.post(f"{self.part.path}/reset", body)
        return str(answer["effect"])

    def _log_end(self, beginning: Beginning) -> tuple[str, int | None]:
        if beginning == "start":
            return "", None
        with LogReader.open(self._config.log_dir) as log:
            return log.epoch, log.latest_sequence

    def _without_server(self, name: str) -> str:
        """Take new snapshots where the log alone is not enough; returns what to know of it."""
        config = self._config
        try:
            with LogReader.open(config.log_dir) as log:
                if not incomplete(config, name, log):
                    return ""
        except LogAbsent:
            return ""
        taken = [request_snapshot(config, source.name, ()) for source in config.sources]
        return "".join(f"\n{line}" for line in taken)


def _part(config: Config, client: Client | None, given: str) -> Part:
    if client is None:
        pipeline = config.pipeline
        sinks = [sink.name for sink in pipeline.sinks] if pipeline else []
        return part_named(given, [source.name for source in config.sources], sinks)
    sources = [status["source"] for status in client.get("/v1/sources")["sources"]]
    return part_named(given, sources, [each["sink"] for each in client.get("/v1/sinks")["sinks"]])


class Reloaded(msgspec.Struct, frozen=True):
    """What the config file changes in the running server, a line each."""

    changes: list[str]
    taken_up: bool


def request_reload(config: Config, *, dry_run: bool) -> Reloaded:
    """Let the running server read its config file again."""
    client = connect(config)
    if client is None:
        key_file = config.data_dir / OPERATOR_KEY
        raise ServerError(
            f"no server answers at {config.server.url}; the next start reads the config anyway",
            hint="If server.host or server.port have changed, name the old ones: "
            f"`headrace reload --url http://HOST:PORT --key-file {key_file}`.",
        )
    return msgspec.convert(client.post("/v1/reload", {"dry_run": dry_run}), Reloaded)
