"""To which history of a log a place belongs.

    epoch E  ──generation 0──┬──generation 4f…──  the log as it went on
                             └──generation 9c…──  a copy of it that was put back, and went on

A copy that is put back gives the sequences beyond it to other changes, and nothing in it shows that
it is a copy. So every start of a writer begins a generation with its first change. The id is
random: a counter would give the same one to both. A place is an epoch, a generation and a sequence.
It is in a log whose lineage has that generation, and before the first change of the next one.

A start that adds no change leaves no generation: a restart loop would push out those in which
readers stand. Who connects before the first change notes `ID-LATEST-BEFORE` as its generation: up
to LATEST its place is in BEFORE, and beyond it in ID.
"""

import itertools
import re
import secrets
import time
from collections.abc import Sequence

import msgspec

FIRST_GENERATION = "0"  # of an epoch, and of every place that was noted without one
UNKNOWN_GENERATION = ""  # of a place that says only its epoch
_RANDOM_BITS = 22
GENERATIONS_KEPT = 1000  # whoever stands in an earlier one is refused
_UPCOMING = re.compile(r"([0-9a-f]{1,16})-([0-9]{1,20})-([0-9a-f]{1,16})")


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """The changes that one start of a writer has added."""

    epoch: str
    id: str
    first: int  # sequence


class Ancestor(msgspec.Struct, frozen=True):
    """A log that this one is a restored copy of, and how much of it the copy has."""

    epoch: str
    sequence: int  # up to it, sequences of both mean the same changes


def new_generation() -> str:
    """An id that no other writer of any copy has."""
    # The time, then what is random. Together 63 bits: a Delta table keeps it as a number.
    milliseconds = time.time_ns() // 1_000_000
    return f"{(milliseconds << _RANDOM_BITS) + secrets.randbits(_RANDOM_BITS):x}"


def begun_at(generation: str) -> int:
    """When a generation began, in milliseconds since 1970; 0: not known."""
    return int(generation or "0", 16) >> _RANDOM_BITS


def upcoming(id: str, latest: int, before: str) -> str:
    """What a reader notes that comes before the first change of a generation."""
    return f"{id}-{latest}-{before}"


def shared_upto(
    lineage: Sequence[Generation], epoch: str, generation: str, latest: int
) -> int | None:
    """Up to which sequence a place in that generation holds in this log; None: nowhere."""
    if noted := _UPCOMING.fullmatch(generation):
        id, last, before = noted.groups()
        if (upto := shared_upto(lineage, epoch, id, latest)) is not None:
            return upto
        upto = shared_upto(lineage, epoch, before, latest)
        return None if upto is None else min(upto, int(last))
    at = [
        number
        for number, each in enumerate(lineage)
        if each.epoch == epoch and generation in (each.id, UNKNOWN_GENERATION)
    ]
    if not at:
        return None
    following = lineage[at[-1] + 1 :]
    return min(following[0].first - 1, latest) if following else latest


def likely_fork(
    lineage: Sequence[Generation], epoch: str, generation: str, latest: int
) -> int | None:
    """Up to where this log and one with an unknown generation of the epoch are the same.

    That holds if this log is a copy that was put back after that generation had begun. It says
    where a reader goes on whose operator accepts the loss, and never that a place holds.
    """
    upto = shared_upto(lineage, epoch, UNKNOWN_GENERATION, latest)
    later = (each.first - 1 for each in lineage if begun_at(each.id) >= begun_at(generation))
    return None if upto is None else min(upto, next(later, upto))


def ancestors(lineage: Sequence[Generation]) -> list[Ancestor]:
    """The epochs before the last one, each with how much of it is in this log."""
    found: dict[str, int] = {}
    for each, following in itertools.pairwise(lineage):
        found[each.epoch] = following.first - 1
    if lineage:
        found.pop(lineage[-1].epoch, None)
    return [Ancestor(epoch, sequence) for epoch, sequence in found.items()]


def earlier_lineage(epoch: str, known: Sequence[Ancestor]) -> list[Generation]:
    """The lineage of a log from before generations were noted."""
    first, found = 1, list[Generation]()
    for each in known:
        found.append(Generation(each.epoch, FIRST_GENERATION, first))
        first = each.sequence + 1
    return [*found, Generation(epoch, FIRST_GENERATION, first)] if epoch else found
