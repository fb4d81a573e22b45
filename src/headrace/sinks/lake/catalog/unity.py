"""Unity Catalog: tables as external Delta tables, by its REST API.

Columns and comments of an entry are changed in place by the API for Delta tables, which servers
have since 0.5. An older server gets our entry anew: there, grants on the table are lost.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import quote

import httpx
import msgspec

from ....errors import SinkRefused, SinkUnavailable
from ....plugins import Finding
from ....secret import Secret
from ..refusal import refusal
from .entry import CatalogColumn, CatalogEntry, TableCatalog, expect_no_password, type_text

_API = "/api/2.1/unity-catalog"
_SECONDS = 15.0  # until something comes
_WHOLE_SECONDS, _MOST_BYTES = 60.0, 32 << 20  # of an answer: the columns of one table
_KEBAB = {
    "elementType": "element-type",
    "containsNull": "contains-null",
    "keyType": "key-type",
    "valueType": "value-type",
    "valueContainsNull": "value-contains-null",
}
_TYPE_NAMES = {"integer": "INT"}


class UnityCatalog(TableCatalog, frozen=True, kw_only=True, tag="unity"):
    """A server of Unity Catalog."""

    WITHIN: ClassVar[str] = "schema"

    url: str
    catalog: str
    schema: str = ""  # for all tables; "": each in the schema that has the name of the source's
    token: Secret | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("url: an address begins with http:// or https://")
        expect_no_password("url", self.url, "token")

    def register(self, entry: CatalogEntry) -> bool:
        """Make the entry, or change it in place."""
        full = ".".join((self.catalog, *entry.name))
        with self._connected() as server:
            found = self._ask(server, "GET", f"/tables/{quote(full)}")
            if found is None:
                self._create(server, entry)
                return True
            entry.expect_ours(found.get("storage_location") or "", self.WITHIN)
            if _shown(found) == _shown(self._request(entry)):
                return False
            if not self._update(server, entry, found):
                self._ask(server, "DELETE", f"/tables/{quote(full)}")
                self._create(server, entry, found.get("properties") or {})
            return True

    def check(self, storage: Mapping[str, str]) -> Finding:
        """Whether the server answers, and has the catalog."""
        with self._connected() as server:
            if self._ask(server, "GET", f"/catalogs/{quote(self.catalog)}") is None:
                return Finding(
                    "catalog",
                    ok=False,
                    detail=f"{self.url} has no catalog {self.catalog}",
                    fix="Create it there, or correct catalog.catalog of the sink.",
                )
        return Finding("catalog", ok=True, detail=f"{self.url}: catalog {self.catalog} is there")

    def _create(
        self, server: httpx.Client, entry: CatalogEntry, kept: Mapping[str, str] = {}
    ) -> None:
        request = self._request(entry) | {"properties": dict(kept)}
        if self._ask(server, "POST", "/tables", request) is not None:
            return
        schema = {"name": entry.name.schema, "catalog_name": self.catalog}
        if self._ask(server, "POST", "/schemas", schema) is None:
            raise SinkRefused(
                f"{self.url} has no catalog {self.catalog}",
                hint="Create it there, or correct catalog.catalog of the sink.",
            )
        if self._ask(server, "POST", "/tables", request) is None:
            raise SinkUnavailable(f"{self.url}: schema {entry.name.schema} was made and is gone")

    def _update(self, server: httpx.Client, entry: CatalogEntry, found: dict[str, Any]) -> bool:
        """Change columns and comment in place; False: the server cannot."""
        path = f"/delta/v1/catalogs/{quote(self.catalog)}/schemas/{quote(entry.name.schema)}"
        columns = [_kebab(msgspec.to_builtins(each)) for each in entry.columns]
        updates: list[dict[str, Any]] = [
            {"action": "set-columns", "columns": {"type": "struct", "fields": columns}},
            {"action": "set-table-comment", "comment": entry.comment},
        ]
        if entry.partition_by:
            names = list(entry.partition_by)
            updates.append({"action": "set-partition-columns", "partition-columns": names})
        request = {
            "requirements": [{"type": "assert-table-uuid", "uuid": found.get("table_id")}],
            "updates": updates,
        }
        answer = self._ask(server, "POST", f"{path}/tables/{quote(entry.name.table)}", request)
        return answer is not None

    def _request(self, entry: CatalogEntry) -> dict[str, Any]:
        columns = []
        for position, each in enumerate(entry.columns):
            column = _column(each) | {"position": position}
            if each.name in entry.partition_by:
                column["partition_index"] = entry.partition_by.index(each.name)
            columns.append(column)
        return {
            "name": entry.name.table,
            "catalog_name": self.catalog,
            "schema_name": entry.name.schema,
            "table_type": "EXTERNAL",
            "data_source_format": "DELTA",
            "storage_location": entry.location,
            "columns": columns,
            "comment": entry.comment,
        }

    @contextmanager
    def _connected(self) -> Iterator[httpx.Client]:
        headers = {"authorization": f"Bearer {self.token.reveal()}"} if self.token else {}
        base = f"{self.url.rstrip('/')}{_API}"
        with httpx.Client(base_url=base, headers=headers, timeout=_SECONDS) as server:
            yield server

    def _ask(
        self, server: httpx.Client, method: str, path: str, content: object = None
    ) -> dict[str, Any] | None:
        """What the server answers; None: it does not have what the request is about."""
        try:
            with server.stream(method, path, json=content) as answer:
                body = self._body(answer)
        except httpx.HTTPError as error:
            raise SinkUnavailable(f"{self.url}: {self._masked(error)}") from None
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        found = _json(body)
        if answer.is_success and found is None:
            raise SinkRefused(
                f"{self.url} answers {method} {path} with something else than JSON",
                hint="Check catalog.url of the sink: is it that of the server, not of its pages?",
            )
        if answer.is_success:
            return found
        status = f"{answer.status_code} {self._masked(ValueError(_words(found or {})))}"
        message = f"{self.url} refuses {method} {path}: {status}"
        if answer.is_server_error or answer.status_code in (408, 409, 429):
            raise SinkUnavailable(message)
        raise SinkRefused(
            message, hint="Check catalog.token of the sink, and what it may do in the catalog."
        )

    def _body(self, answer: httpx.Response) -> bytes:
        """The whole answer; SinkUnavailable: it has no end."""
        body, deadline = bytearray(), time.monotonic() + _WHOLE_SECONDS
        for part in answer.iter_bytes():
            body += part
            if len(body) > _MOST_BYTES or time.monotonic() > deadline:
                raise SinkUnavailable(f"{self.url}: the answer is too long, or comes too slowly")
        return bytes(body)

    def _masked(self, error: BaseException) -> str:
        return refusal(error, {"token": self.token.reveal()} if self.token else {})


def _json(body: bytes) -> dict[str, Any] | None:
    """The object in an answer, which may be empty; None: it is something else."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _words(body: Mapping[str, Any]) -> str:
    inner = body.get("error")
    return str((inner if isinstance(inner, dict) else body).get("message") or "")


def _column(each: CatalogColumn) -> dict[str, Any]:
    kind = each.type["type"] if isinstance(each.type, dict) else each.type
    column = {
        "name": each.name,
        "type_text": type_text(each.type),
        "type_json": msgspec.json.encode(each).decode(),
        "type_name": _TYPE_NAMES.get(kind, kind.partition("(")[0].upper()),
        "nullable": each.nullable,
    }
    return column | {"comment": each.comment} if each.comment else column


def _shown(table: Mapping[str, Any]) -> tuple[str, list[tuple[Any, ...]]]:
    """What can differ between an entry and the table: the server writes types in small letters."""
    columns = sorted(table.get("columns") or [], key=lambda each: each.get("position") or 0)
    return table.get("comment") or "", [
        (
            each.get("name"),
            (each.get("type_text") or "").lower(),
            each.get("nullable", True),
            each.get("comment") or "",
            each.get("partition_index"),
        )
        for each in columns
    ]


def _kebab(value: Any) -> Any:
    """A part of a Delta schema as the API for Delta tables names its fields."""
    if isinstance(value, list):
        return [_kebab(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        _KEBAB.get(name, name): each if name == "metadata" else _kebab(each)
        for name, each in value.items()
    }
