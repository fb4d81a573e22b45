"""What a request asks for: a filter, a format, a place to begin."""

from ..event import Op
from ..formats import AnyFormat
from ..formats.changefeed import ON_REQUEST
from ..log import Cursor
from .access import Access
from .filter import Filter
from .problems import Problem, Refused, invalid_parameter
from .query import ChangesQuery, ChangesStreamQuery, LeaseQuery
from .service import Service


def asked_filter(query: ChangesQuery | ChangesStreamQuery | LeaseQuery) -> Filter:
    """Which changes a request wants."""
    return Filter(
        source=query.source,
        tables=query.tables,
        operations=query.operations,
        event_type=query.event_type,
        entity_type=query.entity_type,
        tenant_id=query.tenant_id,
        trigger=query.trigger,
        changed_fields=query.changed_fields,
    )


def asked_format(
    service: Service, name: str, operations: frozenset[Op], *, markers: bool = False
) -> AnyFormat:
    """How a request wants them written down."""
    if markers and name != "savegress":
        message = f"preserve_transactions goes with format=savegress, not with {name}"
        raise invalid_parameter("preserve_transactions", "true", message)
    if name == "entity" and not service.settings.enabled:
        hint = "Set cdc.enabled to true."
        raise Refused(404, Problem("not_enabled", "the entity events are switched off", hint=hint))
    # Whoever names an operation wants it, also in a format that carries it only on request.
    return service.formats.named(name, include=operations & ON_REQUEST, markers=markers)


def asked_after(service: Service, access: Access, *, after: int, cursor: str | None) -> int:
    """The sequence after which a request begins."""
    if cursor is None:
        return after
    if after:
        message = "a sequence and a cursor both say where to begin; give one of them"
        raise invalid_parameter("cursor", cursor, message)
    return known_cursor(service, access, cursor).sequence


def known_cursor(service: Service, access: Access, name: str) -> Cursor:
    """A cursor of the client's; Refused when there is none, or it is another key's."""
    known = service.log.cursor(name)
    if known is None:
        hint = f'PUT /v1/cursors/{name} with {{"sequence": 0}} makes it.'
        raise Refused(404, Problem("unknown_cursor", f"there is no cursor {name!r}", hint=hint))
    expect_own(access, known)
    return known


def expect_own(access: Access, known: Cursor) -> None:
    """Refuse a cursor that another key made."""
    if not may(access, known):
        message = f"cursor {known.name!r} belongs to another API key"
        raise Refused(403, Problem("permission_denied", message))


def may(access: Access, known: Cursor) -> bool:
    """Whether a client may use a cursor."""
    return access.admin or known.owner == owner(access)


def owner(access: Access) -> str | None:
    """Whose cursors a client makes."""
    return None if access.key is None else access.key.holder
