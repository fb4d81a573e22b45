"""A Delta table for each table, equal to it after every batch.

`route`, `merge`, `effects`, `keys` and `compaction` run in Spark's tasks; `sink`, `target`
and `ledger` on the driver.
"""

from .sink import Tables as Tables
