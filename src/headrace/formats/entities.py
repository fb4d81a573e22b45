"""One change alone, as entity events describe it: what filters and permissions go by."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from ..change.event import Change, Op
from ..model import Model
from ._annotation import Annotation, as_text, read
from ._rows import CARRIED, EntityRow, EntityShape
from ._tables import PerTable
from .entity import EVENT_TYPES, EntityFilter, trigger
from .facts import Facts

_columns = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_string = msgspec.json.Decoder(str).decode

_TENANTS_KEPT = 16_384

Test = Callable[[Change], bool]


class Entities:
    """The changes of one log as the model sees them."""

    def __init__(self, model: Model) -> None:
        facts = Facts()
        self._tenants: dict[int, str | None] = {}  # by sequence: many readers ask the same
        self._shape: PerTable[EntityShape] = PerTable(
            lambda table: EntityShape(table, model, facts)
        )

    def wanted(self, by: EntityFilter) -> Test:
        """A test of one change; what happens to no row is never wanted."""

        def test(change: Change) -> bool:
            operation = CARRIED.get(change.op._value_)
            if operation is None or not fnmatchcase(EVENT_TYPES[operation], by.event_type):
                return False
            shape = self._shape(change.table)
            return by.entity_type in (None, shape.entity.name) and self._fits(by, change, shape)

        return test

    def tenant(self, change: Change) -> str | None:
        """Whose row was changed; None: nobody's, several tenants', or it cannot be known.

        Every image must say the same. Where a row's key was replaced, the old row must say it
        too: it might have been another tenant's.
        """
        try:
            return self._tenants[change.sequence]
        except KeyError:
            tenant = self._found_tenant(change)
        if len(self._tenants) >= _TENANTS_KEPT:
            self._tenants.clear()
        if change.sequence:
            self._tenants[change.sequence] = tenant
        return tenant

    def _found_tenant(self, change: Change) -> str | None:
        column = self._shape(change.table).entity.tenant
        if column is None or change.op._value_ not in CARRIED:
            return None
        read = _reader(column)
        images = (change.after, change.before, change.key)
        values = {raw for image in images if image is not None and (raw := read(image))}
        # The same value may be written in two ways, "a" and "\u0061".
        texts = {None if raw == b"null" else _string(as_text(raw)) for raw in values}
        if len(texts) != 1 or _replaced_unseen(change, read):
            return None
        return texts.pop()

    def without_root(self, change: Change) -> Change:
        """The same, not naming the row that its transaction is about, unless it is this row."""
        metadata, root = change.transaction.metadata, root_of(change)
        if metadata is None or root is None or self.is_root(change, root):
            return change
        left = {name: raw for name, raw in _columns(metadata).items() if name != "root"}
        transaction = msgspec.structs.replace(
            change.transaction, metadata=msgspec.json.encode(left) if left else None
        )
        return msgspec.structs.replace(change, transaction=transaction)

    def is_root(self, change: Change, root: str) -> bool:
        """Whether a root such as `User:7` means the row that was changed."""
        if change.op._value_ not in CARRIED:
            return False
        name, _, id = root.partition(":")
        return EntityRow(change, self._shape(change.table)).is_named(name, id)

    def _fits(self, by: EntityFilter, change: Change, shape: EntityShape) -> bool:
        if by.trigger != "*":
            made_by = trigger(_annotation(change.transaction.metadata), change)
            if not fnmatchcase(_string(b'"%b"' % made_by), by.trigger):
                return False
        if by.tenant_id is None and not by.changed_fields:
            return True
        row = EntityRow(change, shape)  # only now: it takes the images apart
        if by.tenant_id is not None and _tenant(row) != by.tenant_id:
            return False
        return not by.changed_fields or not set(by.changed_fields).isdisjoint(_changed(row))


def root_of(change: Change) -> str | None:
    """The row that the annotation of a change's transaction is about."""
    return _annotation(change.transaction.metadata).root


def _changed(row: EntityRow) -> tuple[str, ...]:
    return row.shape.deleted if row.operation == "DELETE" else row.changed()


def _tenant(row: EntityRow) -> str | None:
    column = row.shape.entity.tenant
    text = row.text(column) if column else None
    return None if text is None else _string(text)


# Neighbouring changes share their annotation.
@lru_cache(maxsize=256)
def _annotation(metadata: bytes | None) -> Annotation:
    return read(metadata)


@lru_cache(maxsize=1000)
def _reader(column: str) -> Callable[[bytes], bytes]:
    """What reads a column of an image, as JSON; nothing where the image lacks it."""
    value = msgspec.field(name=column, default=msgspec.UNSET)
    try:
        row = msgspec.defstruct("Row", [("value", msgspec.Raw | msgspec.UnsetType, value)])
    except ValueError:  # no field may be called so
        return lambda image: bytes(_columns(image).get(column, b""))
    decode = msgspec.json.Decoder(row).decode

    def read(image: bytes) -> bytes:
        found: msgspec.Raw | msgspec.UnsetType = decode(image).value  # type: ignore[attr-defined]
        return b"" if found is msgspec.UNSET else bytes(found)

    return read


def _replaced_unseen(change: Change, read: Callable[[bytes], bytes]) -> bool:
    """Whether the old image names another row than the new one, and not whose that was."""
    if change.op is not Op.UPDATE or not change.before or not change.key or read(change.before):
        return False
    key, old = _columns(change.key), _columns(change.before)
    return any(name in old and old[name] != raw for name, raw in key.items())
