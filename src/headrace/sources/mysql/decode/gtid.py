"""GTIDs of MySQL and of MariaDB: single ones, sets with gaps, their text and bytes.

    MySQL     3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5:7, after a server's own numbers also tags:
              3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5:nightly:1-3
    MariaDB   0-1-42,1-2-7: the last transaction of each domain

Both kinds of sets are immutable. A text that is not one raises DecodeError.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import msgspec

from ....errors import DecodeError

_Span = tuple[int, int]  # first and last, both included
_Owner = tuple[str, str]  # uuid and tag

_LARGEST = (1 << 63) - 2
_tag = re.compile(r"[a-z_][a-z0-9_]{0,31}").fullmatch
_span = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?", re.ASCII).fullmatch
_maria = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})", re.ASCII).fullmatch


class MysqlGtid(msgspec.Struct, frozen=True):
    """A transaction of MySQL: 3e11fa47-71ca-11e1-9e33-c80aa9429562:23, or with a tag."""

    source: str  # the uuid of the server that committed it first
    number: int
    tag: str = ""

    def __str__(self) -> str:
        if self.tag:
            return f"{self.source}:{self.tag}:{self.number}"
        return f"{self.source}:{self.number}"


@dataclass(frozen=True, slots=True)
class MysqlGtids:
    """A set of MySQL's transactions; gaps are kept."""

    spans: Mapping[_Owner, tuple[_Span, ...]] = field(default_factory=dict)
    """Of each server and tag its numbers, in order, without overlap; never empty."""

    @classmethod
    def parse(cls, text: str) -> MysqlGtids:
        """From gtid_executed's text."""
        spans: dict[_Owner, tuple[_Span, ...]] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            uuid, *parts = part.split(":")
            source, tag = _uuid(uuid.strip()), ""
            for item in map(str.strip, parts):
                if _tag(item.lower()):
                    tag = item.lower()
                    continue
                owner = (source, tag)
                spans[owner] = _joined(spans.get(owner, ()), [_parsed_span(item)])
            if not parts:
                raise _not_a_set(text)
        return cls(spans)

    @classmethod
    def of(cls, spans: Mapping[_Owner, Iterable[_Span]]) -> MysqlGtids:
        """From spans in any order."""
        joined = {owner: _joined((), some) for owner, some in spans.items()}
        return cls({owner: some for owner, some in joined.items() if some})

    def __str__(self) -> str:
        texts: dict[str, str] = {}
        for source, tag in sorted(self.spans):
            numbers = ":".join(
                str(first) if first == last else f"{first}-{last}"
                for first, last in self.spans[source, tag]
            )
            before = texts.get(source, source)
            texts[source] = f"{before}:{tag}:{numbers}" if tag else f"{before}:{numbers}"
        return ",".join(texts.values())

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __contains__(self, gtid: MysqlGtid) -> bool:
        spans = self.spans.get((gtid.source, gtid.tag), ())
        at = bisect_right(spans, (gtid.number, _LARGEST + 1)) - 1
        return at >= 0 and gtid.number <= spans[at][1]

    def __or__(self, other: MysqlGtids) -> MysqlGtids:
        spans = dict(self.spans)
        for owner, some in other.spans.items():
            spans[owner] = _joined(spans.get(owner, ()), some)
        return MysqlGtids(spans)

    def __sub__(self, other: MysqlGtids) -> MysqlGtids:
        left = {
            owner: _without(some, other.spans.get(owner, ())) for owner, some in self.spans.items()
        }
        return MysqlGtids({owner: some for owner, some in left.items() if some})

    def __le__(self, other: MysqlGtids) -> bool:
        return not self - other

    def add(self, gtid: MysqlGtid) -> MysqlGtids:
        """A set with one more."""
        owner, number = (gtid.source, gtid.tag), gtid.number
        spans = self.spans.get(owner, ())
        if spans and spans[-1][1] == number - 1:  # the usual case: the next one
            grown = (*spans[:-1], (spans[-1][0], number))
        else:
            grown = _joined(spans, [(number, number)])
        return MysqlGtids({**self.spans, owner: grown})

    def encode(self) -> bytes:
        """As COM_BINLOG_DUMP_GTID sends it, and as PREVIOUS_GTIDS stores it."""
        tagged = any(tag for _, tag in self.spans)
        count = len(self.spans)
        parts = [struct.pack("<Q", (1 << 56 | count << 8 | 1) if tagged else count)]
        for source, tag in sorted(self.spans):
            spans = self.spans[source, tag]
            parts.append(UUID(source).bytes)
            if tagged:
                parts.append(bytes([len(tag) << 1]) + tag.encode())
            parts.append(struct.pack("<Q", len(spans)))
            # The end of a span is the first number after it.
            parts += [struct.pack("<QQ", first, last + 1) for first, last in spans]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> MysqlGtids:
        """From the bytes of PREVIOUS_GTIDS; ValueError or struct.error: they are not a set."""
        (head,) = struct.unpack_from("<Q", data)
        tagged = head >> 56 == 1
        count = (head >> 8) & 0xFFFFFFFFFFFF if tagged else head
        at, spans = 8, dict[_Owner, list[_Span]]()
        for _ in range(count):
            source = str(UUID(bytes=data[at : at + 16]))
            at += 16
            tag = ""
            if tagged:
                size = data[at] >> 1
                tag = data[at + 1 : at + 1 + size].decode("ascii")
                at += 1 + size
            (some,) = struct.unpack_from("<Q", data, at)
            at += 8
            if some > len(data):
                raise ValueError("more spans than bytes")
            numbers = struct.unpack_from(f"<{2 * some}Q", data, at)
            at += 16 * some
            owned = spans.setdefault((source, tag), [])
            owned += [(a, b - 1) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        if at != len(data):
            raise ValueError("bytes after the last span")
        return cls.of(spans)


class MariadbGtid(msgspec.Struct, frozen=True):
    """A transaction of MariaDB: domain-server-sequence, 0-1-42."""

    domain: int
    server: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.domain}-{self.server}-{self.sequence}"


@dataclass(frozen=True, slots=True)
class MariadbGtids:
    """MariaDB's position: the last transaction of each domain."""

    last: Mapping[int, MariadbGtid] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MariadbGtids:
        """From gtid_binlog_pos's text."""
        found: list[MariadbGtid] = []
        for part in filter(None, map(str.strip, text.split(","))):
            numbers = _maria(part)
            if numbers is None:
                raise _not_a_set(text)
            found.append(MariadbGtid(int(numbers[1]), int(numbers[2]), int(numbers[3])))
        if len({gtid.domain for gtid in found}) != len(found):
            raise _not_a_set(text)
        return cls.of(found)

    @classmethod
    def of(cls, gtids: Iterable[MariadbGtid]) -> MariadbGtids:
        """The last of each domain, where they come in the order of a GTID list."""
        return cls({gtid.domain: gtid for gtid in gtids})

    def __str__(self) -> str:
        return ",".join(str(self.last[domain]) for domain in sorted(self.last))

    def __bool__(self) -> bool:
        return bool(self.last)

    def __contains__(self, gtid: MariadbGtid) -> bool:
        """Whether a domain has come at least as far as this transaction."""
        last = self.last.get(gtid.domain)
        return last is not None and gtid.sequence <= last.sequence

    def __or__(self, other: MariadbGtids) -> MariadbGtids:
        further = [gtid for gtid in other.last.values() if gtid not in self]
        return MariadbGtids({**self.last, **{gtid.domain: gtid for gtid in further}})

    def __le__(self, other: MariadbGtids) -> bool:
        return all(gtid in other for gtid in self.last.values())

    def add(self, gtid: MariadbGtid) -> MariadbGtids:
        """The position after one more transaction."""
        return MariadbGtids({**self.last, gtid.domain: gtid})


def _joined(spans: tuple[_Span, ...], more: Iterable[_Span]) -> tuple[_Span, ...]:
    """All numbers of both, neighbours put together."""
    joined: list[_Span] = []
    for first, last in sorted([*spans, *more]):
        if not 0 < first <= last <= _LARGEST:
            raise DecodeError(f"{first}-{last} are no numbers of transactions")
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return tuple(joined)


def _without(spans: tuple[_Span, ...], taken: tuple[_Span, ...]) -> tuple[_Span, ...]:
    left: list[_Span] = []
    for first, last in spans:
        start = first
        # The spans that touch this one begin with the last that starts before it.
        at = max(bisect_left(taken, (first, first)) - 1, 0)
        while at < len(taken) and taken[at][0] <= last:
            if taken[at][1] >= start:
                if taken[at][0] > start:
                    left.append((start, taken[at][0] - 1))
                start = taken[at][1] + 1
            at += 1
        if start <= last:
            left.append((start, last))
    return tuple(left)


def _parsed_span(text: str) -> _Span:
    numbers = _span(text)
    if numbers is None:
        raise _not_a_set(text)
    first = int(numbers[1])
    return first, int(numbers[2]) if numbers[2] else first


def _uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise _not_a_set(text) from None


def _not_a_set(text: str) -> DecodeError:
    return DecodeError(f"{text[:200]!r} is not a set of GTIDs")
