"""Dates and times of MySQL and MariaDB as text, from how a binlog packs them.

Days and times of day come again and again, so each is written once and then looked up. Zero dates
and partial ones are what the server shows: 0000-00-00, 2000-00-01.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta
from struct import Struct
from typing import Any

from ....errors import DecodeError

Values = Sequence[Any]
Converted = tuple[bytes, Sequence[bytes]]

QUOTED = b'"%b"'
ZERO = b"0000-00-00 00:00:00"

_REMEMBERED = 100_000  # texts in each of the caches below
_EPOCH = date(1970, 1, 1)


class _Days(dict[int, bytes]):
    """DATETIME's day with its sign bit: 1 sign, 17 year * 13 + month, 5 day."""

    def __missing__(self, packed: int) -> bytes:
        return _kept(self, packed, _day(packed) + b" ")


class _Dates(dict[int, bytes]):
    """DATE: 15 year, 4 month, 5 day."""

    def __missing__(self, packed: int) -> bytes:
        text = b"%04d-%02d-%02d" % (packed >> 9, packed >> 5 & 15, packed & 31)
        return _kept(self, packed, text)


class _Clock(dict[int, bytes]):
    """DATETIME's time of day: 5 hour, 6 minute, 6 second."""

    def __missing__(self, packed: int) -> bytes:
        return _kept(self, packed, _clock_text(packed))


class _DaysSince1970(dict[int, bytes]):
    """TIMESTAMP's day."""

    def __missing__(self, days: int) -> bytes:
        return _kept(self, days, b"%bT" % str(_EPOCH + timedelta(days)).encode())


class _Seconds(dict[int, bytes]):
    """TIMESTAMP's time of day."""

    def __missing__(self, seconds: int) -> bytes:
        text = b"%02d:%02d:%02d" % (seconds // 3600, seconds // 60 % 60, seconds % 60)
        return _kept(self, seconds, text)


def _kept(cache: dict[int, bytes], key: int, text: bytes) -> bytes:
    if len(cache) >= _REMEMBERED:
        cache.clear()
    cache[key] = text
    return text


def _day(packed: int) -> bytes:
    months, day = divmod(packed - (1 << 22), 32)
    if months < 0:
        raise DecodeError("the server sent a DATETIME that does not read as one")
    return b"%04d-%02d-%02d" % (*divmod(months, 13), day)


def _clock_text(packed: int) -> bytes:
    return b"%02d:%02d:%02d" % (packed >> 12, packed >> 6 & 63, packed & 63)


_days, _dates, _clock = _Days(), _Dates(), _Clock()
_since_1970, _seconds = _DaysSince1970(), _Seconds()

_iter_dates = Struct("<HB").iter_unpack
_FRACTIONS = {0: "", 1: "B", 2: "H", 3: "BH"}  # by bytes


def dates(values: Values) -> Converted:
    """DATE: three bytes, the lowest first."""
    packed = _iter_dates(b"".join(values))
    return QUOTED, [_dates[high << 16 | low] for low, high in packed]


def _each_once(convert: Callable[[Values], Converted]) -> Callable[[Values], Converted]:
    """The same, but moments that come again are written once: a statement's rows share its own."""

    def converted(values: Values) -> Converted:
        distinct = list(set(values))
        if 2 * len(distinct) > len(values):
            return convert(values)
        slot, texts = convert(distinct)
        known = dict(zip(distinct, texts, strict=True))
        return slot, [known[value] for value in values]

    return converted


def datetimes(digits: int) -> Callable[[Values], Converted]:
    """DATETIME(digits): five bytes, the highest first, then the fraction."""
    size = (digits + 1) // 2
    iterate = Struct(">BI" + _FRACTIONS[size]).iter_unpack
    text = b"%%b%%b.%%0%dd" % digits
    less = 10 if digits % 2 else 1  # fractions are stored with an even number of digits

    def plain(values: Values) -> Converted:
        packed = iterate(b"".join(values))
        return QUOTED, [_days[h << 15 | low >> 17] + _clock[low & 0x1FFFF] for h, low in packed]

    def short(values: Values) -> Converted:
        return QUOTED, [
            text % (_days[h << 15 | low >> 17], _clock[low & 0x1FFFF], fraction // less)
            for h, low, fraction in iterate(b"".join(values))
        ]

    def long(values: Values) -> Converted:
        return QUOTED, [
            text % (_days[h << 15 | low >> 17], _clock[low & 0x1FFFF], (a << 16 | b) // less)
            for h, low, a, b in iterate(b"".join(values))
        ]

    return _each_once((plain, short, short, long)[size])


def timestamps(digits: int) -> Callable[[Values], Converted]:
    """TIMESTAMP(digits): seconds since 1970 in four bytes, the highest first, then the fraction."""
    size = (digits + 1) // 2
    iterate = Struct(">I" + _FRACTIONS[size]).iter_unpack
    text = b"%%b%%b.%%0%ddZ" % digits
    zero = ZERO + (b"." + b"0" * digits if digits else b"")
    less = 10 if digits % 2 else 1

    def plain(values: Values) -> Converted:
        return QUOTED, [
            _since_1970[at // 86400] + _seconds[at % 86400] + b"Z" if at else zero
            for (at,) in iterate(b"".join(values))
        ]

    def short(values: Values) -> Converted:
        return QUOTED, [
            text % (_since_1970[at // 86400], _seconds[at % 86400], fraction // less)
            if at or fraction
            else zero
            for at, fraction in iterate(b"".join(values))
        ]

    def long(values: Values) -> Converted:
        return QUOTED, [
            text % (_since_1970[at // 86400], _seconds[at % 86400], (a << 16 | b) // less)
            if at or a or b
            else zero
            for at, a, b in iterate(b"".join(values))
        ]

    return _each_once((plain, short, short, long)[size])


def times(digits: int) -> Callable[[Values], Converted]:
    """TIME(digits): three bytes and the fraction, together one signed number."""
    size = (digits + 1) // 2
    zero, unit = 1 << 23 + 8 * size, 8 * size
    less = 10 if digits % 2 else 1

    def text(value: bytes) -> bytes:
        packed = int.from_bytes(value, "big") - zero
        whole, fraction = divmod(abs(packed), 1 << unit)
        shown = b"-" if packed < 0 else b""
        shown += b"%02d:%02d:%02d" % (whole >> 12 & 0x3FF, whole >> 6 & 63, whole & 63)
        return shown + b".%0*d" % (digits, fraction // less) if digits else shown

    return lambda values: (QUOTED, [text(value) for value in values])


# --- before MySQL 5.6, and MariaDB with mysql56_temporal_format = OFF ----------------------------


def old_datetimes(values: Values) -> Converted:
    """A decimal number, YYYYMMDDhhmmss."""
    return QUOTED, [_digits(value) for value in values]


def _digits(value: int) -> bytes:
    day, clock = divmod(value, 10**6)
    parts = (day // 10000, day // 100 % 100, day % 100)
    return b"%04d-%02d-%02d %02d:%02d:%02d" % (*parts, *_hms(clock))


def _hms(clock: int) -> tuple[int, int, int]:
    return clock // 10000, clock // 100 % 100, clock % 100


def old_timestamps(values: Values) -> Converted:
    """Seconds since 1970."""
    return QUOTED, [
        _since_1970[at // 86400] + _seconds[at % 86400] + b"Z" if at else ZERO for at in values
    ]


def old_times(values: Values) -> Converted:
    """A signed decimal number, hhmmss, in three bytes."""
    numbers = [int.from_bytes(value, "little", signed=True) for value in values]
    return QUOTED, [
        (b"-" if number < 0 else b"") + b"%02d:%02d:%02d" % _hms(abs(number)) for number in numbers
    ]
