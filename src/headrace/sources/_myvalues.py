"""Values of MySQL and MariaDB as JSON, from the binlog and from SELECT: the same bytes for both.

    INT …, YEAR, BIT    12              DECIMAL    "12.50"      TINYINT(1)  true, false
    FLOAT, DOUBLE       1.5             BLOB, BINARY, geometry  "base64"
    DATETIME  "2025-01-15 10:30:00"     TIMESTAMP  "2025-01-15T10:30:00Z"
    DATE  "2025-01-15"    TIME  "-838:59:59"    ENUM  "label"    SET  ["a","b"]
    JSON      the document

Zero dates and partial ones keep the server's text: "0000-00-00", "2000-00-01 00:00:00".
"""

from __future__ import annotations

from collections.abc import Callable

from ._mycolumns import DeclaredColumn

Encode = Callable[[bytes], bytes]


def select_expression(column: DeclaredColumn, quoted: str) -> str:
    """How a SELECT asks for a column so that nothing of its value is lost; `quoted`: its name."""
    raise NotImplementedError


def text_encoder(column: DeclaredColumn) -> Encode:
    """JSON of what `select_expression` gives over the text protocol.

    The session's time_zone must be +00:00 and its character_set_results utf8mb4.
    """
    raise NotImplementedError
