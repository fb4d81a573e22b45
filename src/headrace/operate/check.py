"""Everything that `headrace check` looks at, in one pass: nothing ends with the first finding."""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from ..change.event import Table
from ..config import Config, PipelineSection
from ..errors import ConfigError, HeadraceError, ServerError, SourceError
from ..model import Model
from ..plugins import Finding
from ..run import check_model, server_settings
from ..sinks import Sink
from ..sinks.lake.disk import check_folder
from ..sinks.lake.modes import difference
from ..sources import Source
from ..sources.redact import ColumnRules, stored_tables
from ..transforms.rules import Selected
from .commands import connect
from .parts import sink_named

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 8
_one_java = threading.Lock()  # its arguments are in this process's environment while it starts
_CONNECT_SECONDS = 5.0
_MASTER = re.compile(
    r"local|local\[(\*|[1-9]\d*)(,[1-9]\d*)?\]|yarn|spark://[^/,]+:\d+(,[^/,]+:\d+)*|k8s://.+"
)


class CheckReport(msgspec.Struct, frozen=True):
    """What was found, part by part."""

    ok: bool
    warnings: list[str]
    findings: dict[str, list[Finding]]


def check_everything(config: Config, check_java: Callable[[], Finding]) -> CheckReport:
    """Look at this machine, every source, the model, the pipeline and every sink."""
    parts: dict[str, Callable[[], list[Finding]]] = {"this machine": lambda: _machine(config)}
    for source in config.sources:
        parts[source.name] = _source_check(source)
    if config.model != Model():
        parts["model"] = lambda: _model(config)
    if (section := config.pipeline) is not None:
        parts["pipeline"] = lambda: [check_java(), *_pipeline(config, section)]
        tables = _captured(config)
        for sink in section.sinks:
            parts[f"sink {sink.name}"] = _sink_check(config, sink, tables)
        if tables and any(each.computes for s in section.sinks for each in s.transforms.values()):
            parts["transforms"] = lambda: _computed(section.sinks, tables)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        waiting = {name: threads.submit(_found, look) for name, look in parts.items()}
    findings = {name: each.result() for name, each in waiting.items()}
    ok = all(finding.ok for found in findings.values() for finding in found)
    return CheckReport(ok, [*config.warnings, *_open_lakes(config)], findings)


def _open_lakes(config: Config) -> list[str]:
    """Warnings of lakes that other users may read, though their sinks do not say so."""
    sinks = config.pipeline.sinks if config.pipeline else ()
    given = [(sink.name, getattr(sink, "path", ""), getattr(sink, "mode", "")) for sink in sinks]
    found = [(name, difference(path, mode)) for name, path, mode in given if path and mode]
    return [f"sink {name}: {warning}" for name, warning in found if warning]


def _found(look: Callable[[], list[Finding]]) -> list[Finding]:
    """What a look finds; one that fails is a finding too."""
    try:
        return look()
    except HeadraceError as error:
        return [Finding("check", ok=False, detail=error.explain(), fix=error.hint)]


def _machine(config: Config) -> list[Finding]:
    return [check_folder("data_dir", config.data_dir), _check_server(config)]


def _model(config: Config) -> list[Finding]:
    """Whether the model names only what the sources have."""
    try:
        check_model(config)
    except SourceError as error:
        return [Finding("model", False, f"cannot be compared with the tables: {error}")]
    except ConfigError as error:
        return [Finding("model", False, str(error), fix="Fix these settings, or the tables.")]
    return [Finding("model", True, "names only tables and columns that there are")]


def _pipeline(config: Config, section: PipelineSection) -> Iterator[Finding]:
    yield _master(section.master)
    if section.checkpoint_address:
        yield _storage(section)
    else:
        yield check_folder("checkpoint_dir", config.checkpoint_dir)
    if section.url:
        yield _log_server(config, section.url)


def _master(master: str) -> Finding:
    if not _MASTER.fullmatch(master):
        fix = "Set pipeline.master to local[*], local[4], spark://HOST:7077, yarn or k8s://…."
        return Finding("master", ok=False, detail=f"{master} is no master of Spark", fix=fix)
    if not master.startswith("spark://"):
        return Finding("master", ok=True, detail=master)
    refused = [why for each in master[len("spark://") :].split(",") if (why := _refusal(each))]
    ok = len(refused) <= master.count(",")
    fix = "" if ok else "Start the master, or set pipeline.master to where it is."
    detail = master if ok else f"{master} does not answer: {refused[0]}"
    return Finding("master", ok=ok, detail=detail, fix=fix)


def _storage(section: PipelineSection) -> Finding:
    """Whether Java can write checkpoints where the config says."""
    # Only here: to start Java takes a while, and most checkpoints are on a disk.
    from ..pipeline.hadoop import check_storage  # noqa: PLC0415

    settings = {name: value.reveal() for name, value in section.spark.items()}
    with _one_java:
        return check_storage(section.checkpoint_address, settings)


def _log_server(config: Config, url: str) -> Finding:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    why = _refusal(f"{parts.hostname}:{port}")
    fix = "Start the server there, or set pipeline.url to where it is."
    if why:
        return Finding("url", ok=False, detail=f"{url} does not answer: {why}", fix=fix)
    return Finding("url", ok=True, detail=f"{url} answers")


def _refusal(address: str) -> str:
    """Why nothing listens at an address; "": something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


# --- sources -------------------------------------------------------------------------------------


def _source_check(source: Source) -> Callable[[], list[Finding]]:
    def look() -> list[Finding]:
        return [*_found(source.check), *_found(lambda: list(_columns(source)))]

    return look


def _columns(source: Source) -> Iterator[Finding]:
    """Whether what a source leaves out or masks is there, and its tables stay tables."""
    rules = ColumnRules.of_source(source)
    if not rules:
        return
    tables = source.captured_tables()
    hidden = [table for table in tables if rules.of(table).stored.hidden]
    for pattern in rules.unmatched(tables):
        yield Finding("columns", ok=False, detail=f"no column matches {pattern}", fix="Correct it.")
    for column, parent in rules.copies(tables):
        yield Finding(
            "columns",
            ok=False,
            detail=f"{column} has values of {parent}, which is left out or masked",
            fix=f"Add it to exclude_columns or mask of {source.name}, or `{column}: keep` to mask.",
        )
    yield Finding(
        "columns", ok=True, detail=f"left out or masked in {len(hidden)} of {len(tables)} tables"
    )


# --- sinks ---------------------------------------------------------------------------------------


def _captured(config: Config) -> list[Table] | None:
    """The tables of all sources; None: a database does not answer, which is its own finding."""
    try:
        return [table for source in config.sources for table in stored_tables(source)]
    except HeadraceError:
        return None


def _sink_check(
    config: Config, sink: Sink, tables: Sequence[Table] | None
) -> Callable[[], list[Finding]]:
    def look() -> list[Finding]:
        found = _found(sink_named(config, sink.name).check)
        return [*found, *_globs(sink, tables), *_transforms(sink, tables)]

    return look


def _globs(sink: Sink, tables: Sequence[Table] | None) -> Iterator[Finding]:
    """The patterns of a sink that no table matches: perhaps they are misspelt."""
    if not tables or not sink.tables:
        return
    lost = [glob for glob in sink.tables if not any(table.matches(glob) for table in tables)]
    if lost:
        there = sorted({table.path for table in tables})
        shown = ", ".join(there[:10]) + (" …" if len(there) > 10 else "")
        fix = f"Check `tables` of the sink; there are: {shown}"
        yield Finding("tables", ok=False, detail=f"no table matches {', '.join(lost)}", fix=fix)
    else:
        yield Finding("tables", ok=True, detail="every pattern matches a table")


def _transforms(sink: Sink, tables: Sequence[Table] | None) -> Iterator[Finding]:
    """What each transform makes of the columns of its tables."""
    if not sink.shaping:
        return
    # Only here: pyarrow comes with a pipeline.
    from ..transforms.shape import fitted, result_schema  # noqa: PLC0415

    wanted = [
        table
        for table in tables or ()
        if not sink.tables or any(table.matches(glob) for glob in sink.tables)
    ]
    used: dict[str, set[str]] = {pattern: set() for pattern in sink.transforms}
    for table in wanted:
        found = sink.shaping.of(table.schema, table.name)
        if found is None:
            continue
        name = f"transforms {table.path}"
        used[found[0]].add("")
        if found[1].computes:
            continue  # see `_computed`
        try:
            columns = sink.keyed(table.path, table.columns)
            selected = fitted(sink.shaping, table.schema, table.name, columns, table.connector)
        except HeadraceError as error:
            yield Finding(name, ok=False, detail=str(error), fix=error.hint)
            used[found[0]] |= set(found[1].mask)  # it is reported already
            continue
        assert selected
        used[found[0]] |= set(selected.masks)
        yield Finding(
            name, ok=True, detail=_shown(selected, result_schema(selected, table.connector))
        )
    for pattern, masks in used.items() if tables else ():
        lost = [
            each
            for each in sink.transforms[pattern].mask
            if each.lower() not in map(str.lower, masks)
        ]
        if not masks or lost:
            what = f"mask names {lost[0]}, which no table has" if masks else "no table gets it"
            fix = (
                "Correct the name; the name of a table comes before a pattern, then the first one."
            )
            yield Finding(f"transforms {pattern}", ok=False, detail=what, fix=fix)


def _computed(sinks: Sequence[Sink], tables: Sequence[Table]) -> list[Finding]:
    """What Spark makes of the tables that it is to compute."""
    # Only here: to start Spark takes a while, and most configs have no such transform.
    from ..pipeline.computed import check_computed  # noqa: PLC0415

    with _one_java:
        return check_computed(sinks, tables)


def _shown(selected: Selected, schema: "pa.Schema") -> str:
    """The columns that a transform leaves, and what happens to them."""
    masks = {name: " masked" if mask else " null" for name, mask in selected.masks.items()}
    columns = ", ".join(f"{each.name} {each.type}{masks.get(each.name, '')}" for each in schema)
    return f"{columns} where {selected.rule.where}" if selected.rule.where else columns


# --- the server ----------------------------------------------------------------------------------


def _check_server(config: Config) -> Finding:
    server = config.server
    try:
        needs = "; clients need an API key" if server_settings(config).key_required else ""
        if connect(config) is not None:
            return Finding("server", True, f"runs at {server.url}{needs}")
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        socket.create_server((server.host, server.port), family=family).close()
    except (ConfigError, ServerError) as error:
        return Finding("server", False, str(error), fix=error.hint)
    except OSError as error:
        detail = f"cannot listen on {server.host} port {server.port}: {error.strerror}"
        return Finding("server", False, detail, fix="Set another server.host or server.port.")
    return Finding("server", True, f"port {server.port} on {server.host} is free{needs}")
