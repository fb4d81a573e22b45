"""What a key permits its reader to see, whatever it requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec

from ..change.event import Change, Op
from ..formats import AnyFormat, Format, FormatStream, Rendered, StreamFormat, TransactionFormat
from ..formats.entities import Entities, Test, root_of
from ..log.keys import Key
from .filter import TableAnswers, both


class _Access(Protocol):
    """See `access.Access`."""

    @property
    def key(self) -> Key | None: ...
    def valid(self) -> bool: ...


@dataclass(frozen=True)
class Permissions:
    """The tables and the tenant that a key is for; it ends with the key."""

    tables: tuple[str, ...] = ()  # globs; none: all
    tenant: str | None = None  # None: everybody's rows
    # Whether it still holds; None: for ever.
    valid: Callable[[], bool] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, access: _Access) -> "Permissions":
        """What somebody may see."""
        key = access.key
        return cls() if key is None else cls(key.tables, key.tenant, access.valid)

    @property
    def ended(self) -> bool:
        """Whether nothing may be shown any more."""
        return self.valid is not None and not self.valid()

    def predicate(self, entities: Entities) -> Test | None:
        """A test of one change; None: every change may be seen."""
        tables = TableAnswers(self.tables).wants if self.tables else None
        return both(tables, self._own(entities))

    def _own(self, entities: Entities) -> Test | None:
        if self.tenant is None:
            return None
        tenant, tenant_of = self.tenant, entities.tenant
        return lambda change: tenant_of(change) == tenant

    def format(self, format: AnyFormat, entities: Entities) -> AnyFormat:
        """A format that shows no more than these permissions allow.

        One that sees single changes is only given those that may be seen. Beyond them, a format
        may show a transaction's other rows, and annotations name the row a transaction is about.
        """
        if isinstance(format, TransactionFormat):
            permitted = self.predicate(entities)
            return format if permitted is None else _Permitted(format, self, entities, permitted)
        if not self.tables and self.tenant is None:
            return format
        if isinstance(format, StreamFormat):
            return _OwnStream(format, entities)
        return _OwnChanges(format, entities)


EVERYTHING = Permissions()


@dataclass(frozen=True)
class _Permitted:
    """Transactions as if they had only the changes that may be seen."""

    format: TransactionFormat
    permissions: Permissions
    entities: Entities = field(compare=False)
    permitted: Test = field(compare=False)

    media_type: ClassVar[str] = "application/json"

    @property
    def name(self) -> str:
        """The name of the format itself."""
        return self.format.name

    def render(self, transaction: Sequence[Change]) -> Sequence[Rendered]:
        """The events of what may be seen."""
        seen = [change for change in transaction if self.permitted(change)]
        if not seen:
            return ()
        # The last change has all that is annotated, and may not be among them.
        seen[-1] = msgspec.structs.replace(seen[-1], transaction=transaction[-1].transaction)
        root = root_of(seen[-1])
        if root is not None and not any(self.entities.is_root(each, root) for each in seen):
            seen = [self.entities.without_root(change) for change in seen]
        return self.format.render(seen)


@dataclass(frozen=True)
class _OwnChanges:
    """Changes whose annotations name no other row: that might be one that may not be seen."""

    format: Format
    entities: Entities = field(compare=False)

    name: ClassVar[str] = "own"
    media_type: ClassVar[str] = "application/json"

    def encode(self, change: Change) -> bytes | None:
        """The change as the format writes it."""
        return self.format.encode(self.entities.without_root(change))


@dataclass(frozen=True)
class _OwnStream:
    """The same for a stream, which also sees changes that it does not show."""

    format: StreamFormat
    entities: Entities = field(compare=False)

    name: ClassVar[str] = "own"
    media_type: ClassVar[str] = "application/json"

    def open(self) -> FormatStream:
        """Begin a stream."""
        return _OwnEvents(self.format.open(), self.entities)

    def begin(self, change: Change) -> int:
        """The first change that the stream must have seen."""
        return self.format.begin(change)


@dataclass(frozen=True)
class _OwnEvents:
    stream: FormatStream
    entities: Entities

    def see(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        if wanted:
            return self.stream.see(self.entities.without_root(change), wanted=True)
        return ()

    def encode(self, change: Change, *, wanted: bool) -> Sequence[bytes]:
        if wanted:
            return self.stream.encode(self.entities.without_root(change), wanted=True)
        return self.stream.encode(_blank(change), wanted=False)


def _blank(change: Change) -> Change:
    """Where a change stands, and nothing of what it is.

    A TRUNCATE stays one: a stream writes it for the tables that it has described.
    """
    transaction = msgspec.structs.replace(change.transaction, metadata=None)
    if change.op is Op.TRUNCATE:
        return msgspec.structs.replace(change, transaction=transaction)
    return msgspec.structs.replace(
        change, op=Op.MESSAGE, key=None, before=None, after=None, transaction=transaction
    )
