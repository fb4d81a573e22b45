"""What topics and keys are called.

A topic's name takes letters, digits, `.`, `_` and `-`, 249 in all. What else the name of a schema
or a table has in it becomes `-` and two hexadecimal digits for each byte (`order items` is
`order-20items`); so does a `.`, which the template itself may use between names, and a `-` that
could be taken for one of these. Two tables therefore never share a topic by accident.
"""

from __future__ import annotations

import re

from ...change.path import path_part
from ...errors import ConfigError
from ..push import Event, Template, escaped, within

LONGEST = 249

_REFUSED = re.compile(r"[^A-Za-z0-9._-]")


def topic(template: Template, source: str, schema: str, table: str) -> str:
    """The topic of a table."""
    name = template.fill(source=source, schema=schema, table=table, escape=escaped)
    return within(name, LONGEST)


def check(template: Template) -> None:
    """Refuse a template from which no topic's name can be made."""
    if bad := _REFUSED.search(template.plain):
        raise ConfigError(
            f"topic: {template} has {bad[0]!r} in it; a topic's name takes letters, digits, "
            "., _ and -"
        )
    if template.text in ("", ".", ".."):
        raise ConfigError(f"topic: {template.text or 'an empty text'} is no topic's name")
    if len(template.plain) > LONGEST // 2:
        raise ConfigError(
            f"topic: {template} leaves no room for names; {LONGEST} characters is all"
        )


def key_begins(event: Event, *, with_schema: bool) -> int:
    """Where in a row its key begins: `orders:7`, or `public.orders:7`.

    A row is `source|schema.table:7`; names may have any character, so only
    their lengths show where each ends.
    """
    begin = len(event.source) + 1
    return begin if with_schema else begin + len(path_part(event.schema)) + 1
