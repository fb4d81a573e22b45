"""The config: one YAML file, read once and checked whole before anything starts."""

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
    "PipelineSection",
    "RemoteServer",
    "ServerSection",
    "TlsSection",
    "WebSocketSection",
    "load",
    "parse",
    "sink_class",
    "sink_types",
    "source_class",
    "source_types",
]
