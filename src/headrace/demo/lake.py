"""The demo's pipeline: Spark fills Delta tables while the shop is open, as its own process."""

from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

import msgspec

from ..config import Config
from ..errors import HeadraceError, PipelineError
from ..operate.show import sink_complaints
from ..run import PipelineProcess
from ..sinks import SinkPhase, SinkStatus, report

LAKE, HISTORY = "lake", "history"  # the sinks, each in a folder of its name

_LAST_LINES = 5


def pipeline_settings(folder: Path) -> dict[str, Any]:
    """The section `pipeline` of the demo's config."""
    return {
        "master": "local[2]",
        # Where it is removed with the rest, however Spark ends.
        "spark": {"spark.local.dir": str(folder / "spark")},
        "sinks": {
            LAKE: {"type": "tables", "path": LAKE},
            HISTORY: {"type": "history", "path": HISTORY},
        },
    }


class Lake:
    """The pipeline's process, and how far its sinks are."""

    def __init__(self, config: Config, file: Path) -> None:
        """Describe the pipeline of a config, which is in this file."""
        self._config = config
        self._file = file
        self._stack = ExitStack()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._output: TextIO | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            output = self._config.data_dir / "pipeline.txt"
            self._output = stack.enter_context(output.open("w"))
            stack.enter_context(PipelineProcess(self._file, self._keep_line))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _keep_line(self, line: str) -> None:
        # The display shows the same; the file is for those who keep the folder.
        assert self._output is not None
        self._lines.append(line)
        self._output.write(f"{line}\n")
        self._output.flush()

    def statuses(self, latest: int) -> list[SinkStatus]:
        """How every sink is doing, when the log is at the sequence `latest`."""
        # Its process was started just now: until it reports, its sinks are starting, not stopped.
        reported = {sink.sink: sink for sink in report.read(self._config.pipeline_dir).sinks}
        return [
            msgspec.structs.replace(status, lag=max(latest - status.sequence, 0))
            for name in (LAKE, HISTORY)
            for status in [reported.get(name, SinkStatus(sink=name, phase=SinkPhase.STARTING))]
        ]

    @property
    def halted(self) -> list[str]:
        """Why an operator would have to act."""
        halted = [status for status in self.statuses(0) if status.phase is SinkPhase.HALTED]
        return [line for status in halted for line in sink_complaints(status)]

    @property
    def complaints(self) -> list[str]:
        """What is wrong with the sinks and their tables."""
        return [line for status in self.statuses(0) for line in sink_complaints(status)]

    def has(self, sequence: int) -> bool:
        """Whether everything up to a change has arrived in every sink."""
        return all(status.sequence >= sequence for status in self.statuses(sequence))

    def late(self, seconds: float) -> HeadraceError:
        """The error to raise when the sinks do not catch up."""
        last = self.complaints or list(self._lines) or ["nothing at all"]
        return PipelineError(
            f"the Delta tables did not catch up within {seconds:.0f} s",
            hint="With --keep-dir its log files stay. It printed last:\n" + "\n".join(last),
        )
