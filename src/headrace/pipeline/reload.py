"""A running pipeline takes up its config file anew: sink by sink, or by starting again."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config import Config, compare, load
from ..errors import ConfigError
from ..formats.catalogue import Formats
from ..sinks.lake.modes import umask_of
from ..sinks.report import REPORT
from ..sinks.requests import Requests
from .query import PipelineInput, QueryPlan
from .run import Pipeline, extra_tasks, plans

logger = logging.getLogger(__name__)


def plans_of(
    config: Config, formats: Formats, *, once: bool = False, adopt: Sequence[str] = ()
) -> list[QueryPlan]:
    """A query for each sink of a config; a ConfigError when it has no pipeline."""
    section = config.pipeline
    if section is None:
        raise ConfigError("the config has no section pipeline", hint="See docs/pipeline.md.")
    feed = PipelineInput(
        address=config.log_address,
        max_changes_per_batch=section.max_changes_per_batch,
        trigger_seconds=section.trigger_seconds,
        report=str(config.pipeline_dir / REPORT),
    )
    found = plans(
        section.sinks,
        feed,
        checkpoints=config.checkpoint_dir,
        once=once,
        adopt=adopt,
        formats=formats,
    )
    return [plan.kept_at(config.checkpoint_address) for plan in found]


class PipelineReload:
    """Reads the config file again when that is requested."""

    def __init__(self, file: Path, config: Config, formats_of: Callable[[Config], Formats]) -> None:
        """`config` is what the file said when it was last read."""
        self._file = file
        self._config = config
        self._formats_of = formats_of
        self._extra = self._tasks(config, plans_of(config, formats_of(config)))
        self._requests = Requests(config.pipeline_dir)

    def requested(self) -> bool:
        """Whether the config is to be read again; says so once."""
        return self._requests.take_reload()

    def take_up(self, running: Pipeline) -> bool:
        """Take up what the file says now; False: this process must start again for it.

        A file that cannot be used changes nothing.
        """
        try:
            config = load(self._file)
            wanted = plans_of(config, self._formats_of(config))
        except ConfigError as error:
            logger.error("config not reloaded error=%s", error.explain())
            return True
        difference = compare(self._config, config)
        # Spark has as many threads as the sinks needed that may wait when it was started.
        more_tasks = self._tasks(config, wanted) > self._extra
        if difference.pipeline or more_tasks or _umask(config) != _umask(self._config):
            logger.info("config reloaded, the pipeline starts again")
            return False
        running.take_up(wanted)
        self._config = config
        logger.info("config reloaded sinks=%s", ",".join(plan.sink.name for plan in wanted))
        return True

    @staticmethod
    def _tasks(config: Config, queries: Sequence[QueryPlan]) -> int:
        return extra_tasks(queries, config.pipeline.master) if config.pipeline else 0


def _umask(config: Config) -> int:
    return umask_of(config.pipeline.sinks if config.pipeline else ())
