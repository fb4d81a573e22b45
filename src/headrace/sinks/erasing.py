"""What an erasure asks of sinks: one row's values taken out of what they have stored.

No I/O here; how each sink does it is its own. Nothing of the pipeline runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from ..change.erasure import KeyValues, RowImages, without_old_values, without_values
from ..change.event import BeforeKind, Change, Op, Position, Table, Transaction
from ..errors import DecodeError

if TYPE_CHECKING:
    from ..transforms.rules import Transforms


class ErasedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What an erasure has done to one place, and what it has found there afterwards."""

    place: str
    searched: str = ""  # what was looked through; "": nothing could be
    rewritten: int = 0  # rows, changes or events that have lost their values
    left: tuple[str, ...] = ()  # where values of the row still are, or may be
    notes: tuple[str, ...] = ()  # what else an operator must know
    has_row: bool = False  # it has the row, or what is left of it


@dataclass(frozen=True, kw_only=True)
class ErasedRow:
    """A row whose values are to go, and which of its changes the log knows."""

    table: Table  # its newest version
    key: bytes  # JSON, as the source writes it
    kept: int  # the change whose new values stay; 0: none
    known: bool  # the log has changes of it, so it is known whether the table still has the row
    epochs: Mapping[str, int]  # the logs that sequences may belong to, each up to a sequence
    first: int  # the oldest sequence of the log: of older changes nothing is known
    changes: tuple[Change, ...] = ()  # as they were, in order
    texts: frozenset[str] = frozenset()  # values that are in no other row's changes
    keep_last: bool = False  # the values that it has now may stay, if it is still there

    @cached_property
    def sequences(self) -> frozenset[int]:
        """Those of its changes."""
        return frozenset(change.sequence for change in self.changes)

    @cached_property
    def own(self) -> frozenset[int]:
        """Those of its changes that left it with its key, and not with another."""
        key = KeyValues.of(self.key)
        return frozenset(change.sequence for change in self.changes if key.are_in(change.key))

    @cached_property
    def plain(self) -> frozenset[int]:
        """Those of its changes whose events have no value that must go: the last one, perhaps."""
        return frozenset(
            change.sequence
            for change in self.changes[-1:]
            if change.before_kind is not BeforeKind.FULL
            and (change.after is None or change.sequence == self.kept)
        )

    @cached_property
    def valued(self) -> list[Change]:
        """The changes whose events must go."""
        return [change for change in self.changes if change.sequence not in self.plain]

    def is_change(self, epoch: str | None, sequence: int | None) -> bool:
        """Whether a sequence of a log is that of one of its changes."""
        upto = self.epochs.get(epoch or "", 0)
        return sequence is not None and sequence <= upto and sequence in self.sequences

    def is_own(self, epoch: str | None, sequence: int | None) -> bool:
        """Whether it is that of a change that left the row with its key."""
        return sequence in self.own and self.is_change(epoch, sequence)

    def is_kept(self, epoch: str | None, sequence: int | None) -> bool:
        """Whether it is that of the change whose new values stay."""
        return self.kept > 0 and sequence == self.kept and self.is_change(epoch, sequence)

    def is_plain(self, epoch: str | None, sequence: int | None) -> bool:
        """Whether it is that of a change whose events may stay as they are."""
        return sequence in self.plain and self.is_change(epoch, sequence)

    def key_in(self, transforms: Transforms) -> KeyValues:
        """The key as a sink with these transforms sees it."""
        if transforms.computed(self.table.schema, self.table.name):
            return KeyValues.of(self._computed_key())
        return KeyValues.of(self.shaped(transforms).key or self.key)

    def _computed_key(self) -> bytes:
        """The key as it is written with rows that Spark has computed: by its type alone."""
        # Only here, as below: no pyarrow.
        from ..change.arrow import decode  # noqa: PLC0415
        from ..change.arrow.encode import images  # noqa: PLC0415

        columns = [column for column in self.table.columns if column.key]
        try:
            [key] = images(decode([self.key], columns, connector=self.table.connector))
        except DecodeError:
            return self.key  # then nothing was computed of it either
        return key

    def shaped(self, transforms: Transforms) -> Change:
        """A change of the row, without values, as a sink with these transforms sees it."""
        change = Change(
            op=Op.DELETE,
            table=self.table,
            key=self.key,
            before=self.key,
            before_kind=BeforeKind.KEY,
            after=None,
            changed=None,
            unchanged=(),
            transaction=Transaction("", 0, 0),
            ordinal=1,
            position=Position(),
        )
        if not transforms:
            return change
        # Only here: who has no transforms needs no pyarrow.
        from ..transforms.changes import ShapedChanges  # noqa: PLC0415

        [(found, _)] = ShapedChanges(transforms).each([change])
        return found


def erased_images(images: RowImages, key: KeyValues, *, kept: bool) -> RowImages:
    """The images of a stored change of the row; `kept`: it is the one whose new values stay."""
    return without_old_values(images, key, {}) if kept else without_values(images, key)
