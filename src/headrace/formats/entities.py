"""One change alone, as entity events describe it: what filters and permissions go by."""

from collections.abc import Callable
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
            return change.op._value_ in CARRIED and by.fits(
                _EntityChange(change, self._shape(change.table))
            )

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


def root_of(change: Change) -> str | None:
    """The row that the annotation of a change's transaction is about."""
    return _annotation(change.transaction.metadata).root


class _EntityChange:
    """What filters look at; the images are taken apart only where a filter needs them."""

    __slots__ = ("_change", "_shape")

    def __init__(self, change: Change, shape: EntityShape) -> None:
        self._change = change
        self._shape = shape

    @property
    def event_type(self) -> str:
        return EVENT_TYPES[CARRIED[self._change.op._value_]]

    @property
    def entity_type(self) -> str:
        return self._shape.entity.name

    @property
    def trigger(self) -> str:
        annotation = _annotation(self._change.transaction.metadata)
        return _string(b'"%b"' % trigger(annotation, self._change))

    @property
    def tenant_id(self) -> str | None:
        column = self._shape.entity.tenant
        text = EntityRow(self._change, self._shape).text(column) if column else None
        return None if text is None else _string(text)

    @property
    def changed_fields(self) -> tuple[str, ...]:
        row = EntityRow(self._change, self._shape)
        return row.shape.deleted if row.operation == "DELETE" else row.changed()


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
