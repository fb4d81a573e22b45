"""How the columns of a Delta table follow those of its source, and what becomes of its rows.

A column is known by its number where the source has one: a renamed column keeps its values, and one
that was dropped and added again does not get those of its namesake. What the database has put into
rows that were there when a column was added is put into the rows here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...change.arrow import RESCUED, decode, rescued_of, widened
from ...change.columns import carried_columns
from ...change.event import Column
from ...errors import DecodeError, TableFailed
from ...transforms.rules import Selected
from ...transforms.shape import masked
from ..lake.plan import CURRENT


class NotedColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of the source that a Delta table has, as it is noted beside its schema."""

    name: str
    number: int = 0


DROPPED = "dropped"  # noted in place of columns: the next ones are those of another table

_noted = msgspec.json.Decoder(tuple[NotedColumn, ...]).decode


def column_note(columns: Sequence[Column]) -> str:
    """What a Delta table notes of the columns that its rows have; "": nothing but their names."""
    if not any(column.number for column in columns):
        return ""
    return msgspec.json.encode([NotedColumn(each.name, each.number) for each in columns]).decode()


def key_note(columns: Sequence[Column]) -> str:
    """The names of the key as a property of a Delta table."""
    return msgspec.json.encode([column.name for column in columns if column.key]).decode()


def noted_columns(note: str, names: Sequence[str]) -> tuple[Column, ...]:
    """The source's columns behind a note; without one, every column of the table may be one."""
    known = tuple(map(NotedColumn, names)) if note in ("", DROPPED) else _noted(note)
    return tuple(Column(each.name, "", number=each.number) for each in known)


@dataclass(frozen=True, slots=True)
class Carry:
    """What rows with earlier columns become."""

    renamed: Mapping[str, str] = field(default_factory=dict)  # a column: what it was called
    filled: Mapping[str, pa.Scalar] = field(default_factory=dict)  # new columns: what rows get
    rescued: Mapping[str, str] = field(default_factory=dict)  # … and what these could not hold

    def __bool__(self) -> bool:
        return bool(self.renamed or self.filled)

    def of(self, rows: pa.Table) -> pa.Table:
        """The rows under the names of the later columns."""
        if not self:
            return rows
        was = set(self.renamed.values())
        kept = {
            name: rows[name]
            for name in rows.column_names
            if name not in was and name not in self.renamed and name not in self.filled
        }
        kept |= {name: rows[old] for name, old in self.renamed.items() if old in rows.column_names}
        for name, value in self.filled.items():
            kept[name] = self._fill(rows, value)
        return pa.table(kept)

    def _fill(self, rows: pa.Table, value: pa.Scalar) -> pa.Array:
        """The value in rows that are there; what is past did not have the column."""
        filled = pa.repeat(value, rows.num_rows)
        if CURRENT not in rows.column_names:
            return filled
        return pc.if_else(rows[CURRENT], filled, pa.scalar(None, value.type))


class InitialDefaults(NamedTuple):
    """What rows that were there have in new columns."""

    values: Mapping[str, pa.Scalar] = {}
    rescued: Mapping[str, str] = {}  # texts that their columns cannot hold: null among the values


class Keep(NamedTuple):
    """What a Delta table keeps of columns that the source has not any more."""

    lost: bool = False  # it keeps them
    # Current rows are about to be replaced: earlier values of another type are past, and lost too.
    set_aside: bool = False


@dataclass(frozen=True, slots=True)
class Evolution:
    """The columns that follow, and what that means for the files."""

    schema: pa.Schema
    carry: Carry
    rewrites: bool  # whether files must be written anew; else new columns read as null


def evolved(
    known: pa.Schema,
    wanted: pa.Schema,
    before: Sequence[Column],
    after: Sequence[Column],
    *,
    defaults: InitialDefaults,
    keep: Keep,
) -> Evolution:
    """How a Delta table goes over from the columns that it has to those of its source.

    `defaults` are those of new columns.
    """
    given, texts = defaults
    origins = {
        column.name: was.name if was and was.name in known.names else None
        for column, was in carried_columns(before, after)
    }
    if keep.set_aside:
        for name, was in list(origins.items()):
            if was and not _holds(wanted.field(name).type, known.field(was).type):
                origins[name] = None
    renamed = {name: was for name, was in origins.items() if was and was != name}
    # What has the name of a column that was dropped, and none of its values.
    displaced = [
        name
        for name, was in origins.items()
        if was is None and name in known.names and name not in renamed.values()
    ]
    widens = _widened(known, wanted, origins)
    taken = {was for was in origins.values() if was}
    lost = [
        each
        for each in known
        if each.name not in taken and (each.name not in wanted.names or each.name in displaced)
    ]
    filled = {
        # An empty list and False count as false.
        name: given[name] if name in given else pa.scalar(None, wanted.field(name).type)
        for name, was in origins.items()
        if was is None and (name in given or name in displaced or name in renamed.values())
    }
    if keep.lost:
        # Names that differ in their case alone are the same one for Delta.
        named = _small_names(wanted)
        hidden = [e for e in lost if e.name in displaced or e.name.lower() in named]
        aside = {_aside(each.name, wanted, known): each for each in hidden}
        renamed |= {name: each.name for name, each in aside.items()}
        kept = [each for each in lost if each not in hidden]
        kept += [each.with_name(name) for name, each in aside.items()]
        schema = pa.schema([*wanted, *kept])
        carry = Carry(renamed, filled, texts)
        return Evolution(schema, carry, bool(renamed or filled or widens))
    rewrites = bool(renamed or filled or widens or lost)
    return Evolution(wanted, Carry(renamed, filled, texts), rewrites)


def _widened(known: pa.Schema, wanted: pa.Schema, origins: Mapping[str, str | None]) -> list[str]:
    """The columns that get a wider type; TableFailed: one gets another."""
    found = []
    for each in wanted:
        origin = origins.get(each.name, each.name)
        if origin is None or origin not in known.names or known.field(origin).type == each.type:
            continue
        was = known.field(origin).type
        if not _holds(each.type, was):
            raise TableFailed(
                f"column {each.name} was {was} and is {each.type} now, "
                "and its earlier values are not known in the new type"
            )
        found.append(each.name)
    return found


def _holds(now: pa.DataType, was: pa.DataType) -> bool:
    return now == was or widened(was, now)


def _aside(name: str, wanted: pa.Schema, known: pa.Schema) -> str:
    """A name for a column of the past whose own name another one has now."""
    taken = _small_names(wanted) | _small_names(known)
    names = (f"{name}_dropped{number or ''}" for number in range(len(taken) + 1))
    return next(each for each in names if each.lower() not in taken)


def _small_names(schema: pa.Schema) -> set[str]:
    return {name.lower() for name in schema.names}


def initial_defaults(
    columns: Sequence[Column],
    texts: frozenset[str],
    shape: Selected | None,
    connector: str,
    *,
    rescue: bool,
) -> InitialDefaults:
    """The initial defaults of columns as a Delta table stores them, those of `texts` as text.

    Without `rescue`, one that its column cannot hold stops the table.
    """
    given = [each for each in columns if each.initial_default]
    if not given:
        return InitialDefaults()
    image = msgspec.json.encode(
        {each.name: msgspec.Raw(each.initial_default.encode()) for each in given}
    )
    try:
        row = decode([image], given, connector=connector, as_text=texts, rescue=rescue)
    except DecodeError as error:
        raise TableFailed(f"the default of a new column: {error}") from None
    row = masked(row, shape) if shape else row
    values = {each.name: row[each.name][0] for each in given}
    unfit = rescue and RESCUED in row.column_names
    return InitialDefaults(values, rescued_of(row[RESCUED][0].as_py()) if unfit else {})


def touched(before: Sequence[Column], after: Sequence[Column]) -> str:
    """A later column that has other values in the rows that were there; "": none has.

    What was computed or chosen by these values does not follow them by itself.
    """
    names = {column.name for column in before}
    for column, was in carried_columns(before, after):
        displaced = was is None and (bool(column.initial_default) or column.name in names)
        if displaced or (was is not None and was.name != column.name):
            return column.name
    return ""


def grown(columns: Sequence[Column], later: Sequence[Column]) -> bool:
    """Whether later columns are the same, or these and others that rows before them lack.

    Then changes with either can be read with the later ones: no column was renamed, dropped or
    turned into another type, the key is the same, and no new column has a value in earlier rows.
    """
    pairs = carried_columns(columns, later)
    kept = [was for _, was in pairs if was is not None]
    return (
        len(kept) == len(columns)
        and all(
            (was.name, was.type, was.key) == (column.name, column.type, column.key)
            if was is not None
            else not (column.key or column.initial_default)
            for column, was in pairs
        )
        and [each.name for each in kept if each.key] == [each.name for each in columns if each.key]
    )


def with_first_defaults(
    columns: Sequence[Column], versions: Sequence[Sequence[Column]]
) -> tuple[Column, ...]:
    """Columns with the initial defaults that the first of some versions had.

    VACUUM FULL writes them into the rows, and the server forgets them.
    """
    first: dict[int, str] = {}
    for column in (column for version in versions for column in version):
        if column.number and column.initial_default:
            first.setdefault(column.number, column.initial_default)
    return tuple(
        msgspec.structs.replace(each, initial_default=first.get(each.number, each.initial_default))
        for each in columns
    )
