"""MySQL and MariaDB by their binary log, in ROW format.

    connect -> verify the server's identity -> snapshot tables at a position -> stream

`stream` is that flow. Around it: `address` and `session` (the connection, the server's identity,
and what it still has), `catalog`, `check`, `snapshot`, `dump` (the socket of the binary log),
`transactions`, `pending` and `tables` (events -> changes), `resume` (what the log stores). `decode`
turns bytes into events, rows and JSON, and does no I/O.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .source import Mysql

__all__ = ["Mysql"]

__getattr__ = lazy(__name__, {"Mysql": "source"}, driver="zstandard")
