"""Comments of a source's table and its columns, as the metadata of a Delta table has them.

The comment of a column is `comment` in its field's metadata, that of the table is `description`.
Where the source has none, what others have written stays. So a property names the comments that
are the source's: those go when the source's go.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from .deltalog import COMMENT, Metadata

_OF_SOURCE = "headrace.comments"  # columns, and "" for the table
_TABLE = ""
_names = msgspec.json.Decoder(list[str]).decode


class TableComments(msgspec.Struct, frozen=True):
    """What the source says of a table and of each of its columns; "": nothing."""

    table: str
    columns: Mapping[str, str]


def commented(metadata: Metadata, comments: TableComments) -> Metadata:
    """The same with the comments of the source; the very same if it has them already."""
    wanted = {_TABLE: comments.table, **comments.columns}
    ours = _noted(metadata)
    schema = msgspec.json.decode(metadata.schema_string)
    fields: dict[str, dict[str, Any]] = {each["name"]: each for each in schema["fields"]}
    known = {name: each["metadata"].get(COMMENT, "") for name, each in fields.items()}
    known[_TABLE] = metadata.description or ""
    left = {name: wanted.get(name) or _kept(name, known, wanted, ours) for name in known}
    # A column that only the Delta table has still may keep the comment that it had.
    noted = sorted(
        name for name in known if wanted.get(name) or (name in ours and name not in wanted)
    )
    if left == known and noted == sorted(ours):
        return metadata
    for name, each in fields.items():
        each["metadata"].pop(COMMENT, None)
        if left[name]:
            each["metadata"][COMMENT] = left[name]
    others = {n: value for n, value in metadata.configuration.items() if n != _OF_SOURCE}
    own = {_OF_SOURCE: msgspec.json.encode(noted).decode()} if noted else {}
    return msgspec.structs.replace(
        metadata,
        schema_string=msgspec.json.encode(schema).decode(),
        description=left[_TABLE] or None,
        configuration=others | own,
    )


def _noted(metadata: Metadata) -> set[str]:
    """Whose comments are the source's; anybody may write properties."""
    try:
        return set(_names(metadata.configuration.get(_OF_SOURCE, "[]")))
    except msgspec.DecodeError:
        return set()


def _kept(name: str, known: Mapping[str, str], wanted: Mapping[str, str], ours: set[str]) -> str:
    """The comment of a column for which the source has none."""
    return "" if name in wanted and name in ours else known[name]


def with_comments(schema_string: str, before: str) -> str:
    """A schema whose columns have the comments that they had before."""
    known = {
        each["name"]: each["metadata"][COMMENT]
        for each in msgspec.json.decode(before)["fields"]
        if COMMENT in each["metadata"]
    }
    if not known:
        return schema_string
    schema = msgspec.json.decode(schema_string)
    for each in schema["fields"]:
        if each["name"] in known:
            each["metadata"].setdefault(COMMENT, known[each["name"]])
    return msgspec.json.encode(schema).decode()
