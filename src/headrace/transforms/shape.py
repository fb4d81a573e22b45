"""A transform applied to rows that are columns of Arrow."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa

from ..change.arrow import RESCUED, arrow_schema, decode, rescued_under
from ..change.event import Column
from ..change.path import table_path
from ..errors import ConfigError, DecodeError, TableFailed
from .rules import Mask, Selected, Transforms
from .where import columns_of, conjuncts, passes, uncast_columns

Decoder = Callable[[Sequence[Column], frozenset[str]], pa.Table]
"""Gives some columns of rows, those of the second argument as their text; RESCUED may follow."""


def fitted(
    transforms: Transforms, schema: str, table: str, columns: Sequence[Column], connector: str
) -> Selected | None:
    """The transform for a table with these columns; TableFailed: it does not fit them.

    None: it has none, or one that Spark computes.
    """
    found = transforms.of(schema, table)
    if found is None or found[1].computes:
        return None
    pattern, rule = found
    place = transforms.place(pattern, table_path(schema, table))
    try:
        exact = not set(pattern) & set("*?[")
        selected = Selected.of(rule, columns, exact=exact, place=place)
    except ConfigError as error:
        raise _unfit(place, error) from None
    if rule.where:
        # Some of what does not fit shows only where there is a row.
        columns = arrow_schema(selected.conditions, connector=connector)
        _expect_no_long_number(selected, columns)
        passing(selected, pa.table([pa.nulls(1, each.type) for each in columns], schema=columns))
    return selected


def _expect_no_long_number(selected: Selected, columns: pa.Schema) -> None:
    """Refuse to compare numbers that are stored as text: as text, 9 is more than 10."""
    looked_at = uncast_columns(selected.rule.where)
    for column in selected.conditions:
        is_number = column.type.lower().startswith(("numeric", "decimal"))
        is_text = pa.types.is_string(columns.field(column.name).type)
        if is_number and is_text and column.name.lower() in looked_at:
            raise TableFailed(
                f"{selected.place}: {column.name} is {column.type}, which is text here",
                hint=f"Write cast({column.name} AS double) in `where`.",
            )


def passing(selected: Selected, rows: pa.Table) -> pa.BooleanArray:
    """Which rows fulfil the condition; TableFailed: it cannot be evaluated for them."""
    return _evaluated(selected, selected.rule.where, rows)


def _evaluated(selected: Selected, condition: str, rows: pa.Table) -> pa.BooleanArray:
    try:
        return passes(condition, rows)
    except ConfigError as error:
        raise _unfit(selected.place, error) from None


def _unfit(place: str, error: ConfigError) -> TableFailed:
    hint = error.hint or "Correct the transform (`headrace check` tries it), then reset the sink."
    return TableFailed(f"{place}: {error}", hint=hint)


def result_schema(selected: Selected, connector: str) -> pa.Schema:
    """The columns that a transform leaves."""
    return arrow_schema(selected.columns, as_text=selected.coded, connector=connector)


def shaped(
    selected: Selected, columns: Sequence[Column], as_text: frozenset[str], decoder: Decoder
) -> tuple[pa.Table, pa.BooleanArray | None]:
    """Rows with codes in place of values, and which of them pass; None: all do."""
    if not selected.rule.where:
        return masked(decoder(columns, as_text), selected), None
    names = [column.name for column in columns]
    further = [each for each in selected.conditions if each.name not in names]
    if as_text & {column.name for column in selected.conditions}:
        # The condition means values, where text or a code is to be stored.
        verdict = passing(selected, _conditions(selected, decoder))
        return masked(decoder(columns, as_text), selected), verdict
    rows = decoder([*columns, *further], as_text)
    kept = rows.select(names)
    if RESCUED in rows.column_names[len(names) + len(further) :]:
        # What `where` alone looks at is not to be stored, and neither is its text.
        kept = kept.append_column(
            RESCUED, rescued_under(rows[RESCUED], {name: name for name in names})
        )
    return masked(kept, selected), passing(selected, rows)


def masked(rows: pa.Table, selected: Selected) -> pa.Table:
    """Rows with codes in place of values; the columns to be coded come as text."""
    for name, mask in selected.masks.items():
        at = rows.schema.get_field_index(name)
        if at >= 0:
            rows = rows.set_column(at, rows.schema.field(at), _masked(rows.column(at), mask))
    return rows


def _masked(values: pa.ChunkedArray, mask: Mask | None) -> Any:
    if mask is None:
        return pa.nulls(len(values), values.type)
    texts = values.to_pylist()
    return pa.array([None if text is None else mask.code(text) for text in texts], values.type)


def verdicts(
    selected: Selected,
    images: Sequence[bytes | None],
    absent: Sequence[Collection[str]],
    connector: str,
    *,
    rescue: bool = True,
) -> list[bool | None]:
    """Which images fulfil the condition, each without its absent columns; None: that is not known.

    A part of the condition that is not true decides, whatever the others are. A value that its
    column cannot hold is null to it, or with `rescue` not set a TableFailed.
    """
    found: list[bool | None] = [True] * len(images)

    def decoder(columns: Sequence[Column], _as_text: frozenset[str]) -> pa.Table:
        return decode(images, columns, connector=connector, rescue=rescue)

    rows = _conditions(selected, decoder)
    for part in conjuncts(selected.rule.where):
        names = {name.lower() for name in columns_of(part)}
        passed = _evaluated(selected, part, rows).to_pylist()
        for at, (verdict, lacks) in enumerate(zip(passed, absent, strict=True)):
            if names & {name.lower() for name in lacks}:
                found[at] = None if found[at] else found[at]
            elif not verdict:
                found[at] = False
    return found


def _conditions(selected: Selected, decoder: Decoder) -> pa.Table:
    """What the condition looks at."""
    try:
        return decoder(selected.conditions, frozenset())
    except DecodeError as error:
        hint = "`where` cannot look at a column with such values: choose another one."
        raise TableFailed(f"{selected.place}: {error}", hint=hint) from None
