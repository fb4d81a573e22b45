"""The examples of the document that describes Savegress events, and the strict schemas."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from headrace.formats.catalogue import schemas

SEEDS = Path(__file__).parent / "seeds"

_DOCUMENTS = {name: json.loads(text) for name, text in schemas().items()}
_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"/schemas/{name}", Resource.from_contents(document)) for name, document in _DOCUMENTS.items()
)
EVENT = Draft202012Validator(_DOCUMENTS["savegress.json"], registry=_REGISTRY)
BATCH = Draft202012Validator(_DOCUMENTS["savegress-batch.json"], registry=_REGISTRY)

KEYS = [
    "id",
    "source",
    "schema",
    "table",
    "operation",
    "timestamp",
    "transaction_id",
    "position",
    "before",
    "after",
    "metadata",
]  # fmt: skip


def seed(name: str) -> Any:
    """An example of the document."""
    return json.loads((SEEDS / f"s0_{name}.json").read_text())


def completed(fragment: dict[str, Any]) -> dict[str, Any]:
    """A fragment of an event, with the rest taken from the document's whole events."""
    whole = {"INSERT": "insert", "UPDATE": "update", "DELETE": "delete", "DDL": "ddl"}
    operation = fragment.get("operation", "UPDATE")
    return {**seed("event"), **seed(whole[operation]), **fragment}
