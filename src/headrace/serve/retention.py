"""What removes old changes of a served log, and which sinks keep some of them."""

from ..log import Holder, Log, LogReader, LogRetention
from ..sinks.report import PipelineFolder
from .settings import ServerSettings


def retention_of(log: Log, settings: ServerSettings) -> LogRetention:
    """What removes old changes of a log, but none that a sink of the config still needs."""
    return LogRetention(log, settings.retention, sinks=lambda: sink_holders(log, settings.pipeline))


def sink_holders(log: LogReader, pipeline: PipelineFolder | None) -> list[Holder]:
    """What the sinks of the config still need, whether their pipeline runs or not."""
    if pipeline is None:
        return []
    holders = []
    for sink, progress in pipeline.committed().items():
        shared = None if progress is None else log.shared_upto(progress.epoch, progress.generation)
        if progress is not None and shared is not None:
            sequence = min(progress.sequence, shared)
        elif progress is None or pipeline.same_log:
            sequence = log.first_sequence - 1  # it begins with all that is there
        else:
            continue  # it reads the log of another server
        holders.append(Holder(f"sink:{sink}", sequence))
    return holders
