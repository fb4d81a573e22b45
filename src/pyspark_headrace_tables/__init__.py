"""Makes `format("headrace.tables")` known, as `pyspark_headrace` does `format("headrace")`."""

from headrace.pipeline.tables import TablesSource as DefaultSource

__all__ = ["DefaultSource"]
