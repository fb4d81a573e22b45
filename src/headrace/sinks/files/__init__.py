"""Parts of the files sink: `stage` writes files in Spark's tasks, `ledger` makes them count."""

from .sink import Files as Files
