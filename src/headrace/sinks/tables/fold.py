"""What the changes of a batch add up to, key by key. No I/O.

    changes in order ─▶ fold ─▶ versions of each key, and whether the table was emptied before them

A version that lacks columns (the source did not send them) takes them from the version before it
in the batch; what the batch does not tell is left to the row that the table holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

_image = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Encoder().encode


class Routed(NamedTuple):
    """A change as the fold takes it."""

    sequence: int
    op: str
    key: str  # JSON; "" for TRUNCATE and SCHEMA
    old_key: str | None  # where an update comes from when it moves a row that is not whole
    after: str | None
    absent: list[str] | None  # columns that `after` lacks; None or []: none
    commit_time: int


class Version(NamedTuple):
    """A row as it is from a change on; `image` None: it is gone."""

    sequence: int
    commit_time: int
    image: str | None
    absent: frozenset[str] = frozenset()  # to be taken from the table's row …
    base: str = ""  # … of this key


@dataclass(slots=True)
class Folded:
    """The outcome of a batch for some keys."""

    emptied: bool = False  # whether there was a TRUNCATE
    emptied_time: int = 0  # the commit time of the first one
    versions: dict[str, list[Version]] = field(default_factory=dict)


def fold(changes: Iterable[Routed], *, every_version: bool) -> Folded:
    """Take changes in order; without `every_version` only the last of each key is kept."""
    folded = Folded()
    versions = folded.versions
    for change in changes:
        if change.op == "TRUNCATE":
            _empty(folded, change, every_version=every_version)
            continue
        if change.op == "SCHEMA":
            continue
        version = _version(versions, change)
        known = versions.get(change.key)
        if known is None or not every_version:
            versions[change.key] = [version]
        elif known[-1].commit_time == version.commit_time:
            known[-1] = version  # nobody ever saw the state within a transaction
        else:
            known.append(version)
    return folded


def _empty(folded: Folded, change: Routed, *, every_version: bool) -> None:
    if not folded.emptied:
        folded.emptied, folded.emptied_time = True, change.commit_time
    if not every_version:
        folded.versions.clear()
        return
    gone = Version(change.sequence, change.commit_time, None)
    for known in folded.versions.values():
        if known[-1].image is not None:
            known.append(gone)


def _version(versions: dict[str, list[Version]], change: Routed) -> Version:
    if change.op == "DELETE":
        return Version(change.sequence, change.commit_time, None)
    if not change.absent or change.after is None:
        return Version(change.sequence, change.commit_time, change.after)
    return _completed(versions, change, change.after)


def _completed(versions: dict[str, list[Version]], change: Routed, after: str) -> Version:
    """A version with as many of its absent columns as the batch knows."""
    base = change.old_key or change.key
    absent = frozenset(change.absent or ())
    known_versions = versions.get(base)
    earlier = known_versions[-1] if known_versions else None
    if earlier is None or earlier.image is None:
        return Version(change.sequence, change.commit_time, after, absent, base)
    known = _image(earlier.image)
    image = _image(after)
    image.update({name: known[name] for name in absent if name in known})
    lacking = absent & earlier.absent
    return Version(
        change.sequence, change.commit_time, _text(image).decode(), lacking, earlier.base
    )
