"""The config: one YAML file, read once and checked whole before anything starts."""

from .difference import ConfigDifference, compare, taken_up
from .fields import sink_class, sink_types, source_class, source_types
from .reading import load, parse
from .settings import (
    CdcSection,
    Config,
    PipelineSection,
    RemoteServer,
    ServerSection,
    TlsSection,
    WebSocketSection,
)

__all__ = [
    "CdcSection",
    "Config",
    "ConfigDifference",
    "PipelineSection",
    "RemoteServer",
    "ServerSection",
    "TlsSection",
    "WebSocketSection",
    "compare",
    "load",
    "parse",
    "sink_class",
    "sink_types",
    "source_class",
    "source_types",
    "taken_up",
]
