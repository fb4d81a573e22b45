"""How a history is partitioned: `day(commit_time)` and its like, as Iceberg's transforms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.update.spec import UpdateSpec
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)

from ...errors import ConfigError, nearest
from .columns import fixed_columns, iceberg_type, partition_sources

AnyTransform: TypeAlias = Transform[Any, Any]

_TIMES: dict[str, Callable[[], AnyTransform]] = {
    "year": YearTransform,
    "month": MonthTransform,
    "day": DayTransform,
    "hour": HourTransform,
}
_SIZES: dict[str, Callable[[int], AnyTransform]] = {
    "bucket": BucketTransform,
    "truncate": TruncateTransform,
}
_CALL = re.compile(r"(?P<name>\w+)\(\s*(?:(?P<size>[1-9]\d{0,8})\s*,\s*)?(?P<column>\w+)\s*\)")


class PartitionBy(NamedTuple):
    """One field of a partition spec."""

    column: str
    transform: AnyTransform

    @property
    def name(self) -> str:
        """What Iceberg's own libraries call the field."""
        kind = str(self.transform).partition("[")[0]
        return self.column if kind == "identity" else f"{self.column}_{kind}"


def partition_fields(texts: Sequence[str]) -> list[PartitionBy]:
    """What a config means by its `partition_by`.

    >>> partition_fields(["day(commit_time)", "bucket(16, key)"])[1].name
    'key_bucket'
    """
    fields = [_field(text) for text in texts]
    for at, each in enumerate(fields):
        if each.column in [other.column for other in fields[:at]]:
            raise ConfigError(f"partition_by: {each.column} is there twice; keep the finer one")
    return fields


def _field(text: str) -> PartitionBy:
    call = _CALL.fullmatch(text.strip())
    column = call["column"] if call else text.strip()
    if column not in partition_sources():
        raise ConfigError(
            f"partition_by: {text}: a history has no such column"
            f"{nearest(column, partition_sources())}"
        )
    transform = _transform(text, call["name"], call["size"]) if call else IdentityTransform()
    kind = iceberg_type(fixed_columns().field(column).type)
    if not transform.can_transform(kind):
        raise ConfigError(
            f"partition_by: {text}: {column} is {kind}, which {transform} cannot take"
        )
    return PartitionBy(column, transform)


def _transform(text: str, name: str, size: str | None) -> AnyTransform:
    if name in _TIMES and size is None:
        return _TIMES[name]()
    if name in _SIZES and size is not None:
        return _SIZES[name](int(size))
    raise ConfigError(
        f"partition_by: {text} is none of Iceberg's transforms; write a column, or as in "
        "day(commit_time), bucket(16, key), truncate(4, table)"
    )


def repartition(
    update: UpdateSpec, spec: PartitionSpec, schema: Schema, wanted: Sequence[PartitionBy]
) -> bool:
    """Partition what is written from now on so; files that are there stay as they are.

    Returns whether that is a change.
    """
    known = {
        (schema.find_column_name(each.source_id), each.transform): each.name
        for each in spec.fields
        if not isinstance(each.transform, VoidTransform)
    }
    new = [each for each in wanted if tuple(each) not in known]
    old = [name for key, name in known.items() if key not in [tuple(each) for each in wanted]]
    for name in old:
        update.remove_field(name)
    for each in new:
        update.add_field(each.column, each.transform, each.name)
    return bool(old or new)
