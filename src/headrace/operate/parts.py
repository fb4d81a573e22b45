"""The sources and sinks of a config as an operator handles them, one by one."""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import msgspec

from ..config import Config
from ..errors import ConfigError, nearest
from ..run import formats
from ..serve.service import PartKind
from ..sinks import Sink, SinkPhase, SinkStatus, informed, report
from ..sinks.report import PipelineOverview
from ..sinks.requests import Requests

if TYPE_CHECKING:
    from ..log import LogReader

_SOURCE_RESET = (
    "{name}: gives up what the database holds for it (in PostgreSQL its replication slot), makes "
    "that anew, and takes a new snapshot of all its tables. The log keeps its changes. What "
    "happens between the last captured change and the snapshot is in the log as rows of the "
    "snapshot, not as changes; clients and sinks get every row again"
)


def sink_named(config: Config, name: str) -> Sink:
    """The sink of that name, as its pipeline has it."""
    sinks = {sink.name: sink for sink in config.pipeline.sinks} if config.pipeline else {}
    if name not in sinks:
        raise ConfigError(f"no sink called {name}{nearest(name, sinks)}")
    return informed(sinks[name], formats=formats(config), folder=str(config.sink_dir(name)))


def requests_of(config: Config, kind: PartKind, name: str) -> Requests:
    """The requests to a source or a sink."""
    folder = config.source_dir(name) if kind is PartKind.SOURCE else config.sink_dir(name)
    return Requests(folder)


def overview(config: Config) -> PipelineOverview:
    """How every sink of the config is doing, by the pipeline's last report and the requests."""
    found = report.read(config.pipeline_dir)
    known = {status.sink: status for status in found.sinks}
    names = [sink.name for sink in config.pipeline.sinks] if config.pipeline else []
    sinks = [known.pop(name, _unreported(name)) for name in names]
    if not found.running:
        sinks = [_idle(status, config) for status in sinks]
    removed = known.values() if found.running else ()  # not in the config, and still at work
    listed = msgspec.structs.replace(found, sinks=[*sinks, *removed])
    return report.with_verified(listed, config.sink_dir)


def _unreported(name: str) -> SinkStatus:
    return SinkStatus(sink=name, phase=SinkPhase.STOPPED)


def _idle(status: SinkStatus, config: Config) -> SinkStatus:
    paused = requests_of(config, PartKind.SINK, status.sink).paused
    return msgspec.structs.replace(status, phase=SinkPhase.PAUSED) if paused else status


def reset_effect(config: Config, kind: PartKind, name: str, after: int | None) -> str:
    """What a reset does; a ConfigError when it cannot be done.

    `after` is the last change of the log, for a sink that is to begin after it.
    """
    if kind is PartKind.SOURCE:
        config.source(name)
        return _SOURCE_RESET.format(name=name)
    sink = sink_named(config, name)
    effect = f"{name}: {sink.reset_effect()}"
    if after is None:
        return f"{effect}; then it begins again with the first change that the log holds"
    if sink.needs_every_row:
        raise ConfigError(
            f"{name} holds the rows of its sources, so it cannot begin with the next change",
            hint="Leave --from now out.",
        )
    return f"{effect}; then it goes on after sequence {after}, and nothing before is stored again"


def incomplete(config: Config, name: str, log: "LogReader") -> bool:
    """Whether the log alone cannot give a sink every row: its oldest changes are gone."""
    return sink_named(config, name).needs_every_row and log.first_sequence > 1


class Part(NamedTuple):
    """A source or a sink."""

    kind: PartKind
    name: str

    @property
    def path(self) -> str:
        """Where a server has it."""
        return f"/v1/{self.kind}s/{quote(self.name, safe='')}"


def part_named(given: str, sources: Collection[str], sinks: Collection[str]) -> Part:
    """What a name means: `orders`, or `sink:orders` where a source has the same name."""
    kinds = {PartKind.SOURCE: sources, PartKind.SINK: sinks}
    prefix, _, name = given.rpartition(":")
    found = [kind for kind, names in kinds.items() if name in names and prefix in ("", kind)]
    if len(found) == 1:
        return Part(found[0], name)
    if found:
        raise ConfigError(
            f"{name} is both a source and a sink", hint=f"Write source:{name} or sink:{name}."
        )
    raise ConfigError(f"no source or sink called {given}{nearest(given, [*sources, *sinks])}")
