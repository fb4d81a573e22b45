"""What a catalog says of a table, and the contract of a catalog."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from ....change.path import table_path
from ....errors import HeadraceError, SinkRefused
from ....plugins import Finding
from ..deltalog import Metadata
from ..refusal import has_login
from ..storage import Folder

_PLAIN = re.compile(r"[^a-z0-9_]")
_NO_SCHEMA = "default"  # as Hive and Spark call theirs
_TEXTS = {
    "long": "bigint",
    "integer": "int",
    "short": "smallint",
    "byte": "tinyint",
}


class EntryName(NamedTuple):
    """The name of a table in a catalog."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}"


class CatalogColumn(msgspec.Struct, frozen=True):
    """A column, as the schema of a Delta table describes it."""

    name: str
    type: str | dict[str, Any]  # as in JSON: a name, or a list, map or struct
    nullable: bool = True
    metadata: dict[str, Any] = {}

    @property
    def comment(self) -> str:
        """What the source says of it; "": nothing."""
        found = self.metadata.get("comment")
        return found if isinstance(found, str) else ""


class _DeltaSchema(msgspec.Struct):
    fields: tuple[CatalogColumn, ...]


_read_schema = msgspec.json.Decoder(_DeltaSchema).decode


class CatalogEntry(msgspec.Struct, frozen=True):
    """A table as a catalog is to show it."""

    source: str  # schema.table there; of a history, the name of its sink
    name: EntryName
    folder: Folder
    columns: tuple[CatalogColumn, ...]
    partition_by: tuple[str, ...] = ()
    comment: str = ""

    @classmethod
    def of(cls, source: str, name: EntryName, folder: Folder, table: Metadata) -> "CatalogEntry":
        """The entry of a Delta table."""
        return cls(
            source,
            name,
            folder,
            _read_schema(table.schema_string).fields,
            tuple(table.partition_columns),
            table.description or "",
        )

    @property
    def location(self) -> str:
        """The address of the table's folder."""
        uri = self.folder.uri
        return uri if "://" in uri else Path(uri).as_uri()

    def expect_ours(self, place: str, setting: str) -> None:
        """Refuse to touch an entry of the same name that stands for another place."""
        if not same_place(place, self.location):
            raise SinkRefused(
                f"{self.name} in the catalog is a table in {place or 'no folder'}, not that of "
                f"{self.source} in {self.location}; it is left as it is",
                hint=f"Set catalog.{setting} or catalog.names of the sink, so that {self.source} "
                "gets another name, or remove that entry.",
            )


class TableCatalog(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """A catalog in which tables are registered; derive one whose fields are its settings.

    `register` is called beside the stream, and again until it succeeds. SinkUnavailable: the
    catalog may answer later. SinkRefused: a person must act.
    """

    WITHIN: ClassVar[str]  # the setting that puts all tables into one schema

    names: Mapping[str, str] = {}  # by schema.table: another name in the catalog

    def __post_init__(self) -> None:
        for source, name in self.names.items():
            if not re.fullmatch(r"[^.]+\.[^.]+", name):
                raise ValueError(f"names: {source} needs a name such as shop.orders")

    @abstractmethod
    def register(self, entry: CatalogEntry) -> bool:
        """Make the catalog's entry equal to `entry`; False: it was already.

        Done twice, it is done once. An entry of that name for another place is never touched.
        """

    @abstractmethod
    def check(self, storage: Mapping[str, str]) -> Finding:
        """Whether it answers and takes the credentials; `storage` are the sink's options."""

    def name_of(self, schema: str, table: str) -> EntryName:
        """What a table is called in the catalog: small letters, digits and underscores."""
        if chosen := self.names.get(source_name(schema, table)):
            return EntryName(*map(_plain, chosen.split(".")))
        return EntryName(_plain(getattr(self, self.WITHIN) or schema or _NO_SCHEMA), _plain(table))


def check_catalog(catalog: TableCatalog | None, storage: Mapping[str, str]) -> Iterator[Finding]:
    """What `headrace check` finds of a sink's catalog."""
    if catalog is None:
        return
    try:
        yield catalog.check(storage)
    except HeadraceError as error:
        yield Finding("catalog", ok=False, detail=str(error), fix=error.hint)


def expect_no_password(setting: str, address: str, instead: str) -> None:
    """Refuse an address with a password in it: errors name the address."""
    if has_login(address):
        raise ValueError(
            f"{setting}: the address has a user or a password in it, which logs would show; use "
            f"{instead}"
        )


def source_name(schema: str, table: str) -> str:
    """A table as settings name it.

    >>> source_name("public", "orders"), source_name("", "audit")
    ('public.orders', 'audit')
    """
    return table_path(schema, table) if schema else table


def type_text(kind: str | dict[str, Any]) -> str:
    """A type of a Delta schema, as Hive, Spark and Unity write it.

    >>> type_text("long"), type_text({"type": "array", "elementType": "decimal(9,2)"})
    ('bigint', 'array<decimal(9,2)>')
    """
    if isinstance(kind, str):
        return _TEXTS.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{type_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{type_text(kind['keyType'])},{type_text(kind['valueType'])}>"
    fields = (f"{each['name']}:{type_text(each['type'])}" for each in kind["fields"])
    return f"struct<{','.join(fields)}>"


def same_place(one: str, other: str) -> bool:
    """Whether two addresses are of one folder.

    >>> same_place("file:/lake/a%20b/", "file:///lake/a b"), same_place("s3a://x/y", "s3://x/y")
    (True, True)
    """
    return _place(one) == _place(other)


def _place(address: str) -> tuple[str, str, str]:
    parts = urlsplit(address)
    scheme = {"s3a": "s3", "s3n": "s3", "": "file"}.get(parts.scheme, parts.scheme)
    return scheme, parts.netloc, unquote(parts.path).rstrip("/")


def _plain(name: str) -> str:
    return _PLAIN.sub("_", name.lower())
