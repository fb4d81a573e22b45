"""To which history of a log a place belongs.

    epoch E  ──generation 0──┬──generation 4f…──  the log as it went on
                             └──generation 9c…──  a copy of it that was put back, and went on

A copy that is put back gives the sequences beyond it to other changes, and nothing in it shows that
it is a copy. So every start of a writer begins a generation, with a random id: a counter would
give the same one to both. A place is an epoch, a generation and a sequence. It is in a log whose
lineage has that generation, and before the first change of the next one.
"""

import itertools
import secrets
import time
from collections.abc import Sequence

import msgspec

FIRST_GENERATION = "0"  # of an epoch, and of every place that was noted without one
UNKNOWN_GENERATION = ""  # of a place that says only its epoch
_RANDOM_BITS = 22
GENERATIONS_KEPT = 1000  # whoever stands in an earlier one is refused


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """The changes that one writer has added, from its start to its end."""

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


def kept(lineage: list[Generation]) -> list[Generation]:
    """As many generations as are remembered: those go first that added no change."""
    if len(lineage) <= GENERATIONS_KEPT:
        return lineage
    pairs = enumerate(itertools.pairwise(lineage))
    empty = next((at for at, (each, after) in pairs if each.first == after.first), 0)
    return kept(lineage[:empty] + lineage[empty + 1 :])


def shared_upto(
    lineage: Sequence[Generation], epoch: str, generation: str, latest: int
) -> int | None:
    """Up to which sequence a place in that generation holds in this log; None: nowhere."""
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
