"""Savepoints in the statements of a binary log. No I/O."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from ...errors import ProtocolError

_FLAGS = re.IGNORECASE | re.DOTALL
SAVEPOINT = re.compile(r"SAVEPOINT\s+(?P<name>.+)", _FLAGS)
ROLLBACK_TO = re.compile(r"ROLLBACK\s+(?:WORK\s+)?TO\s+(?:SAVEPOINT\s+)?(?P<name>.+)", _FLAGS)


def savepoint(text: str) -> str:
    """The name of a savepoint, in whatever quotes it is; the server ignores case and accents."""
    text = text.strip().rstrip(";").strip()
    if text[:1] in ("`", '"') and text[-1:] == text[0]:
        text = text[1:-1].replace(text[0] * 2, text[0])
    letters = unicodedata.normalize("NFD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def kept_by(known: Mapping[str, int], text: str, where: str) -> int:
    """How many changes of a transaction a ROLLBACK TO leaves."""
    name = savepoint(text)
    if name not in known:
        raise ProtocolError(
            f"{where}: nothing is known of the savepoint {name}",
            hint="Run `headrace snapshot SOURCE` to start again from a full copy.",
        )
    return known[name]
