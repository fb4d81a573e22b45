"""The parameters and bodies of requests: one struct a route, read and checked whole.

The same declarations read the query string, word the refusals and fill /openapi.json.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection

from ..change.event import Op
from ..formats import catalogue
from ..formats.changefeed import ON_REQUEST
from .filter import FilterParameters
from .parameters import (
    MOST_PARAMETERS,
    Flag,
    Integer,
    Name,
    Names,
    NonEmptyText,
    OneOf,
    OperationList,
    ParameterRule,
    Text,
)
from .problems import Problem, RequestRefused, invalid_parameter

UINT64 = 2**64 - 1

LARGEST_BODY = 64 << 10

Q = TypeVar("Q", bound=msgspec.Struct)


# --- one struct a route --------------------------------------------------------------------------

Cursor = Annotated[int, Integer(0, UINT64, "the last sequence you have; what follows it is sent")]
Upto = Annotated[int | None, Integer(0, UINT64, "the last sequence to send")]
KeyPrefix = Annotated[str, Text("only keys (table:pk) that start so")]
Heartbeat = Annotated[
    int, Integer(100, 3_600_000, "milliseconds of silence after which a heartbeat is sent")
]
Include = Annotated[
    frozenset[Op],
    OperationList(ON_REQUEST, "operations to send although they neither put nor delete a row"),
]
NO_KEY = "none"  # as an owner; the ids of keys begin otherwise
Owner = Annotated[
    str | None, Name(f"for an admin: the id of the key whose cursor is meant, or {NO_KEY}")
]
Epoch = Annotated[str | None, Name("the log that the sequence belongs to (X-Headrace-Epoch)")]
Generation = Annotated[
    str | None, Name("the generation that the sequence was read in (X-Headrace-Generation)")
]
PlaceIds = Annotated[
    bool, Flag("each id: is SEQUENCE@GENERATION, which shows that a log was put back")
]
CursorName = Annotated[str | None, Name("a named cursor to begin after")]
FormatName = Annotated[str, OneOf(catalogue.names(), "how each change is written down")]
# Events of a stream, such as `etl`, stand for no single row, so nobody can lease them.
LeasedFormatName = Annotated[
    str,
    OneOf(catalogue.event_names(), "how each change is written"),
]
Markers = Annotated[
    bool, Flag("with format=savegress: also events where transactions begin and end")
]
MOST = Integer(1, 10_000, "at most so many changes")
WAIT = Integer(0, 60_000, "milliseconds to wait for a first change when there is none")


class PollQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /changefeed."""

    from_seq: Cursor = 0
    cursor: CursorName = None
    epoch: Epoch = None
    generation: Generation = None
    limit: Annotated[int | None, MOST] = None
    long_poll_ms: Annotated[int, WAIT] = 0
    key_prefix: KeyPrefix = ""
    include: Include = frozenset()


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /changefeed/stream."""

    from_seq: Cursor = 0
    cursor: CursorName = None
    epoch: Epoch = None
    generation: Generation = None
    key_prefix: KeyPrefix = ""
    keep_alive: Annotated[bool, Flag("stay and send what comes, instead of what there is")] = False
    max_seconds: Annotated[int, Integer(1, 60, "the stream's longest duration")] = 30
    heartbeat_ms: Heartbeat = 15_000
    place_ids: PlaceIds = False
    include: Include = frozenset()


class ChangesQuery(FilterParameters, frozen=True, kw_only=True):
    """GET /v1/changes."""

    after: Cursor = 0
    cursor: CursorName = None
    epoch: Epoch = None
    generation: Generation = None
    upto: Upto = None
    limit: Annotated[int | None, MOST] = None
    wait_ms: Annotated[int, WAIT] = 0
    format: FormatName = "canonical"
    preserve_transactions: Markers = False


class ChangesStreamQuery(FilterParameters, frozen=True, kw_only=True):
    """GET /v1/changes/stream."""

    after: Cursor = 0
    cursor: CursorName = None
    epoch: Epoch = None
    generation: Generation = None
    upto: Upto = None
    format: FormatName = "canonical"
    preserve_transactions: Markers = False
    heartbeat_ms: Heartbeat = 15_000
    place_ids: PlaceIds = False


class CursorQuery(msgspec.Struct, frozen=True, kw_only=True):
    """/v1/cursors/{name}."""

    owner: Owner = None


class LeaseQuery(FilterParameters, frozen=True, kw_only=True):
    """POST /v1/cursors/{name}/lease."""

    owner: Owner = None
    consumer: Annotated[str, Name("who asks, for people who look at the leases")] = "consumer"
    limit: Annotated[int, Integer(1, 1000, "at most so many events")] = 100
    lease_ms: Annotated[
        int, Integer(100, 3_600_000, "milliseconds after which what is not acked is handed on")
    ] = 30_000
    wait_ms: Annotated[int, WAIT] = 0
    format: LeasedFormatName = "canonical"


class RangesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/ranges."""

    after: Cursor = 0
    upto: Annotated[int | None, Integer(0, UINT64, "the last sequence of the last range")] = None
    limit: Annotated[
        int | None, Integer(1, UINT64, "at most so many changes, unless one transaction has more")
    ] = None
    parts: Annotated[int, Integer(1, 10_000, "at most so many ranges")] = 1
    since: Annotated[
        int | None,
        Integer(0, UINT64, "microseconds since 1970; `since` is the first sequence captured then"),
    ] = None


class RecordsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/records."""

    after: Cursor = 0
    upto: Upto = None


class TablesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/tables."""

    after: Annotated[
        int, Integer(0, UINT64, "the last version you have; what follows it is sent")
    ] = 0


class NoQuery(msgspec.Struct, frozen=True):
    """A route without parameters."""


# --- reading them --------------------------------------------------------------------------------


@functools.cache
def rules(query: type[msgspec.Struct]) -> Mapping[str, ParameterRule]:
    """The parameters of a route."""
    hints = get_type_hints(query, include_extras=True)
    return {name: _rule(hint) for name, hint in hints.items() if name in query.__struct_fields__}


def _rule(hint: Any) -> ParameterRule:
    rule = hint.__metadata__[0]
    if not isinstance(rule, msgspec.Meta):
        return rule  # type: ignore[no-any-return]
    # The filters of entities are declared below serve/, with a description alone.
    about = rule.description or ""
    if hint.__origin__ in (str, str | None):
        return NonEmptyText(about, longest=rule.max_length)
    return Names(about)


def defaults(query: type[msgspec.Struct]) -> Mapping[str, Any]:
    """What each parameter of a route is when it is not given."""
    return {field.name: field.default for field in msgspec.structs.fields(query)}


def read_query(request: ASGIConnection[Any, Any, Any, Any], query: type[Q]) -> Q:
    """The request's parameters; each wrong one is refused by name."""
    known, values = rules(query), {}
    for name, text in _pairs(request.scope["query_string"]):
        if name not in known:
            offered = f"it takes {', '.join(known)}" if known else "it takes none"
            raise invalid_parameter(name, text, f"there is no such parameter here; {offered}")
        if name in values:
            raise invalid_parameter(name, text, f"{name} must be given once")
        values[name] = read_value(name, text, known[name])
    return query(**values)


def read_value(name: str, text: str, rule: ParameterRule) -> Any:
    """One value, checked."""
    try:
        return rule.read(text)
    except ValueError as error:
        raise invalid_parameter(name, text, f"{name} {rule.expects()}") from error


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("utf-8"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MOST_PARAMETERS,
        )
    except ValueError as error:
        shown = query.decode("ascii", "backslashreplace")
        message = (
            f"the query must be UTF-8, percent-encoded, with at most {MOST_PARAMETERS} parameters"
        )
        raise invalid_parameter("query", shown, message) from error


# --- JSON bodies ---------------------------------------------------------------------------------


async def read_body(request: Request[Any, Any, Any], body: type[Q]) -> Q:
    """The request's body; a wrong field is refused by name."""
    raw = await request.body()
    try:
        document = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise RequestRefused(
            400, Problem("invalid_body", f"the body is not JSON: {error}")
        ) from error
    except RecursionError as error:
        raise RequestRefused(
            400, Problem("invalid_body", "the body is nested too deeply")
        ) from error
    try:
        return msgspec.convert(document, body)
    except msgspec.ValidationError as error:
        raise _refusal(body, document, str(error)) from error


def _refusal(body: type[msgspec.Struct], document: Any, message: str) -> RequestRefused:
    fields = ", ".join(body.__struct_fields__)
    if not isinstance(document, dict):
        return RequestRefused(
            400, Problem("invalid_body", f"the body must be a JSON object of {fields}")
        )
    unknown = [name for name in document if name not in body.__struct_fields__]
    wrong = unknown[0] if unknown else _named(body, message)
    shown = str(msgspec.json.encode(document[wrong]), "utf-8") if wrong in document else ""
    if unknown:
        message = f"there is no such field here; the body takes {fields}"
    return invalid_parameter(wrong, shown, message)


def _named(body: type[msgspec.Struct], message: str) -> str:
    """The field a validation error is about; msgspec names it as `$.field` or `field`."""
    return next((name for name in body.__struct_fields__ if name in message), "body")
