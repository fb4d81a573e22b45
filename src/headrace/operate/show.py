"""What the commands print: statuses, findings and changes for people."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..change.path import table_path
from ..formats.canonical import CanonicalTransaction
from ..log import Stats
from ..log.keys import ListedKey
from ..observe.lines import LineFormatter, LogFormat, is_line, level_of
from ..sinks import SinkPhase, SinkStatus
from ..sinks.report import PipelineOverview
from ..sources import FORMER, CopyProgress, Finding, Phase, Removal, Status
from .commands import Overview

if TYPE_CHECKING:
    from ..pipeline.preview import Preview

    # They load what Spark's tasks need, and most commands need none of it.
    from ..pipeline.verify import Verified
    from ..sinks.push.redrive import RedriveResult
    from .erase import Erasure

_PHASE_STYLES = {
    Phase.STREAMING: "green",
    Phase.SNAPSHOT: "cyan",
    Phase.WAITING: "yellow",
    Phase.PAUSED: "yellow",
    Phase.HALTED: "bold red",
}
_SINK_STYLES = {
    SinkPhase.STREAMING: "green",
    SinkPhase.WAITING: "yellow",
    SinkPhase.PAUSED: "yellow",
    SinkPhase.HALTED: "bold red",
}
_PLAIN_SECONDS = 5.0
PIPE_WIDTH = 160
_LONGEST_ROW = 200  # characters of a row that a line of `tail` shows


def terminal(*, stderr: bool = False) -> Console:
    """Where commands print."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        # What is not a terminal has no width; a file or a pipe takes whole lines.
        console.width = PIPE_WIDTH
    return console


class Journal(logging.Handler):
    """Writes log records to the console, above a live display if there is one."""

    def __init__(self, console: Console, line_format: LogFormat = LogFormat.TEXT) -> None:
        super().__init__()
        self._console = console
        self.line_format = line_format
        self.setFormatter(LineFormatter(line_format))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        self._console.out(self.format(record), highlight=False)

    def pass_on(self, line: str) -> None:
        """Write a line that another process has printed: as it is, or as a record of its own."""
        if is_line(line, self.line_format):
            self._console.out(line, highlight=False)
        elif line.strip():
            logging.getLogger("headrace.pipeline").log(level_of(line), "%s", line)


class RunProgress:
    """Shows how a process is doing: a live display on a terminal, elsewhere a line now and then."""

    def __init__(
        self,
        console: Console,
        *,
        footer: Sequence[str] = (),
        plain_seconds: float = _PLAIN_SECONDS,
        always: bool = False,
        live_only: bool = False,
    ) -> None:
        """Without a terminal, `always` also prints sources that only stream.

        `live_only` prints nothing there: the log has it all.
        """
        self._live_only = live_only
        self._console = console
        self._footer = footer
        self._plain_seconds = plain_seconds
        self._always = always
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._rate = Rate()
        self._plain: list[str] = []  # the state, where there is no terminal …
        self._printed: list[str] = []  # … and what was printed of it last
        self._due = 0.0

    def __enter__(self) -> "RunProgress":
        if self._live:
            self._live.start()
        else:
            self._print(self._footer)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()
        elif self._always:
            self._print_plain()

    def show(
        self, statuses: Sequence[Status], stats: Stats, sinks: Sequence[SinkStatus] = ()
    ) -> None:
        """Show the present state, if it is time to."""
        self._rate.note(stats.latest_sequence)
        if self._live:
            shown = [live_display(statuses, stats, rate=self._rate.per_second)]
            shown += [sinks_table(sinks)] if sinks else []
            self._live.update(Group(*shown, *map(Text, self._footer)))
            return
        if self._live_only:
            return
        printed = [s for s in statuses if self._always or s.copying]
        lines = [plain_line(status, stats, rate=self._rate.per_second) for status in printed]
        self._plain = [*lines, *map(sink_line, sinks)]
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._plain_seconds
            self._print_plain()

    def print_line(self, line: str) -> None:
        """Print a line, above the live display if there is one."""
        self._print([line])

    def _print_plain(self) -> None:
        self._print(line for line in self._plain if line not in self._printed)
        self._printed = self._plain

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class SinkProgress:
    """Shows how the sinks are doing in a live table, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "SinkProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, statuses: Sequence[SinkStatus]) -> None:
        """Show the present state."""
        if self._live:
            self._live.update(sinks_table(statuses))


class Bar:
    """Shows how far a command is, on a terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._shown = console.is_terminal

    def __enter__(self) -> "Bar":
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._live.stop()

    def show(self, done: int, total: int) -> None:
        """`done` of `total` are done; 0 of 0: the total is not known."""
        if not self._shown:
            return
        bar = ProgressBar(total=total or None, completed=done, width=30, pulse=not total)
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(self._title), bar, Text(f"{done:,} of {total:,}" if total else ""))
        self._live.update(line)


class Rate:
    """How fast a number grows, over the last few seconds."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._readings: list[tuple[float, int]] = []

    def note(self, number: int) -> None:
        """Record the present number."""
        now = time.monotonic()
        self._readings = [(at, n) for at, n in self._readings if now - at <= self._seconds]
        self._readings.append((now, number))

    @property
    def per_second(self) -> float:
        """The growth in a second."""
        (first, low), (last, high) = self._readings[0], self._readings[-1]
        return (high - low) / (last - first) if last > first else 0.0


def live_display(statuses: Sequence[Status], stats: Stats, *, rate: float) -> RenderableType:
    """The live display: sources, running snapshots, the log."""
    copies = [copy for status in statuses for copy in status.copies if not copy.done]
    parts: list[RenderableType] = [sources_table(statuses)]
    if copies:
        parts.append(_bars(copies))
    parts.append(
        Text(
            f"sequence {stats.latest_sequence:,}  {rate:,.0f} changes/s  {size(stats.total_bytes)}"
        )
    )
    return Group(*parts)


def plain_line(status: Status, stats: Stats, *, rate: float) -> str:
    """One source, where there is no terminal."""
    done = sum(copy.done for copy in status.copies)
    rows = sum(copy.rows for copy in status.copies)
    snapshot = f"snapshot {done} of {len(status.copies)} tables, {rows} rows"
    return (
        f"{status.source}: {status.phase}, {snapshot}; lag {size(status.lag_bytes)}, "
        f"{status.lag_seconds:.1f} s; sequence {stats.latest_sequence}, {rate:.0f} changes/s"
    )


def sources_table(statuses: Sequence[Status]) -> RenderableType:
    """A line a source, and below it what is wrong with it."""
    table = Table("source", "phase", "position", "lag", "snapshot", box=None, pad_edge=False)
    notes: list[Text] = []
    for status in statuses:
        done = sum(copy.done for copy in status.copies)
        table.add_row(
            status.source,
            Text(status.phase, style=_PHASE_STYLES.get(status.phase, "")),
            status.position,
            f"{size(status.lag_bytes)}, {status.lag_seconds:.1f} s" if status.position else "",
            f"{done} of {len(status.copies)} tables" if status.copies else "",
        )
        notes += [Text(line, style="red") for line in complaints(status)]
    return Group(table, *notes)


def sinks_table(statuses: Sequence[SinkStatus]) -> RenderableType:
    """A line a sink, and below it what is wrong with it."""
    table = Table("sink", "phase", "batch", "sequence", "rate", "lag", box=None, pad_edge=False)
    notes: list[Text] = []
    for status in statuses:
        table.add_row(
            status.sink,
            Text(status.phase, style=_SINK_STYLES.get(status.phase, "")),
            str(status.batch) if status.batch >= 0 else "",
            f"{status.sequence:,}" if status.sequence else "",
            f"{status.changes_per_second:,.0f} changes/s" if status.changes else "",
            "unknown" if status.lag is None else f"{status.lag:,} changes",
        )
        notes += [Text(line, style="red") for line in sink_complaints(status)]
        notes += [Text(line, style="yellow") for line in rescued_lines(status)]
        if verified := status.verified:
            style = "" if verified.sound else "red"
            notes.append(Text(f"{status.sink}: {verified.summary()}", style=style))
    return Group(table, *notes)


def erasure_parts(done: "Erasure") -> Iterator[RenderableType]:
    """What an erasure did, place by place, and what it could not do."""
    yield f"{done.table} {done.key}: {done.state}"
    yield f"searched for the row by its key, and for {done.values} of its values byte by byte" + (
        f"; {done.common} more are short or not its own alone" if done.common else ""
    )
    table = Table("place", "searched", "rewritten", "left", box=None, pad_edge=False)
    for place in done.places:
        left = str(len(place.left)) if place.left or place.searched else "-"
        table.add_row(place.place, place.searched or "-", str(place.rewritten), left)
    yield table
    for place in done.places:
        yield from (f"left: {place.place}: {left}" for left in place.left)
        yield from (f"{place.place}: {note}" for note in place.notes)
    yield from (f"note: {note}" for note in done.notes)
    if not done.complete:
        yield "values are left, or may be"
    elif done.found:
        yield "no value of the row is left"
    else:
        yield "nothing has such a row: look whether the key is right"


def preview_table(found: "Preview") -> RenderableType:
    """Changes as a sink sees them; values as JSON, so that they cannot move the cursor."""
    header = ("op", "sequence", *(f"{name}\n{kind}" for name, kind in found.columns.items()))
    table = Table(*header, box=None, pad_edge=False)
    for row in found.rows:
        values = [
            Text(msgspec.json.encode(row[name]).decode() if name in row else "")
            for name in found.columns
        ]
        table.add_row(row["op"], f"{row['sequence']:,}", *values)
    left = [Text(f"{found.hidden:,} of the changes that were read are not for the sink")]
    return Group(table, *(left if found.hidden else ()))


def sink_line(status: SinkStatus) -> str:
    """One sink, where there is no terminal."""
    lag = "unknown" if status.lag is None else f"{status.lag:,}"
    if status.batch < 0:
        return f"{status.sink}: {status.phase}, nothing stored yet; lag {lag}"
    return (
        f"{status.sink}: {status.phase}, batch {status.batch}, {status.changes:,} changes, "
        f"{status.changes_per_second:,.0f} changes/s; sequence {status.sequence}, lag {lag}"
    )


def sink_complaints(status: SinkStatus) -> list[str]:
    """What is wrong with a sink and its tables, and what to do."""
    lines = [f"{status.sink}: {status.error}"] if status.error else []
    if status.error and status.hint:
        lines.append(f"  {status.hint}")
    if status.dead_letters:
        lines.append(
            f"{status.sink}: {status.dead_letters:,} dead letters of {status.waiting_rows:,} rows"
        )
        lines.append(f"  Run `headrace redrive {status.sink}` to send them again.")
    for table in status.failed_tables:
        lines.append(f"{status.sink}: {table.table} is not followed: {table.reason}")
        lines += [f"  {table.hint}"] if table.hint else []
    lines += [f"{status.sink}: {status.catalog}"] if status.catalog else []
    return lines


def rescued_lines(status: SinkStatus) -> list[str]:
    """Which tables have values that their columns cannot hold."""
    return [
        f"{status.sink}: {table} has had {count:,} values that do not fit their columns: null "
        "there, with their text in _rescued"
        for table, count in status.rescued.items()
    ]


def redriven_lines(name: str, result: "RedriveResult") -> Iterator[str]:
    """What `redrive` prints."""
    tried = result.sent + result.refused + result.waiting
    if not tried and not result.reason:
        yield f"{name}: no dead letters"
        return
    yield f"{name}: sent {result.sent:,} of {tried:,} dead letters again; {result.left:,} are left"
    if result.refused:
        yield f"  {result.refused:,} were not accepted, {result.waiting:,} wait behind them:"
    for reason, count in result.reasons.items():
        yield f"    {count:,}: {reason}"
    if result.reason and result.reason not in result.reasons:
        yield f"  {result.reason}"


def verified_lines(found: "Verified") -> Iterator[str]:
    """What `verify` prints."""
    if found.last:
        yield (
            f"{found.sink}: sequences {found.first} to {found.last} stand for {found.expected:,} "
            f"events; {found.sent:,} were sent, {found.aside:,} became dead letters"
        )
    else:
        yield f"{found.sink}: nothing that was sent is to be compared"
    for title, spans in (
        ("missing", found.missing),
        ("more than there should be", found.surplus),
        ("may have come twice", found.repeated),
    ):
        for span in spans:
            yield f"  {title}: {span.events:,} events within {span.first} to {span.last}"
    for count, text in (
        (found.letters_missing, "dead letters are neither kept nor were sent again"),
        (found.retried, "events were sent again after no reply or a failure"),
        (found.redriven, "dead letters were sent later"),
        (found.to_come, "events are still to come"),
        (found.earlier_logs, "ranges are of an earlier log and cannot be compared"),
        (found.other_transforms, "ranges had other transforms and cannot be compared"),
    ):
        if count:
            yield f"  {count:,} {text}"
    if found.dead_letters:
        yield f"  {found.dead_letters:,} dead letters of {found.waiting_rows:,} rows wait"
    if found.trimmed:
        yield f"  up to {found.trimmed} the log no longer has what was sent"
    if found.trimmed and not found.last:
        yield "nothing could be compared: all that the sink has noted begins before the log does"
    else:
        yield "nothing is missing" if found.complete else "something is missing"


def complaints(status: Status) -> list[str]:
    """What is wrong with a source and its tables, and what to do."""
    lines = [f"{status.source}: {status.error}"] if status.error else []
    if status.error and status.hint:
        lines.append(f"  {status.hint}")
    lines += [
        f"{status.source}: {table} is not captured: {why}" for table, why in status.errored.items()
    ]
    lines += [
        f"{status.source}: {table} is captured for inserts only; all of it after: {fix}"
        for table, fix in status.inserts_only.items()
    ]
    lines += [f"{status.source}: {table} {FORMER}" for table in status.former]
    return lines + [f"{status.source}: {warning}" for warning in status.warnings]


def _bars(copies: Iterable[CopyProgress]) -> Table:
    table = Table.grid(padding=(0, 1))
    for copy in copies:
        total = float(copy.estimated_rows) if copy.estimated_rows > 0 else None
        bar = ProgressBar(total=total, completed=min(copy.rows, total or copy.rows), width=30)
        expected = f" of about {copy.estimated_rows:,}" if total else ""
        table.add_row(Text(copy.table), bar, Text(f"{copy.rows:,}{expected} rows"))
    return table


def finding_lines(findings: Iterable[Finding]) -> Iterator[Text]:
    """What `check` found, and the statements that fix it."""
    for finding in findings:
        mark = Text("✓ ", style="green") if finding.ok else Text("✗ ", style="bold red")
        yield Text("  ").append(mark).append(f"{finding.name}: {finding.detail}")
        if finding.fix:
            yield Text(f"      {finding.fix}", style="bold")


def pipeline_lines(overview: PipelineOverview) -> Iterator[RenderableType]:
    """What `status` prints of the pipeline."""
    reported = f"{datetime.fromtimestamp(overview.reported_at / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
    yield Text(
        f"pipeline: {overview.detail}" + (f"; as of {reported}:" if overview.reported_at else "")
    )
    if overview.sinks:
        yield sinks_table(overview.sinks)


def overview_lines(overview: Overview) -> Iterator[RenderableType]:
    """What `status` prints."""
    yield from _server_lines(overview)
    if overview.pipeline is not None:
        yield from pipeline_lines(overview.pipeline)


def _server_lines(overview: Overview) -> Iterator[RenderableType]:
    if overview.server:
        yield Text(f"server: {overview.server}, {overview.health}")
    else:
        yield Text("server: not running; this is what the log on disk knows")
    yield sources_table(overview.sources)
    if overview.log is None:
        yield Text("log: none yet")
        return
    stats = overview.log
    yield Text(
        f"log: {stats.count:,} changes, sequences {stats.first_sequence} to "
        f"{stats.latest_sequence}, {size(stats.total_bytes)}"
    )
    for reason in overview.room:
        yield Text(f"log: {reason}", style="yellow")
    for cursor in overview.cursors:
        behind = stats.latest_sequence - cursor.sequence
        yield Text(f"cursor {cursor.name}: at {cursor.sequence}, {behind:,} behind")


class _ShownChange(msgspec.Struct, frozen=True):
    """What a line shows of a canonical change."""

    sequence: int
    op: str
    source: str
    schema: str
    table: str
    before: msgspec.Raw  # null where there is none
    after: msgspec.Raw
    transaction: CanonicalTransaction


_decode_change = msgspec.json.Decoder(_ShownChange).decode


def key_lines(keys: Sequence[ListedKey]) -> Iterator[str]:
    """A line a key."""
    for key in keys:
        sees = ", ".join(key.tables) or "all tables"
        if key.tenant is not None:
            sees += f" of tenant {key.tenant}"
        until = "" if key.expires_at is None else f" until {_moment(key.expires_at)}"
        scopes = " ".join(key.scopes)
        yield f"{key.id}  {key.state}{until}  {scopes}  {sees}  {key.name}".rstrip()


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def change_line(encoded: bytes) -> str:
    """A canonical change on one line."""
    change = _decode_change(encoded)
    moment = datetime.fromtimestamp(change.transaction.commit_time / 1e6, UTC)
    name = table_path(change.schema, change.table) if change.table else change.source
    images = (str(image, "utf-8") for image in (change.after, change.before))
    row = next((image for image in images if image != "null"), "")
    if len(row) > _LONGEST_ROW:
        row = row[: _LONGEST_ROW - 1] + "…"
    clock = f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03d}"
    return f"{change.sequence:>8} {clock} {change.op:<8} {name} {row}"


def size(number: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def removal_lines(source: str, removals: Sequence[Removal], *, dry_run: bool) -> Iterator[str]:
    """What was taken out of a database, or the statements that would do it."""
    if not removals:
        yield f"{'-- ' if dry_run else ''}{source}: nothing of Headrace is in the database"
    for removal in removals:
        if dry_run:
            yield f"-- {removal.what}\n{removal.statement}"
        elif removal.error:
            yield f"✗ {removal.what}: {removal.error}\n    {removal.statement}"
        else:
            yield f"✓ removed {removal.what}"
