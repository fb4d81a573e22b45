"""PostgreSQL by triggers and an event table: for servers without logical replication.

    connect -> make sure who the server is -> copy tables at a snapshot -> follow the events

`stream` is that flow. Around it: `ddl` and `install` (what is put into the database), `session`
(identity), `catalog` (the event table), `entries` and `rows` (entries -> changes, no I/O), `resume`
(what the log remembers), `check`; rows are copied, and values written, by the parts of `postgres`.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .source import PostgresEvents

__all__ = ["PostgresEvents"]

__getattr__ = lazy(__name__, {"PostgresEvents": "source"})
