"""The config file taken up by the running process: only what differs is touched."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from ..config import Config, ConfigDifference, compare, load, taken_up
from ..config.difference import NamedDifference
from ..errors import ConfigError, HeadraceError, SourceError
from ..run import PipelineProcess, Run, check_model, server_settings
from ..sinks.requests import Requests

logger = logging.getLogger(__name__)


class ConfigReload:
    """A process at work with its config file, and the pipeline that it keeps running."""

    def __init__(
        self, run: Run, file: Path, pipeline_process: Callable[[], PipelineProcess]
    ) -> None:
        """`pipeline_process` makes the process of a pipeline, to be entered."""
        self._run = run
        self._file = file
        self._pipeline_process = pipeline_process
        self._lock = threading.Lock()  # one reload at a time
        self._pipeline: PipelineProcess | None = None

    def __enter__(self) -> Self:
        self._keep_pipeline(self._run.config)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._pipeline is not None:
                self._pipeline.__exit__(kind, error, trace)

    def reload(self, *, dry_run: bool = False) -> ConfigDifference:
        """Take up the file as it is now; a ConfigError: it cannot be used, and nothing changes."""
        with self._lock:
            given = load(self._file)
            if not given.sources:
                raise ConfigError("headrace.sources: there is nothing to capture")
            difference = compare(self._run.config, given)
            config = taken_up(self._run.config, given)
            server_settings(config)
            _check_model(config)
            if dry_run:
                return difference
            for line in difference.lines():
                logger.info("config %s", line)
            self._run.take_up(config)
            self._keep_pipeline(config)
            # A sink's events name the servers of all sources.
            if difference.pipeline_concerned or difference.sources != NamedDifference():
                Requests(config.pipeline_dir).reload()
            return difference

    def reload_logged(self) -> None:
        """Take up the file, and log why not if it cannot be used."""
        try:
            self.reload()
        except HeadraceError as error:
            logger.error("config not reloaded, everything goes on as it was error=%s", error)
        except Exception:  # whatever it is: the config is no reason to end what runs
            logger.exception("config not reloaded")

    def _keep_pipeline(self, config: Config) -> None:
        """Let a pipeline run exactly if the config has one."""
        if config.pipeline is None and self._pipeline is not None:
            self._pipeline.__exit__(None, None, None)
            self._pipeline = None
        elif config.pipeline is not None and self._pipeline is None:
            self._pipeline = self._pipeline_process().__enter__()


def _check_model(config: Config) -> None:
    try:
        check_model(config)
    except SourceError as error:
        logger.warning("model not checked error=%s", error.explain())
