"""Dead letters sent again, on the driver: some at a time, so that a stop is heard between them.

A step sends some of them and says what came of it; `save` then notes it, first in the ledger and
then in the table of the dead letters, and may be called until it succeeds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..lake.delta import Marks
from ..results import results
from .deadletters import DeadLetters, ranks
from .delivery import Counts
from .ledger import Ledger, Line
from .parcel import discard
from .redrive import (
    SLICE,
    Places,
    Redriven,
    Resend,
    Resent,
    Rewritten,
    Round,
    Slice,
    Wish,
    rewritten,
    tell,
)
from .tasks import Delivered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .settings import PushSettings

_MOST_PARTS = 8
_SMALLEST_PART = 500  # letters; to send fewer is not worth a task
_SILENT = 3  # steps in a row in which nothing was settled; then it is given up for now


@dataclass(slots=True)
class _Unsaved:
    """What a step has sent, and neither ledger nor table tell of yet."""

    files: list[str]
    told: list[Resent]
    change: Rewritten | None = None  # of the table; worked out once, so that it is not done twice
    noted: bool = False  # in the ledger


class Resending:
    """The dead letters of a sink, as they are sent again."""

    def __init__(
        self, sink: PushSettings, ledger: Ledger, letters: DeadLetters, writer: str
    ) -> None:
        self._sink = sink
        self._ledger = ledger
        self._letters = letters
        self._writer = writer
        self._round: Round | None = None
        self._unsaved: _Unsaved | None = None
        self._ended = False
        self._silent = 0

    @property
    def unsaved(self) -> bool:
        """Whether a step's end is still to be noted."""
        return self._unsaved is not None

    def step(self, spark: SparkSession, wish: Wish) -> list[Delivered]:
        """Send some more of what is asked for; returns what the tasks say."""
        if self._round is None or self._round.wish.id != wish.id:
            self._begin(wish)
        assert self._round is not None
        piece = self._round.places.chosen(self._letters.files, self._round.wants)
        told = self._sent(spark, piece) if piece.letters.num_rows else []
        for each in told:
            self._round.add(each)
        settled = any(each.sent or each.refused for each in told)
        self._silent = 0 if settled else self._silent + 1
        if self._silent >= _SILENT:
            self._round.reason = self._round.reason or "nothing was accepted"
        # What is stuck stays; what a part had no time for is chosen next.
        over = piece.last and not any(each.delivered.open for each in told)
        self._ended = over or bool(self._round.reason)
        self._unsaved = _Unsaved(piece.files, told)
        return [each.delivered for each in told]

    def failed(self, wish: Wish, reason: str) -> Redriven:
        """What came of a wish that an error has put an end to."""
        count = self._letters.count
        if self._round is None or self._round.wish.id != wish.id:
            return Redriven(wish.id, count, left=count, reason=reason)
        # If the end of its last step can be noted later, it is told once more.
        self._round.reason, self._ended = reason, True
        return self._round.answer(count, 0)

    def _begin(self, wish: Wish) -> None:
        letters, count = self._letters, self._letters.count
        order = ranks(letters.folder, letters.files, self._ledger.epochs)
        self._round = Round(wish, count, Places(letters.folder, order))
        self._ended, self._silent = False, 0
        tell(self._sink.folder, Redriven(wish.id, count, left=count, done=False))

    def _sent(self, spark: SparkSession, piece: Slice) -> list[Resent]:
        sink, folder = self._sink, self._letters.folder
        most = sink.parallelism or min(spark.sparkContext.defaultParallelism, _MOST_PARTS)
        parts = max(1, min(most, piece.letters.num_rows // _SMALLEST_PART))
        file = folder.write(piece.letters, SLICE, {}).path
        resend = Resend(sink, sink.policy, folder, file, parts)
        try:
            numbers = spark.range(parts, numPartitions=parts)
            return results(numbers, resend, Resent)
        finally:
            discard(folder, file)

    def save(self) -> None:
        """Note what the last step has done, if that is still to be done."""
        unsaved = self._unsaved
        if unsaved is None:
            return
        if any(each.sent or each.refused for each in unsaved.told):
            if (change := unsaved.change) is None:
                change = rewritten(self._letters.folder, unsaved.files, unsaved.told)
                unsaved.change = change
            if not unsaved.noted:
                # Before they leave the table: who is killed in between sends them twice, and
                # none is missed when they are counted.
                sent = Counts(sent=sum(len(each.sent) for each in unsaved.told))
                line = Line("redriven", self._writer, counts=sent, at=time.time_ns() // 1000)
                self._ledger.settle(msgspec.structs.replace(line, files=change.removed))
                unsaved.noted = True
            marks = Marks(batch_id=None, epoch=self._ledger.epoch, sequence=0)
            self._letters.commit(change.added, change.removed, marks=marks)
        self._unsaved = None

    def answer(self) -> Redriven:
        """What came of it, or comes."""
        assert self._round is not None
        told = self._round
        left = self._letters.count
        waiting = self._letters.held(told.stuck) - told.refused if self._ended else 0
        answer = told.answer(left, max(waiting, 0), done=self._ended)
        if self._ended:
            self._round = None
        return answer
