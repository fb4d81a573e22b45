"""JSON bodies, read and checked whole."""

from typing import Any, TypeVar

import msgspec
from litestar import Request

from .problems import Problem, Refused, invalid_parameter

LARGEST_BODY = 64 << 10

B = TypeVar("B", bound=msgspec.Struct)


async def read_body(request: Request[Any, Any, Any], body: type[B]) -> B:
    """The request's body; a wrong field is refused by name."""
    raw = await request.body()
    try:
        document = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Refused(400, Problem("invalid_body", f"the body is not JSON: {error}")) from error
    except RecursionError as error:
        raise Refused(400, Problem("invalid_body", "the body is nested too deeply")) from error
    try:
        return msgspec.convert(document, body)
    except msgspec.ValidationError as error:
        raise _refusal(body, document, str(error)) from error


def _refusal(body: type[msgspec.Struct], document: Any, message: str) -> Refused:
    fields = ", ".join(body.__struct_fields__)
    if not isinstance(document, dict):
        return Refused(400, Problem("invalid_body", f"the body must be a JSON object of {fields}"))
    unknown = [name for name in document if name not in body.__struct_fields__]
    wrong = unknown[0] if unknown else _named(body, message)
    shown = str(msgspec.json.encode(document[wrong]), "utf-8") if wrong in document else ""
    if unknown:
        message = f"there is no such field here; the body takes {fields}"
    return invalid_parameter(wrong, shown, message)


def _named(body: type[msgspec.Struct], message: str) -> str:
    """The field a validation error is about; msgspec names it as `$.field` or `field`."""
    return next((name for name in body.__struct_fields__ if name in message), "body")
