"""SQLite by triggers: they append to a table in the database itself, which is read and trimmed.

    install -> triggers write every row -> poll, snapshot, emit -> delete what is stored

`stream` is that flow. Around it: `installation`, `triggers` and `schema` (what is put into the
database, and for which tables), `database` and `connections` (reading and writing it), `wal` (where
transactions end), `transactions` and `values` (entries -> changes, no I/O), `session` and
`snapshot`, `resume` (what the log remembers), `check`, and `attached` for programs that keep
their transactions separate.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .attached import attach
    from .installation import Report, alter, install, remove
    from .source import Sqlite

__all__ = ["Report", "Sqlite", "alter", "attach", "install", "remove"]

__getattr__ = lazy(
    __name__,
    {
        "Report": "installation",
        "Sqlite": "source",
        "alter": "installation",
        "attach": "attached",
        "install": "installation",
        "remove": "installation",
    },
    driver="apsw",
)
