"""PostgreSQL by logical replication: pgoutput, our own publications and slot.

    connect -> make sure who the server is -> copy tables at a point of the stream -> stream

`stream` is that flow. Around it: `slot` (whose it is, and where), `publications` and `identity`
(what of each table is sent), `receive` (the socket), `transactions`, `pgoutput`, `rows` and
`values` (bytes -> changes, no I/O), `plan` and `snapshot`, `resume` (what the log remembers),
`catalog`, `check`, `ddl`, `remove`.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .source import Postgres

__all__ = ["Postgres"]

__getattr__ = lazy(__name__, {"Postgres": "source"})
