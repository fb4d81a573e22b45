"""CloudEvents 1.0: a change as `data`, and beside it what any receiver can route by."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self
from urllib.parse import quote

import msgspec

from ..change.event import Change, Op, Table
from ._tables import PerTable
from .canonical import Canonical
from .facts import Facts, FormatOptions
from .key import row_key
from .timestamps import iso

TYPES: Mapping[Op, str] = {op: f"headrace.change.{op.value.lower()}" for op in Op}

DATA_SCHEMA = "urn:headrace:schema:canonical"

_encode = msgspec.json.Encoder().encode
_canonical = Canonical().encode


@dataclass(frozen=True)
class CloudEvents:
    """Every change, with every field."""

    facts: Facts = field(default_factory=Facts)
    _places: PerTable["_Place"] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "cloudevents"
    media_type: ClassVar[str] = "application/cloudevents+json"

    @classmethod
    def of(cls, options: FormatOptions) -> Self:
        return cls(options.facts)

    def __post_init__(self) -> None:
        """Make room for what all changes of a table share."""
        object.__setattr__(self, "_places", PerTable(lambda table: _place(table, self.facts)))

    def __reduce__(self) -> tuple[type["CloudEvents"], tuple[Facts]]:
        return CloudEvents, (self.facts,)

    def encode(self, change: Change) -> bytes:
        """The change in structured mode: attributes and data in one JSON object."""
        attributes = _encode(self._attributes(change) | {"datacontenttype": Canonical.media_type})
        return b'%b,"data":%b}' % (attributes[:-1], _canonical(change))

    def binary(self, change: Change) -> tuple[dict[str, str], bytes]:
        """The change in binary mode: HTTP headers, and the body."""
        attributes = self._attributes(change)
        headers = {f"ce-{name}": _header(value) for name, value in attributes.items()}
        return headers | {"content-type": Canonical.media_type}, _canonical(change)

    def _attributes(self, change: Change) -> dict[str, str]:
        place = self._places(change.table)
        attributes = {
            "specversion": "1.0",
            "id": change.id,
            "source": place.source,
            "type": TYPES[change.op],
            "time": iso(change.transaction.commit_time),
            "dataschema": DATA_SCHEMA,
            # Receivers compare it as text, so it is as long as the log's largest number.
            "sequence": f"{change.sequence:020d}",
        }
        if place.subject:
            attributes["subject"] = place.subject
            attributes["partitionkey"] = _attribute(row_key(change))
        return attributes


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the changes of a table come from; what belongs to no table has no subject."""

    source: str
    subject: str


def _place(table: Table, facts: Facts) -> _Place:
    path = [part for part in ("headrace", facts.pipeline, table.source) if part]
    subject = table.path if table.name else ""
    return _Place("".join(f"/{quote(part, safe='')}" for part in path), _attribute(subject))


# --- text ----------------------------------------------------------------------------------------

# Control characters, and code points that Unicode will never give a meaning.
_NEVER = "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
_FORBIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef{_NEVER}]")
# All of printable ASCII but the space, the double quote and the percent sign itself.
_PLAIN = "".join(set(map(chr, range(0x21, 0x7F))) - set('"%'))


def _attribute(text: str) -> str:
    """Text that an attribute may hold: names and keys may hold more, which is percent-encoded."""
    if text.isprintable():  # much the faster look
        return text
    return _FORBIDDEN.sub(lambda found: quote(found[0], safe=""), text)


def _header(text: str) -> str:
    """An attribute as the value of an HTTP header."""
    return quote(text, safe=_PLAIN)
