"""What /openapi.json says of routes that read their query and body themselves."""

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Router
from litestar.connection import ASGIConnection
from litestar.enums import MediaType
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.openapi import ResponseSpec
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from .. import __version__
from .problems import Problem
from .query import NoQuery, defaults, read_query, rules

PATH = "/openapi.json"

LAST_EVENT_ID = Parameter(
    name="Last-Event-ID",
    param_in="header",
    schema=Schema(type=OpenAPIType.INTEGER, minimum=0),
    description="The last sequence a reconnecting client has; it wins over the cursor.",
)


def config() -> OpenAPIConfig:
    """The description of an app, served at exactly /openapi.json."""
    return OpenAPIConfig(
        title="Headrace",
        version=__version__,
        description="Every change of a database, in order, as it happens.",
        components=Components(
            security_schemes={
                "key": SecurityScheme(type="apiKey", name="X-API-Key", security_scheme_in="header"),
                "bearer": SecurityScheme(type="http", scheme="bearer"),
            }
        ),
        security=[{"key": []}, {"bearer": []}, {}],  # {}: none, on the server's own machine
        openapi_router=Router(
            PATH, route_handlers=[], guards=[_only_there], include_in_schema=False
        ),
        render_plugins=[JsonRenderPlugin(path="/", media_type=MediaType.JSON)],
    )


def asks(
    query: type[msgspec.Struct],
    *,
    header: Parameter | None = None,
    body: type[msgspec.Struct] | None = None,
) -> type[Operation]:
    """An operation with these parameters and this body."""

    @dataclass
    class Asked(Operation):
        def __post_init__(self) -> None:
            declared = [*(self.parameters or []), *_parameters(query)]
            self.parameters = [*declared, header] if header else declared
            self.request_body = _request_body(body) if body else None

    return Asked


def answers(
    document: Any, *, status: int = 200, media_type: str = "application/json"
) -> dict[int, ResponseSpec]:
    """What a route answers to a good request, and to a bad one."""
    return {
        status: ResponseSpec(
            document,
            description="What was asked for.",
            media_type=media_type,
            generate_examples=False,
        ),
        400: problem("What was wrong, and why."),
        401: problem("A valid API key is needed."),
        403: problem("The key, the host or the page's origin may not ask this."),
        429: problem("The key has used up its limits; Retry-After says for how long."),
    }


def problem(description: str) -> ResponseSpec:
    """An answer that says what was wrong."""
    return ResponseSpec(Problem, description=description, generate_examples=False)


NO_CURSOR = {404: problem("There is no such cursor.")}


def _only_there(connection: ASGIConnection[Any, Any, Any, Any], route: BaseRouteHandler) -> None:
    # Litestar adds a page of its own for every path below.
    if connection.url.path.rstrip("/") != PATH:
        raise NotFoundException
    read_query(connection, NoQuery)


def _parameters(query: type[msgspec.Struct]) -> list[Parameter]:
    parameters = []
    for name, rule in rules(query).items():
        schema, default = rule.schema(), defaults(query)[name]
        schema.default = default if isinstance(default, int | str) else None
        parameters.append(
            Parameter(name=name, param_in="query", schema=schema, description=rule.about)
        )
    return parameters


def _request_body(body: type[msgspec.Struct]) -> RequestBody:
    """The body as msgspec describes it: plain fields, arrays of plain values."""
    (described,), _ = msgspec.json.schema_components([body])
    name = described["$ref"].rpartition("/")[2]
    document = msgspec.json.schema(body)["$defs"][name]
    properties: dict[str, Reference | Schema] = {
        name: _field(field) for name, field in document["properties"].items()
    }
    schema = Schema(
        type=OpenAPIType.OBJECT, properties=properties, required=document.get("required")
    )
    return RequestBody({"application/json": OpenAPIMediaType(schema=schema)}, required=True)


def _item(item: dict[str, Any]) -> Schema:
    kind = OpenAPIType(item.get("type", "string"))
    return Schema(type=kind, minimum=item.get("minimum"), enum=item.get("enum"))


def _field(field: dict[str, Any]) -> Schema:
    choices = field.get("anyOf", [field])
    shape = next(choice for choice in choices if choice["type"] != "null")
    kinds = [OpenAPIType(choice["type"]) for choice in choices]
    items = shape.get("items")
    return Schema(
        type=kinds if len(kinds) > 1 else kinds[0],
        minimum=shape.get("minimum"),
        maximum=shape.get("maximum"),
        items=_item(items) if items else None,
    )
