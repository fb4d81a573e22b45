"""`where`: a condition in SQL, evaluated by Arrow for many rows at once.

The condition is Spark's SQL, parsed by sqlglot. What a row is worth must follow from the row alone,
so nothing here knows the time or chance. What is not understood is refused, with its text.
"""

import functools
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from ..errors import ConfigError

Values = Any  # an Array, a ChunkedArray, or a Scalar that stands for all rows

_compute: Any = pc  # whose functions are made when it is imported, so that mypy knows none
_MOST_TEXT = 10_000  # characters
_MOST_WHOLE = 2**63


def parse(text: str) -> exp.Expr:
    """The condition; ConfigError: it is none, or has something that is not understood."""
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"a condition has at most {_MOST_TEXT:,} characters")
    condition = _parsed(text)
    for node in condition.walk():
        # What a rule does not read may change the meaning: trim(LEADING …), other.column.
        unread = {name for name, value in node.args.items() if value} - _READ
        if type(node) not in _UNDERSTOOD or (unread and not isinstance(node, exp.DataType)):
            _refuse(node)
        if isinstance(node, exp.RegexpLike) and isinstance(node.expression, exp.Literal):
            _expect_pattern(node.expression.this)
    return condition


def _expect_pattern(pattern: str) -> None:
    try:
        _compute.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowException:
        raise ConfigError(f"{pattern!r} is no regular expression of RE2") from None


@lru_cache(maxsize=1000)
def _parsed(text: str) -> exp.Expr:
    try:
        found = sqlglot.parse(text, dialect="spark")
    except (sqlglot.errors.SqlglotError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is nested too deeply"
        raise ConfigError(f"{text!r} is no condition: {reason}") from None
    if len(found) != 1 or found[0] is None:
        raise ConfigError(f"{text!r} is not one condition")
    return found[0]


def conjuncts(text: str) -> list[str]:
    """The conditions that must all be fulfilled; one that fails decides."""
    condition = parse(text)
    parts = condition.flatten() if isinstance(condition, exp.And) else [condition]
    return [part.sql(dialect="spark") for part in parts]


def columns_of(text: str) -> tuple[str, ...]:
    """The columns that a condition looks at, as it spells them."""
    return tuple(dict.fromkeys(column.name for column in parse(text).find_all(exp.Column)))


def uncast_columns(text: str) -> set[str]:
    """The columns, in small letters, whose values are looked at as they are, without a cast."""
    found = set()
    for column in parse(text).find_all(exp.Column):
        above = column.parent
        while isinstance(above, exp.Paren):
            above = above.parent
        if not isinstance(above, exp.Is) and not column.find_ancestor(exp.Cast, exp.TryCast):
            found.add(column.name.lower())
    return found


def passes(text: str, rows: pa.Table) -> pa.BooleanArray:
    """Which rows fulfil a condition; one that is neither true nor false (null) does not."""
    found = _evaluated(parse(text), rows)
    if not pa.types.is_boolean(found.type):
        raise ConfigError(f"{text!r} is {found.type}, and must be true or false")
    verdict = _compute.fill_null(found, False)
    if isinstance(verdict, pa.Scalar):
        return pa.repeat(verdict, rows.num_rows)
    return verdict.combine_chunks() if isinstance(verdict, pa.ChunkedArray) else verdict


def _evaluated(node: exp.Expr, rows: pa.Table) -> Values:
    try:
        return _value(node, rows)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError):
        # Its own text may show a value.
        types = ", ".join(_types(node, rows))
        raise ConfigError(
            f"{node.sql(dialect='spark')!r} cannot be evaluated{' where ' if types else ''}{types}"
        ) from None


def _types(node: exp.Expr, rows: pa.Table) -> Iterator[str]:
    for name in dict.fromkeys(column.name for column in node.find_all(exp.Column)):
        yield f"{name} is {rows.column(_found(name, rows)).type}"


def _value(node: Any, rows: pa.Table) -> Values:
    return _RULES[type(node)](node, rows)


def _number(text: str) -> pa.Scalar:
    exact = Decimal(text)
    if exact == exact.to_integral_value() and abs(exact) < _MOST_WHOLE:
        return pa.scalar(int(exact), pa.int64())
    digits = len(exact.as_tuple().digits)
    return pa.scalar(float(text)) if "e" in text.lower() or digits > 38 else pa.scalar(exact)


def _found(name: str, rows: pa.Table) -> str:
    """The column that a condition means; as in Spark, capitals do not count."""
    if name in rows.column_names:
        return name
    same = [each for each in rows.column_names if each.lower() == name.lower()]
    if len(same) != 1:
        raise ConfigError(f"there is no column {name}; there are: {', '.join(rows.column_names)}")
    found: str = same[0]
    return found


def _compare(function: str, left: Any, right: Any, rows: pa.Table) -> Values:
    one, other = _value(left, rows), _value(right, rows)
    one, other = _alike(one, other, left), _alike(other, one, right)
    if pa.types.is_timestamp(one.type) and pa.types.is_timestamp(other.type):
        one, other = _zoned(one), _zoned(other)
    return getattr(_compute, function)(one, other)


def _alike(value: Values, other: Values, node: Any) -> Values:
    """A literal as the type of what it is compared with: '2026-01-31' as a date."""
    literal = isinstance(node, exp.Literal | exp.Null)
    if not literal or value.type == other.type:
        return value
    if isinstance(node, exp.Null):
        return pa.scalar(None, other.type)
    if node.is_string:
        return _cast(value, other.type, literal=node)
    # As Spark and databases do: 0.1 is not what a column of 32 bits has in its place. For others
    # Arrow finds a type.
    return value.cast(pa.float64(), safe=False) if pa.types.is_floating(other.type) else value


def _zoned(value: Values) -> Values:
    """A time without a zone as one in UTC, so that both kinds can be compared."""
    return value if value.type.tz else value.cast(pa.timestamp(value.type.unit, tz="UTC"))


def _cast(value: Values, wanted: pa.DataType, *, literal: Any) -> Values:
    if isinstance(value, pa.Scalar) and value.is_valid and pa.types.is_string(value.type):
        text = value.as_py()
        try:
            if pa.types.is_timestamp(wanted):
                moment = datetime.fromisoformat(text)
                naive = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
                given = naive if wanted.tz else naive.astimezone(UTC).replace(tzinfo=None)
                return pa.scalar(given, wanted)
            if pa.types.is_date(wanted):
                return pa.scalar(date.fromisoformat(text), wanted)
            if pa.types.is_decimal(wanted):
                return pa.scalar(_finite(text))
        except (ValueError, ArithmeticError):
            shown = literal.sql(dialect="spark")
            raise ConfigError(f"{shown} is no valid {wanted}") from None
    plain = pa.types.is_integer(value.type) or pa.types.is_string(value.type)
    if pa.types.is_string(wanted) and not (plain or pa.types.is_date(value.type)):
        raise ConfigError(f"{value.type} as text is written in more than one way")
    return value.cast(wanted)


def _finite(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise ValueError(text)
    return value


def _is(node: exp.Is, rows: pa.Table) -> Values:
    value, wanted = _value(node.this, rows), node.expression
    if isinstance(wanted, exp.Null):
        return _compute.is_null(value)
    if not isinstance(wanted, exp.Boolean):
        _refuse(node)
    is_so = _compute.fill_null(value, not wanted.this)
    return is_so if wanted.this else _compute.invert(is_so)


def _in(node: exp.In, rows: pa.Table) -> Values:
    if not node.expressions:
        _refuse(node)
    found: Values = None
    for each in node.expressions:
        equal = _compare("equal", node.this, each, rows)
        found = equal if found is None else _compute.or_kleene(found, equal)
    return found


def _like(node: Any, rows: pa.Table) -> Values:
    if not isinstance(node.expression, exp.Literal) or not node.expression.is_string:
        _refuse(node)
    value, pattern = _value(node.this, rows), node.expression.this
    if isinstance(node, exp.RegexpLike):
        found = _compute.match_substring_regex(value, pattern)
    else:
        found = _compute.match_like(value, pattern, ignore_case=isinstance(node, exp.ILike))
    return _compute.invert(found) if node.args.get("negate") else found


_TYPES: dict[Any, Callable[[], pa.DataType]] = {
    exp.DataType.Type.DATE: pa.date32,
    exp.DataType.Type.TIMESTAMP: lambda: pa.timestamp("us", tz="UTC"),
    exp.DataType.Type.TIMESTAMPTZ: lambda: pa.timestamp("us", tz="UTC"),
    exp.DataType.Type.TIMESTAMPNTZ: lambda: pa.timestamp("us"),
    exp.DataType.Type.INT: pa.int32,
    exp.DataType.Type.BIGINT: pa.int64,
    exp.DataType.Type.DOUBLE: pa.float64,
    exp.DataType.Type.FLOAT: pa.float32,
    exp.DataType.Type.BOOLEAN: pa.bool_,
    exp.DataType.Type.TEXT: pa.string,
    exp.DataType.Type.VARCHAR: pa.string,
}


def _type(wanted: exp.DataType) -> pa.DataType:
    if wanted.this not in _TYPES or wanted.expressions:
        _refuse(wanted)
    return _TYPES[wanted.this]()


def _refuse(node: Any) -> NoReturn:
    raise ConfigError(
        f"{node.sql(dialect='spark')!r} is not understood in a condition",
        hint="docs/transforms.md lists what is.",
    )


def _between(node: exp.Between, rows: pa.Table) -> Values:
    return _compute.and_kleene(
        _compare("greater_equal", node.this, node.args["low"], rows),
        _compare("less_equal", node.this, node.args["high"], rows),
    )


def _coalesce(node: exp.Coalesce, rows: pa.Table) -> Values:
    return _compute.coalesce(*(_value(each, rows) for each in (node.this, *node.expressions)))


def _comparison(function: str) -> "_Rule":
    return lambda node, rows: _compare(function, node.this, node.expression, rows)


def _operator(function: str) -> "_Rule":
    of = getattr(_compute, function)
    return lambda node, rows: of(_value(node.this, rows), _value(node.expression, rows))


def _chain(function: str) -> "_Rule":
    """Of a long chain, which is nested in itself, one after the other."""
    of = getattr(_compute, function)
    return lambda node, rows: functools.reduce(
        of, (_value(part, rows) for part in node.flatten(unnest=False))
    )


def _function(function: str) -> "_Rule":
    of = getattr(_compute, function)
    return lambda node, rows: of(_value(node.this, rows))


_Rule = Callable[[Any, pa.Table], Values]
_RULES: dict[type, _Rule] = {
    exp.Paren: lambda node, rows: _value(node.this, rows),
    exp.Column: lambda node, rows: rows.column(_found(node.name, rows)),
    exp.Literal: lambda node, _: pa.scalar(node.this) if node.is_string else _number(node.this),
    exp.Boolean: lambda node, _: pa.scalar(bool(node.this)),
    exp.Null: lambda _, __: pa.scalar(None, pa.bool_()),
    exp.EQ: _comparison("equal"),
    exp.NEQ: _comparison("not_equal"),
    exp.GT: _comparison("greater"),
    exp.GTE: _comparison("greater_equal"),
    exp.LT: _comparison("less"),
    exp.LTE: _comparison("less_equal"),
    exp.And: _chain("and_kleene"),
    exp.Or: _chain("or_kleene"),
    exp.Add: _operator("add_checked"),
    exp.Sub: _operator("subtract_checked"),
    exp.Mul: _operator("multiply_checked"),
    exp.Not: _function("invert"),
    exp.Neg: _function("negate_checked"),
    exp.Lower: _function("utf8_lower"),
    exp.Upper: _function("utf8_upper"),
    exp.Trim: lambda node, rows: _compute.utf8_trim(_value(node.this, rows), characters=" "),
    exp.Length: _function("utf8_length"),
    exp.Abs: _function("abs_checked"),
    exp.Is: _is,
    exp.In: _in,
    exp.Between: _between,
    exp.Like: _like,
    exp.ILike: _like,
    exp.RegexpLike: _like,
    exp.Coalesce: _coalesce,
    exp.Cast: lambda node, rows: _cast(_value(node.this, rows), _type(node.to), literal=node.this),
}
_RULES[exp.TryCast] = _RULES[exp.Cast]  # what sqlglot makes of a cast of Spark's
_READ = {
    *("this", "expression", "expressions", "to", "low", "high", "negate"),
    *("is_string", "quoted", "safe"),
}
_UNDERSTOOD = {*_RULES, exp.Identifier, exp.DataType}
