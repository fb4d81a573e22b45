"""MySQL and MariaDB by their binary log, in ROW format.

    connect -> make sure who the server is -> copy tables at a point of the stream -> stream

`stream` is that flow. Around it: `session` (identity, and what is still there), `dump` (the
socket), `transactions`, `tables` and `ddl` (events -> changes), `binlog`, `gtid`, `columns`, `rows`
and `values` (bytes -> events and images), `copying`, `resume` (what the log remembers),
`catalog`, `check`.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .source import Mysql

__all__ = ["Mysql"]

__getattr__ = lazy(__name__, {"Mysql": "source"})
