"""A Delta table for each table, equal to it after every batch.

`apply`, `fold`, `window`, `lookup` and `rewrite` run in Spark's tasks; `sink`, `scan`, `target`,
`compaction`, `maintenance` and `ledger` on the driver.
"""

from .sink import Tables as Tables
