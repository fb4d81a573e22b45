"""Traces of what a sink has stored."""

import logging
from collections.abc import Iterator

from ..change.record import rows
from ..errors import HeadraceError
from ..observe import traces
from ..observe.traces import TracedTransaction
from .options import Options
from .query import PipelineInput
from .reading import SequenceRange
from .remote import reading

logger = logging.getLogger(__name__)

MOST = 100_000  # changes of a batch that are looked at, the newest


def trace_batch(feed: PipelineInput, sink: str, after: int, upto: int, seconds: float) -> None:
    """Trace a batch that a sink has stored; without traces it costs nothing."""
    if traces.current is None or upto <= after:
        return
    try:
        traces.current.stored(sink, _transactions(feed, max(after, upto - MOST), upto), seconds)
    except HeadraceError as error:
        logger.debug("sink=%s not traced error=%s", sink, error)


def _transactions(feed: PipelineInput, after: int, upto: int) -> Iterator[TracedTransaction]:
    log = reading(Options.read(feed.address))
    wanted = SequenceRange(log.ranges(0, upto=0).epoch, after, upto)
    for piece in log.pieces(wanted):
        for _, _, id, commit_time, captured_at, _, _, last, *_ in rows(piece.records, piece.count):
            if last:
                yield TracedTransaction(id, commit_time, captured_at)
