"""The filter, the format and the start of a request, and the cursors it names."""

import re
from collections.abc import Iterable

from ..change.event import Op
from ..formats import AnyFormat
from ..formats.changefeed import ON_REQUEST
from ..log import UNKNOWN_GENERATION, Cursor
from .access import Access
from .filter import Filter, FilterParameters, NamedTables, named
from .problems import Problem, RequestRefused, invalid_parameter
from .query import NO_KEY
from .service import Service

_WILD = re.compile(r"[*?[]")


def request_filter(service: Service, access: Access, query: FilterParameters) -> Filter:
    """Which changes a request wants; RequestRefused: its key may not see a table it names."""
    expect_permitted(service, access, query.tables)
    return Filter(**{name: getattr(query, name) for name in FilterParameters.__struct_fields__})


def expect_permitted(service: Service, access: Access, tables: Iterable[str]) -> None:
    """Refuse a table by name that a key may not see; a pattern just leaves it out."""
    if access.key is None or not access.key.tables:
        return
    known = NamedTables(service.log.tables())
    for name in tables:
        if _WILD.search(name):
            continue
        # Only who may see a table learns whether it exists.
        meant = known.matching(name) or named(name)
        if not any(map(access.allows, meant)):
            message = f"this API key may not see the table {name!r:.200}"
            raise RequestRefused(403, Problem("permission_denied", message))


def request_format(
    service: Service, name: str, operations: frozenset[Op], *, markers: bool = False
) -> AnyFormat:
    """How a request wants them written down."""
    if markers and name != "savegress":
        message = f"preserve_transactions goes with format=savegress, not with {name}"
        raise invalid_parameter("preserve_transactions", "true", message)
    if name == "entity" and not service.settings.enabled:
        hint = "Set cdc.enabled to true."
        raise RequestRefused(
            404, Problem("not_enabled", "the entity events are switched off", hint=hint)
        )
    # Whoever names an operation wants it, also in a format that carries it only on request.
    return service.formats.named(name, include=operations & ON_REQUEST, markers=markers)


def start_after(service: Service, access: Access, *, after: int, cursor: str | None) -> int:
    """The sequence after which a request begins."""
    if cursor is None:
        return after
    if after:
        message = "a sequence and a cursor both say where to begin; give one of them"
        raise invalid_parameter("cursor", cursor, message)
    return known_cursor(service, access, cursor).sequence


def expect_shared(
    service: Service, after: int, epoch: str | None, generation: str | None = None
) -> int:
    """Refuse a place that is not in this log: it was put back from an older copy, or replaced."""
    log = service.log
    meant = log.epoch if epoch is None else epoch
    upto = log.shared_upto(meant, generation or UNKNOWN_GENERATION)
    if upto is not None and after <= upto:
        return after
    if meant != log.epoch:
        has = "nothing of it" if upto is None else f"what it had up to sequence {upto}"
        message = f"sequence {after} is of another log, and this one has {has}"
    elif upto is None:
        message = f"sequence {after} was read in generation {generation}, which this log never had"
    else:
        message = f"sequence {after} is beyond what this log has of it, which ends at {upto}"
    if meant == log.epoch:
        message += ": it was put back from an older copy, or lost its tail"
    hint = (
        f"Read the tables' current rows, then go on after {log.latest_sequence}, the newest "
        "sequence of this log."
    )
    raise RequestRefused(409, Problem("other_log", message, hint=hint))


def known_cursor(
    service: Service, access: Access, name: str, *, whose: str | None = None
) -> Cursor:
    """The cursor that a client means; RequestRefused when there is none, or only another key's."""
    known = found_cursor(service, access, name, whose=whose)
    if known is None:
        hint = f'PUT /v1/cursors/{name} with {{"sequence": 0}} makes it.'
        raise RequestRefused(
            404, Problem("unknown_cursor", f"there is no cursor {name!r}", hint=hint)
        )
    return known


def found_cursor(
    service: Service, access: Access, name: str, *, whose: str | None = None
) -> Cursor | None:
    """The cursor that a client means by a name, if there is one.

    It is the client's own. An admin who has none of this name means the only other one, or names
    its owner. Nobody else learns whether others' cursors exist.
    """
    log, own = service.log, owner(access)
    if whose is not None:
        owned_by = None if whose == NO_KEY else whose
        return log.cursor(name, owned_by) if access.admin or owned_by == own else None
    known = log.cursor(name, own)
    if known is not None or not access.admin:
        return known
    named = [each for each in log.cursors() if each.name == name]
    if len(named) > 1:
        message = f"{len(named)} keys have a cursor {name!r}"
        hint = f"owner=ID says whose is meant; owner={NO_KEY} means that of programs without a key."
        raise RequestRefused(409, Problem("ambiguous_cursor", message, hint=hint))
    return named[0] if named else None


def may(access: Access, known: Cursor) -> bool:
    """Whether a client may use a cursor."""
    return access.admin or known.owner == owner(access)


def owner(access: Access) -> str | None:
    """Whose cursors a client makes."""
    return None if access.key is None else access.key.holder
