"""One row's values erased from everything that Headrace has stored, and searched for afterwards.

    find the row in the log ─▶ sinks ─▶ log ─▶ search every file

The log comes last: it knows which changes the row had, so that an erasure that was interrupted can
be repeated. Nothing else may run: RocksDB has one writer, and so has every table.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from ..change.erasure import KeyValues, ValuePattern
from ..change.event import Table
from ..config import Config
from ..errors import ConfigError, DecodeError, LogError, ServerError
from ..log import Log, LogReader, backup
from ..log.erasure import (
    LogSearch,
    RowHistory,
    ValueSpread,
    find,
    former_names,
    search,
    spread,
    valued,
    versions_of,
)
from ..log.erasure import erase as erase_in_log
from ..sinks.checkpoints import noting_sinks
from ..sinks.erasing import ErasedPlace, ErasedRow
from ..sources.redact import ColumnRules
from .commands import connect
from .parts import sink_named
from .stale_rows import remove_stale_rows

_CHUNK = 16 << 20  # bytes of a file that are searched at a time
_ASIDE = "-until-"
_TRIGGERS = ("sqlite", "postgres_events")
NOTES = (
    "backups of the log and of the sinks are yours to erase or to let expire",
    "storage may keep what was deleted: versions of objects in a bucket, snapshots of a disk",
)


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """What an erasure did."""

    table: str
    key: str
    state: str  # what the log says of the row
    found: bool  # whether anything had it; else the key may be another
    values: int  # that were searched for, beside the row itself
    common: int  # values that are too short to search for, or that other rows have too
    places: list[ErasedPlace]
    notes: list[str]

    @property
    def complete(self) -> bool:
        """Whether no place has, or may have, values of the row."""
        return not any(place.left for place in self.places)


class EraseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which row."""

    table: str
    key: str  # the value, or a JSON object of the key's columns
    source: str = ""  # "": the only one that has the table
    keep_last: bool = False  # the row is still there: the values that it has now stay


def erase(config: Config, request: EraseRequest) -> Erasure:
    """Erase a row's values; what was interrupted is finished by the next call."""
    _expect_alone(config)
    LogReader.open(config.log_dir).close()  # opening for writing would create a log
    with ExitStack() as held:
        held.enter_context(backup.alone(config.data_dir))
        if config.pipeline is not None:
            # Only here: a log without a pipeline needs no Spark.
            from ..pipeline.checkpoint import alone_in  # noqa: PLC0415

            held.enter_context(alone_in(config.checkpoint_dir))
        log = held.enter_context(Log.open(config.log_dir))
        for stale in config.data_dir.glob(f"{backup.STAGE}*"):
            shutil.rmtree(stale)  # a backup that was cut short
        remove_stale_rows(config.verify_dir)
        done, texts = _erase(config, log, request)
    # Closed, RocksDB has deleted what it no longer needs.
    return msgspec.structs.replace(done, places=[*done.places, *_files(config, texts)])


def _expect_alone(config: Config) -> None:
    if config.remote is not None:
        raise ConfigError("a row is erased on the machine that has the log; leave --url out")
    client = connect(config)
    if client is not None:
        raise ServerError(
            f"a server runs at {client.url}, and files cannot be rewritten under it",
            hint="Stop `headrace run`, erase the row, then start it again: it resumes by itself.",
        )


def _erase(config: Config, log: Log, request: EraseRequest) -> tuple[Erasure, frozenset[str]]:
    versions = versions_of(log, request.table, request.source)
    table = versions[-1]
    history, plain = _histories(config, log, versions, key_of(table, request.key))
    _expect_copied(config, log, history)
    _expect_gone(history, request)
    found = spread(log, history)
    places = list[ErasedPlace]()
    if config.pipeline is not None:
        row = replace(erased_row(log, history, found.own), keep_last=request.keep_last)
        for sink in config.pipeline.sinks:
            places += sink_named(config, sink.name).erase(row)
    count = erase_in_log(log, history)
    after = search(log, versions, history)
    former = {
        name: count
        for name, others in former_names(log, table).items()
        if (count := valued(log, others, history.key))
    }
    places.insert(0, _log_place(history, count, after, plain, former))
    erasure = Erasure(
        table=table.path,
        key=request.key,
        state=_state(history),
        found=history.last is not None or any(place.rewritten or place.has_row for place in places),
        values=len(found.own),
        common=len({text for _, text in history.values()}) - len(found.own),
        places=[*places, *_removed_sinks(config)],
        notes=list(_notes(history, found, after)),
    )
    return erasure, found.own - after.annotations  # those are named already


def key_of(table: Table, given: str) -> KeyValues:
    """The key that was meant."""
    name, names = table.path, list(table.key)
    if not names:
        raise ConfigError(
            f"{name} has no key, so no row of it can be named",
            hint="Trim the log, and reset the sinks that have its rows.",
        )
    if given.lstrip().startswith("{"):
        try:
            key = KeyValues.of(given)
        except msgspec.DecodeError as error:
            raise ConfigError("the key is no JSON object") from error
        if set(key.texts) != set(names):
            raise ConfigError(f"the key of {name} has the columns {', '.join(names)}")
        return key
    if len(names) > 1:
        example = ", ".join(f'"{each}": …' for each in names)
        raise ConfigError(
            f"the key of {name} has the columns {', '.join(names)}",
            hint=f"Write it as a JSON object: '{{{example}}}'.",
        )
    return KeyValues({names[0]: given})


def _histories(
    config: Config, log: LogReader, versions: Sequence[Table], given: KeyValues
) -> tuple[RowHistory, RowHistory | None]:
    """What the log has of the row, and under the key as it was before its source masked it."""
    chosen = _chosen_keys(config, versions[-1])
    key = _stored_key(config, versions[-1], given)
    history = find(log, versions, key, chosen)
    if key == given:
        return history, None
    plain = find(log, versions, given, chosen)
    if history.last is None and plain.last is not None:
        return plain, None  # it was given as it is stored
    return history, plain


def _stored_key(config: Config, table: Table, given: KeyValues) -> KeyValues:
    """The key as the log has it: with codes in place of values that its source masks."""
    rules = [ColumnRules.of_source(each) for each in config.sources if each.name == table.source]
    masks = rules[0].of(table).masks if rules else {}
    texts = {
        name: mask.code(text) if (mask := masks.get(name)) else text
        for name, text in given.texts.items()
    }
    return KeyValues(texts)


def _chosen_keys(config: Config, table: Table) -> frozenset[str]:
    """The columns, beside the key, by which sinks find their rows.

    A sink that is behind, or begins anew, cannot follow the row's changes without them.
    """
    name = table.path
    sinks = config.pipeline.sinks if config.pipeline else ()
    chosen = {
        column.name for sink in sinks for column in sink.keyed(name, table.columns) if column.key
    }
    return frozenset(chosen - set(table.key))


def _expect_copied(config: Config, log: LogReader, history: RowHistory) -> None:
    """Refuse while a snapshot has emptied the table, and may not have read the row yet."""
    table = history.table.path
    if not history.emptied_away:
        return
    for source in config.sources:
        if source.name == history.table.source:
            copies = source.describe(log.resume(source.name)).copies
            if any(copy.table == table and not copy.done for copy in copies):
                raise LogError(
                    f"a snapshot of {table} is not finished, so the log does not know whether the "
                    "row is still in its source",
                    hint="Start `headrace run`, wait until `headrace status` shows the snapshot "
                    "as done, then stop it and erase the row.",
                )


def _expect_gone(history: RowHistory, request: EraseRequest) -> None:
    last = history.last
    if last is None or history.gone or request.keep_last:
        return
    raise LogError(
        f"the row is still in its source, as far as the log knows: its last change is {last.op} "
        f"at sequence {last.sequence}",
        hint="Delete it in the source, let `headrace run` capture that, then erase it. If its "
        "values were overwritten there instead, use --keep-last: all but the last ones are erased.",
    )


def erased_row(log: LogReader, history: RowHistory, texts: frozenset[str]) -> ErasedRow:
    """The row as sinks must know it."""
    epochs = {each.epoch: each.sequence for each in log.ancestors}
    own = [change.key for change in history.changes if history.key.are_in(change.key)]
    return ErasedRow(
        table=history.table,
        key=own[-1] if own and own[-1] else _written_key(history.table, history.key),
        kept=history.kept,
        known=history.last is not None,
        epochs={**epochs, log.epoch: log.latest_sequence},
        first=log.first_sequence,
        changes=history.changes,
        texts=texts,
    )


def _written_key(table: Table, key: KeyValues) -> bytes:
    """A key as JSON, as its source would write it: the log has no change that shows it."""
    # Only here, as above: no pyarrow.
    from ..change.arrow import decode  # noqa: PLC0415

    parts: dict[str, msgspec.Raw] = {}
    for column in (column for column in table.columns if column.key):
        text = key.texts[column.name]
        quoted = msgspec.json.encode(text)
        for form in (text.encode(), quoted):
            try:
                image = b"{%b:%b}" % (msgspec.json.encode(column.name), form)
                decode([image], [column], connector=table.connector)
            except DecodeError:
                continue
            parts[column.name] = msgspec.Raw(form)
            break
        else:
            raise ConfigError(f"{column.name} is of type {column.type}, and the key is not")
    return msgspec.json.encode(parts)


def _state(history: RowHistory) -> str:
    last = history.last
    if last is None:
        return "the log has no change of it"
    if history.gone:
        return f"deleted, by the log; its {len(history.changes)} changes keep their key alone"
    return f"still there: change {last.sequence} keeps its new values, the others their key alone"


def _log_place(
    history: RowHistory,
    count: int,
    found: LogSearch,
    plain: RowHistory | None,
    former: Mapping[str, int],
) -> ErasedPlace:
    """`plain`: what the log has under the key as it was before its source masked it.

    `former`: how many changes have the row's values under other names of its table.
    """
    left = [f"change {each} has values" for each in found.left]
    left += [f"the disk may have an older copy of change {each}" for each in found.copies]
    if plain is not None and plain.changes:
        left.append(
            f"{len(plain.changes)} changes have the key as it was before it was masked: they go "
            "when `headrace trim` removes them"
        )
    left += [
        f"{each} changes are of {name}, another name of the table: they go when `headrace trim` "
        "removes them, and the sinks have them under that name"
        for name, each in sorted(former.items())
    ]
    if history.rekeyed:
        left.append(
            f"{history.rekeyed} changes with values of this key are of a time when the table had "
            "another one: they go when `headrace trim` removes them"
        )
    if history.undecoded:
        left.append(
            f"{history.undecoded} rows of the table could not be decoded, and one may be this row: "
            "they go when `headrace trim` removes their changes"
        )
    left += [
        f"{name} keeps its values, because a sink finds its rows by it (its setting keys)"
        for name in history.staying
    ]
    return ErasedPlace(
        place="log",
        searched=f"{history.searched} changes",
        rewritten=count,
        left=tuple(left),
    )


def _notes(history: RowHistory, found: ValueSpread, after: LogSearch) -> Iterator[str]:
    if found.copies:
        tables = ", ".join(f"{table} ({count})" for table, count in sorted(found.copies.items()))
        yield f"changes of other rows have a value that is equal to one of the row's: {tables}"
    if after.annotated:
        yield (
            f"annotations of {len(after.annotated)} of its changes (metadata, which the "
            "application has written) have an equal value, and stay"
        )
    for other in history.others:
        yield f"the row has had another key, {other}: erase that one too, if it is the same person"
    if history.table.connector in _TRIGGERS:
        yield (
            "the source's own table of events (written by triggers) is not touched; entries leave "
            "it some time after they were captured"
        )
    yield from NOTES


def _removed_sinks(config: Config) -> Iterator[ErasedPlace]:
    """Sinks that the config no longer has: nobody knows where they wrote."""
    known = {sink.name for sink in config.pipeline.sinks} if config.pipeline else set()
    for name in noting_sinks(config.checkpoint_dir):
        if name not in known:
            left = "it is not in the config, so what it has stored is as it was"
            yield ErasedPlace(place=f"sink {name}", left=(left,))


# --- every file ----------------------------------------------------------------------------------


def _files(config: Config, texts: frozenset[str]) -> Iterator[ErasedPlace]:
    """Search what Headrace keeps for itself, whatever it is."""
    folders = {"data_dir": config.data_dir, "checkpoint_dir": config.checkpoint_dir}
    if config.checkpoint_dir.resolve().is_relative_to(config.data_dir.resolve()):
        del folders["checkpoint_dir"]
    pattern = ValuePattern(texts)
    for setting, folder in folders.items():
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        left = [f"{path}: an equal value" for path in files if _has(path, pattern)]
        aside = {_aside(path) for path in files if path.suffix in (".parquet", ".jsonl")}
        left += [
            f"{path}: what a reset has moved aside; delete it" for path in sorted(aside) if path
        ]
        yield ErasedPlace(
            place=f"{setting}, every file", searched=f"{len(files)} files", left=tuple(left)
        )


def _aside(path: Path) -> str:
    """The folder that was moved aside in which a file lies; "": it lies in none."""
    parts = [at for at, part in enumerate(path.parts, 1) if _ASIDE in part]
    return str(Path(*path.parts[: parts[0]])) if parts else ""


def _has(path: Path, pattern: ValuePattern) -> bool:
    if path.suffix == ".parquet":
        # Only here: a log without a pipeline needs no pyarrow.
        from ..sinks.lake.erasure import parquet_has  # noqa: PLC0415

        return parquet_has(path, pattern)
    before = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if pattern.found_in(before + chunk):
                return True
            before = chunk[-pattern.longest :]
    return False
