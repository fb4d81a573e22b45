"""What events say beyond their change: the version that captures, the servers, the model."""

from dataclasses import dataclass, field

from .. import __version__
from ..change.event import Op
from ..model import Model


@dataclass(frozen=True)
class SourceServer:
    """Where a source's changes come from, as people name it."""

    source: str  # the configured name
    host: str = ""
    instance: str = ""  # "": the configured name
    region: str = ""


@dataclass(frozen=True)
class Facts:
    """The same for every change of an installation, and known before the first one."""

    pipeline: str = ""  # an id of the log that the changes pass through
    servers: tuple[SourceServer, ...] = ()
    version: str = __version__

    def server(self, source: str) -> SourceServer:
        """The server of a source; one that nobody has described has only a name."""
        return next((each for each in self.servers if each.source == source), SourceServer(source))


@dataclass(frozen=True)
class FormatOptions:
    """What a format may depend on: the installation, and what a request asks for."""

    facts: Facts = field(default_factory=Facts)
    model: Model = field(default_factory=Model)
    include: frozenset[Op] = frozenset()  # operations that are carried only on request
    markers: bool = False  # whether events say where transactions begin and end
