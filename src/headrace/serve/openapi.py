"""What /openapi.json says of routes that read their query and body themselves."""

from collections.abc import Mapping
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
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition

from .. import __version__
from .parameters import ParameterRule
from .problems import Problem
from .query import UINT64, NoQuery, defaults, read_query, rules
from .threads import aside

PATH = "/openapi.json"
EVENT_STREAM = "text/event-stream"

LAST_EVENT_ID = Parameter(
    name="Last-Event-ID",
    param_in="header",
    schema=Schema(
        one_of=[
            Schema(type=OpenAPIType.INTEGER, minimum=0, maximum=UINT64),
            Schema(type=OpenAPIType.STRING, pattern="^[0-9]{1,20}@[0-9a-f]{1,16}$"),
            Schema(type=OpenAPIType.STRING, max_length=0),  # none yet
        ]
    ),
    description="The last sequence a reconnecting client has; it wins over the cursor.",
)


class ArrayStructs(OpenAPISchemaPlugin):
    """Describes structs that are sent as arrays; Litestar alone takes them for objects."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        """Whether a type is such a struct."""
        struct = field_definition.annotation
        return (
            isinstance(struct, type)
            and issubclass(struct, msgspec.Struct)
            and struct.__struct_config__.array_like
        )

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Schema:
        """An array with a value for each field."""
        hints = field_definition.get_type_hints()
        fields = field_definition.annotation.__struct_fields__
        kinds = [FieldDefinition.from_annotation(kind) for kind in dict.fromkeys(hints.values())]
        return Schema(
            type=OpenAPIType.ARRAY,
            # Not by `prefixItems`, which few programs understand.
            items=Schema(any_of=[schema_creator.for_field_definition(kind) for kind in kinds]),
            min_items=len(fields),
            max_items=len(fields),
            description=f"{', '.join(fields)}, in this order.",
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


def operation(
    query: type[msgspec.Struct],
    *,
    path: Mapping[str, ParameterRule] | None = None,
    header: Parameter | None = None,
    body: type[msgspec.Struct] | None = None,
    lines: str | None = None,
) -> type[Operation]:
    """An operation with these parameters and this body; `lines` may be requested by Accept."""

    @dataclass
    class DescribedOperation(Operation):
        def __post_init__(self) -> None:
            declared = [*(self.parameters or []), *_parameters(query)]
            for parameter in declared:
                if isinstance(parameter, Parameter) and path and parameter.name in path:
                    parameter.schema = path[parameter.name].schema()
            self.parameters = [*declared, header] if header else declared
            self.request_body = _request_body(body) if body else None
            good = (self.responses or {}).get("200")
            if isinstance(good, OpenAPIResponse) and good.content:
                if EVENT_STREAM in good.content:
                    _as_messages(good.content[EVENT_STREAM])
                if lines:
                    text = Schema(type=OpenAPIType.STRING, description="One JSON document a line.")
                    good.content[lines] = OpenAPIMediaType(schema=text)

    return DescribedOperation


def replies(
    document: Any, *, status: int = 200, media_type: str = "application/json"
) -> dict[int, ResponseSpec]:
    """The responses of a route to a good request, and to a bad one."""
    good = ResponseSpec(
        document,
        description="The requested document.",
        media_type=media_type,
        generate_examples=False,
    )
    return {
        400: problem("What was wrong, and why."),
        401: problem("A valid API key is needed."),
        403: problem("The key, the host or the page's origin may not ask this."),
        408: problem("The request did not come whole in time."),
        429: problem("The key has used up its limits; Retry-After says for how long."),
        431: problem("The request's line and headers are too large."),
        503: problem("Something that Headrace stands on does not work now."),
        status: good,
    }


def problem(description: str) -> ResponseSpec:
    """An answer that says what was wrong."""
    return ResponseSpec(Problem, description=description, generate_examples=False)


NO_CURSOR = {
    404: problem("There is no such cursor, or the changefeed is switched off."),
    409: problem("Several keys have a cursor of this name, or the sequence is of another log."),
}
SWITCHED_OFF = {404: problem("The changefeed is switched off.")}
WITH_BODY = {413: problem("The body is too large.")}


async def _only_there(
    connection: ASGIConnection[Any, Any, Any, Any], route: BaseRouteHandler
) -> None:
    # Litestar adds a page of its own for every path below.
    if connection.url.path.rstrip("/") != PATH:
        raise NotFoundException
    read_query(connection, NoQuery)
    # It is made for the first who asks, in a thread: that takes a tenth of a second.
    plugin: Any = connection.app.plugins.get("OpenAPIPlugin")
    await aside(plugin.provide_openapi_schema)


def _parameters(query: type[msgspec.Struct]) -> list[Parameter]:
    parameters = []
    for name, rule in rules(query).items():
        schema, default = rule.schema(), defaults(query)[name]
        schema.default = default if isinstance(default, int | str) else None
        parameter = Parameter(name=name, param_in="query", schema=schema, description=rule.about)
        if schema.type is OpenAPIType.ARRAY:
            parameter.style, parameter.explode = "form", False  # between commas
        parameters.append(parameter)
    return parameters


def _as_messages(stream: OpenAPIMediaType) -> None:
    """Describe a stream by one of its messages, as a client's parser returns it."""
    data = Schema(
        type=OpenAPIType.STRING, content_media_type="application/json", content_schema=stream.schema
    )
    text = Schema(type=OpenAPIType.STRING)
    stream.schema = Schema(
        type=OpenAPIType.OBJECT,
        properties={"id": text, "event": text, "data": data},
        required=["data"],
    )


def _request_body(body: type[msgspec.Struct]) -> RequestBody:
    """The body as msgspec describes it: plain fields, arrays of plain values."""
    (described,), _ = msgspec.json.schema_components([body])
    name = described["$ref"].rpartition("/")[2]
    document = msgspec.json.schema(body)["$defs"][name]
    properties: dict[str, Reference | Schema] = {
        name: _field(field) for name, field in document["properties"].items()
    }
    schema = Schema(
        type=OpenAPIType.OBJECT,
        properties=properties,
        required=document.get("required"),
        additional_properties=document.get("additionalProperties"),
    )
    return RequestBody({"application/json": OpenAPIMediaType(schema=schema)}, required=True)


_WORDS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "pattern": "pattern",
    "enum": "enum",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_items",
    "maxItems": "max_items",
}  # of JSON Schema, and what Litestar calls them


def _field(field: dict[str, Any]) -> Schema:
    choices = field.get("anyOf", [field])
    shape = next(choice for choice in choices if choice.get("type") != "null")
    kinds = [OpenAPIType(choice.get("type", "string")) for choice in choices]
    items = shape.get("items")
    return Schema(
        type=kinds if len(kinds) > 1 else kinds[0],
        items=_field(items) if items else None,
        **{ours: shape[word] for word, ours in _WORDS.items() if word in shape},
    )
