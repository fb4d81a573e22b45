"""What the events of each format look like, for programs that check them."""

from typing import Any

import msgspec
from litestar import Request, Response, get

from ..formats import catalogue
from .openapi import operation, problem, replies
from .problems import Problem, RequestRefused
from .query import NoQuery, read_query

SCHEMA = "application/schema+json"


class SchemaList(msgspec.Struct, frozen=True):
    """Where the schemas are."""

    schemas: list[str]


@get("/schemas", operation_class=operation(NoQuery), responses=replies(SchemaList))
async def listed(request: Request[Any, Any, Any]) -> SchemaList:
    """The paths of all schemas."""
    read_query(request, NoQuery)
    return SchemaList([f"/schemas/{name}" for name in catalogue.schemas()])


@get(
    "/schemas/{file:str}",
    operation_class=operation(NoQuery),
    responses=replies(dict[str, Any], media_type=SCHEMA)
    | {404: problem("There is no such schema.")},
)
async def schema(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The JSON Schema (draft 2020-12) of a format's events."""
    read_query(request, NoQuery)
    known, name = catalogue.schemas(), str(request.path_params["file"])
    if name not in known:
        message = f"there is no schema called {name[:200]!r}"
        raise RequestRefused(404, Problem("unknown_schema", message, known=list(known)))
    return Response(known[name], media_type=SCHEMA)
