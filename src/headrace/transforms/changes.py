"""A transform applied to changes, for sinks that hand changes on.

INSERT, READ   passes, or is not there
UPDATE         a row that no longer fulfils `where` is deleted; one that does so from now on is
               inserted, where the source sends old rows (else it stays an UPDATE)
DELETE         passes, unless it is known that the row was never there
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..change.arrow import decode
from ..change.event import BeforeKind, Change, Column, Op, Table
from ..errors import TableFailed
from .rules import Selected, Transforms, coded_column, described, whole_rows_hint
from .shape import fitted, masked, verdicts

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode
_ROW_OPS = frozenset((Op.INSERT, Op.READ, Op.UPDATE, Op.DELETE))


@dataclass(frozen=True, slots=True)
class ShapedChanges:
    """Makes of changes what a sink may see of them; can be pickled."""

    transforms: Transforms
    _known: dict[Table, "_ShapedTable | None"] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __call__(self, changes: Sequence[Change]) -> list[Change]:
        """The same changes in the same order, without those that are not to be seen."""
        return [change for change, passes in self.each(changes) if passes]

    def each(self, changes: Sequence[Change]) -> list[tuple[Change, bool]]:
        """What becomes of each change, and whether it is to be seen."""
        found = [(change, True) for change in changes]
        by_table: dict[int, list[int]] = defaultdict(list)
        for at, change in enumerate(changes):
            by_table[id(change.table)].append(at)
        for places in by_table.values():
            shaped = self._of(changes[places[0]].table)
            if shaped is not None:
                some = [changes[at] for at in places]
                for at, pair in zip(places, shaped.changes(some), strict=True):
                    found[at] = pair
        return found

    def table(self, table: Table) -> Table:
        """A table as the sink sees it."""
        shaped = self._of(table)
        return shaped.table if shaped else table

    def keeps_key(self, table: Table) -> bool:
        """Whether the rows of a table have the keys that they have in the source."""
        shaped = self._of(table)
        return shaped is None or not shaped.selected.masks.keys() & set(table.key)

    def _of(self, table: Table) -> "_ShapedTable | None":
        if table not in self._known:
            selected = fitted(
                self.transforms, table.schema, table.name, table.columns, table.connector
            )
            self._known[table] = _ShapedTable.of(table, selected) if selected else None
        return self._known[table]

    def __reduce__(self) -> Any:
        return ShapedChanges, (self.transforms,)


@dataclass(frozen=True, slots=True)
class _ShapedTable:
    """One version of a table, and what is made of its changes."""

    source: Table
    table: Table  # as the sink sees it
    selected: Selected
    kept: frozenset[str]

    @classmethod
    def of(cls, table: Table, selected: Selected) -> "_ShapedTable":
        columns = tuple(_declared(column, selected) for column in selected.columns)
        kept = frozenset(column.name for column in columns)
        plain = kept - set(selected.masks)
        references = tuple(each for each in table.references if plain >= set(each.columns))
        shaped = msgspec.structs.replace(table, columns=columns, references=references)
        return cls(table, shaped, selected, kept)

    def changes(self, changes: Sequence[Change]) -> Iterator[tuple[Change, bool]]:
        """What becomes of each, and whether it is to be seen."""
        seen: list[Change | None] = list(changes)
        if self.selected.rule.where:
            after = self._verdicts(
                changes,
                [change.after for change in changes],
                [change.unchanged for change in changes],
            )
            full = [
                change.before if change.before_kind is BeforeKind.FULL else None
                for change in changes
            ]
            before = self._verdicts(changes, full, [()] * len(changes))
            seen = list(map(_passed, changes, after, before))
        left = [found or change for found, change in zip(seen, changes, strict=True)]
        images = {name: self._images(left, name) for name in ("key", "before", "after")}
        for at, change in enumerate(left):
            own = {name: of[at] for name, of in images.items()}
            yield self._shaped(change, own), seen[at] is not None

    def _verdicts(
        self,
        changes: Sequence[Change],
        images: Sequence[bytes | None],
        absent: Sequence[Sequence[str]],
    ) -> list[bool | None]:
        """Whether each image, which lacks these columns, fulfils the condition; None: no image."""
        known = [
            image if change.op in _ROW_OPS else None
            for image, change in zip(images, changes, strict=True)
        ]
        found = verdicts(self.selected, known, absent, self.source.connector)
        for change, image, verdict in zip(changes, known, found, strict=True):
            if image is not None and verdict is None:
                lacking = ", ".join(change.unchanged)
                raise TableFailed(
                    f"{self.selected.place}: change {change.sequence} comes without {lacking}, "
                    "which where looks at",
                    hint=f"The way out: {whole_rows_hint(self.source.connector)}.",
                )
        return [verdict if image else None for image, verdict in zip(known, found, strict=True)]

    def _images(self, changes: Sequence[Change], name: str) -> list[bytes | None]:
        """Images of rows with the columns that are kept, and codes in place of values."""
        images = [getattr(each, name) if each.op in _ROW_OPS else None for each in changes]
        columns = [each for each in self.selected.columns if each.name in self.selected.masks]
        codes = self._codes(images, columns) if columns else {}
        return [
            None
            if image is None
            else self._rewritten(_image(image), {n: c[at] for n, c in codes.items()})
            for at, image in enumerate(images)
        ]

    def _codes(
        self, images: Sequence[bytes | None], columns: Sequence[Column]
    ) -> Mapping[str, list[str | None]]:
        names = frozenset(column.name for column in columns)
        rows = decode(images, columns, connector=self.source.connector, as_text=names)
        coded = masked(rows, self.selected)
        return {name: coded[name].to_pylist() for name in coded.column_names}

    def _rewritten(self, image: dict[str, msgspec.Raw], codes: Mapping[str, str | None]) -> bytes:
        shown: dict[str, Any] = {n: value for n, value in image.items() if n in self.kept}
        shown.update({name: code for name, code in codes.items() if name in shown})
        return _text(shown)

    def _shaped(self, change: Change, images: Mapping[str, bytes | None]) -> Change:
        if change.op not in _ROW_OPS:
            return self._described(change)
        changed = change.changed and tuple(each for each in change.changed if each in self.kept)
        unchanged = tuple(each for each in change.unchanged if each in self.kept)
        return msgspec.structs.replace(
            change, table=self.table, changed=changed, unchanged=unchanged, **images
        )

    def _described(self, change: Change) -> Change:
        after = change.after and described(change.after, self.table)
        return msgspec.structs.replace(change, table=self.table, after=after)


def _declared(column: Column, selected: Selected) -> Column:
    if column.name not in selected.coded:
        return column
    return coded_column(column, selected.masks[column.name])


def _passed(change: Change, after: bool | None, before: bool | None) -> Change | None:
    """A change as it is for those who see only the rows that pass."""
    if change.op not in _ROW_OPS:
        return change
    if change.op is Op.DELETE:
        return None if before is False else change
    if after:
        if change.op is Op.UPDATE and before is False:
            return msgspec.structs.replace(
                change, op=Op.INSERT, before=None, before_kind=BeforeKind.NONE, changed=None
            )
        return change
    if change.op is not Op.UPDATE or before is False:
        return None
    return _left(change)


def _left(change: Change) -> Change:
    """The DELETE of a row that is not to be seen any more, by the key that it had."""
    key = change.key
    if change.before is not None and key is not None:
        old, names = _image(change.before), _image(key)
        if all(name in old for name in names):
            key = _text({name: old[name] for name in names})
    left = msgspec.structs.replace(
        change, op=Op.DELETE, key=key, after=None, changed=None, unchanged=()
    )
    if left.before is None and key is not None:
        left = msgspec.structs.replace(left, before=key, before_kind=BeforeKind.KEY)
    return left
