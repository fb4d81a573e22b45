"""A row's values taken out of its changes. No I/O.

What stays of a change is that it happened: its operation, its key, its place in the transaction and
the names of its columns. So whoever reads it can still follow it, and sequences stay dense.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import msgspec

from .event import BeforeKind

_raws = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
_OF_UNDECODED = frozenset(("error", "operation"))  # what is said of a row, beside its bytes

LEAST_BYTES = 6  # of a value; a shorter one is found everywhere, so finding it says nothing


class RowImages(NamedTuple):
    """What a change says of a row's values; the names are those of a change."""

    before_kind: str
    before: bytes | None
    after: bytes | None
    unchanged: tuple[str, ...]


@dataclass(frozen=True)
class KeyValues:
    """The key of one row: the text of each value, whether JSON has it as text or as a number."""

    texts: Mapping[str, str]

    @classmethod
    def of(cls, image: bytes | str) -> Self:
        """The key in a JSON object."""
        return cls({name: _plain(value) for name, value in _raws(image).items()})

    def are_in(self, image: bytes | str | None) -> bool:
        """Whether a row's image, or its key, has these values."""
        if image is None or not self._may_be_in(image):
            return False
        found = _raws(image)
        return all(
            name in found and _plain(found[name]) == text for name, text in self.texts.items()
        )

    def may_stand_in(self, image: bytes | str | None) -> bool:
        """Whether a row's image has these values, be it under other names of columns."""
        if image is None or not self._may_be_in(image):
            return False
        found = {name: _plain(value) for name, value in _raws(image).items()}
        texts = set(found.values())
        return all(
            found[name] == text if name in found else text in texts
            for name, text in self.texts.items()
        )

    @cached_property
    def needles(self) -> tuple[bytes, ...]:
        """Bytes that every image with these values has: to look for them is cheaper than to decode.

        Of a value that JSON may write in several ways, there are none.
        """
        return tuple(text.encode() for text in self.texts.values() if _is_plain(text))

    def _may_be_in(self, image: bytes | str) -> bool:
        content = image.encode() if isinstance(image, str) else image
        return all(needle in content for needle in self.needles)


_is_plain = re.compile(r"[\w.:+-]+", re.ASCII).fullmatch


def _plain(value: msgspec.Raw) -> str:
    stored = bytes(value).strip()
    return _text(stored) if stored.startswith(b'"') else stored.decode()


def without_values(
    images: RowImages, key: KeyValues, stays: frozenset[str] = frozenset()
) -> RowImages:
    """The images with null in every column that is not of the key; of the old row, the key alone.

    Columns that the source did not send stay what they are: not sent. What `stays` names is left
    as if it were of the key.
    """
    before_kind, before = _old_key(images, key, stays)
    after = images.after
    if after is not None:
        named = stays | key.texts.keys()
        nulled = {n: v if n in named else _NULL for n, v in _raws(after).items()}
        after = _encode(nulled)
    return RowImages(before_kind, before, after, images.unchanged)


def without_old_values(
    images: RowImages,
    key: KeyValues,
    sent: Mapping[str, msgspec.Raw],
    stays: frozenset[str] = frozenset(),
) -> RowImages:
    """The images of a row's last change: its new values stay, and of the old row the key alone.

    What the source did not send is in an earlier change, which loses its values; `sent` has them.
    """
    before_kind, before = _old_key(images, key, stays)
    after, unchanged = images.after, images.unchanged
    known = [name for name in unchanged if name in sent]
    if after is not None and known:
        after = _encode({**_raws(after), **{name: sent[name] for name in known}})
        unchanged = tuple(name for name in unchanged if name not in sent)
    return RowImages(before_kind, before, after, unchanged)


def _old_key(images: RowImages, key: KeyValues, stays: frozenset[str]) -> tuple[str, bytes | None]:
    """The kind of old image, and the key in it."""
    if images.before is None or images.before_kind == BeforeKind.KEY.value:
        return images.before_kind, images.before
    named = stays | key.texts.keys()
    kept = {name: value for name, value in _raws(images.before).items() if name in named}
    return BeforeKind.KEY.value, _encode(kept)


def columns_in(image: bytes | str | None) -> dict[str, msgspec.Raw]:
    """The columns of an image, each as its JSON; none: there is no image."""
    return {} if image is None else _raws(image)


def has_raw_row(after: bytes | str | None) -> bool:
    """Whether a MESSAGE of a table has a row that could not be decoded, as it came."""
    return bool(columns_in(after).keys() - _OF_UNDECODED)


def texts_in(image: bytes | str | None, key: KeyValues) -> Iterator[tuple[str, str]]:
    """Every text and number in the columns that are not of the key, with the column's name."""
    for name, value in columns_in(image).items():
        if name not in key.texts:
            for text in _leaves(msgspec.json.decode(value)):
                yield name, text


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


class ValuePattern:
    """Finds values in bytes, as they are and as JSON writes them."""

    def __init__(self, values: Iterable[str]) -> None:
        self._texts: dict[bytes, str] = {}
        for text in values:
            plain = text.encode()
            if len(plain) >= LEAST_BYTES:
                self._texts[plain] = text
                self._texts[msgspec.json.encode(text)[1:-1]] = text
        forms = sorted(self._texts, key=len, reverse=True)  # of two at one place, the longer
        self._find = re.compile(b"|".join(map(re.escape, forms))).findall if forms else None
        self.longest = max(map(len, forms), default=0)

    @property
    def texts(self) -> set[str]:
        """The values that are looked for."""
        return set(self._texts.values())

    def found_in(self, content: bytes) -> set[str]:
        """Which of them some bytes have."""
        return {self._texts[each] for each in self._find(content)} if self._find else set()
