"""What events tell beyond their change: who captures, and from which servers."""

from dataclasses import dataclass

from .. import __version__


@dataclass(frozen=True)
class Server:
    """Where a source's changes come from, as people name it."""

    source: str  # the configured name
    host: str = ""
    instance: str = ""  # "": the configured name
    region: str = ""


@dataclass(frozen=True)
class Facts:
    """The same for every change of an installation, and known before the first one."""

    pipeline: str = ""  # an id of the log that the changes pass through
    servers: tuple[Server, ...] = ()
    version: str = __version__

    def server(self, source: str) -> Server:
        """The server of a source; one that nobody has described has only a name."""
        return next((each for each in self.servers if each.source == source), Server(source))
