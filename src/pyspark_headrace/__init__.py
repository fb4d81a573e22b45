"""Makes `format("headrace")` known: Spark looks for a `DefaultSource` in modules named so."""

from headrace.pipeline.source import ChangeSource as DefaultSource

__all__ = ["DefaultSource"]
