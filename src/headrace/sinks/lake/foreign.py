"""Commits of others in a table that Headrace writes: taken over, or the table fails.

Taken over, the rows being what the source has or fewer of them:

- files rewritten without a change of data: OPTIMIZE, Z-ORDER, REORG (dataChange is false);
- rows deleted, be it by vectors, whole files or a DELETE that rewrites files: they stay deleted
  until the source changes them;
- VACUUM, checkpoints, properties, comments, listed features without an effect;
- what has been undone before Headrace looks, such as by RESTORE;
- metadata from another process of the same writer, such as a command.

Everything else fails: rows that were added or changed, other columns, features that Headrace does
not write. Another Headrace that has taken over fences this one off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...errors import SinkFenced, TableFailed
from .deltalog import DataFile, DeltaCommit, DeltaLog, Metadata, TableState
from .features import expect_writable
from .storage import Folder

WRITER = "headrace.writer"
VERSION = "headrace.version"  # the transaction by which each of our commits names itself
SEQUENCE = "headrace.sequence:"  # … and one with changes how far they reach
LOG_GENERATION = "headrace.generation:"  # … in which generation of the log, as a number


def judge(uri: str, before: TableState, commits: Sequence[DeltaCommit], owner: str) -> TableState:
    """The state after commits that followed ours."""
    state, added = before, dict[str, DeltaCommit]()
    for commit in commits:
        _expect_not_ours(uri, commit)
        added |= _moved(before, commit, added)
        added |= dict.fromkeys(_new_rows(before, state, commit), commit)
        state = state.after([commit])
    writer = state.metadata.configuration.get(WRITER)
    if writer not in (owner, None):
        raise SinkFenced(
            f"another pipeline has taken over the Delta table {uri}; this batch was not committed"
        )
    expect_writable(uri, state.protocol, state.metadata)
    if left := [commit for path, commit in added.items() if path in state.files]:
        raise _failed(uri, before, left[0], "added or changed rows")
    restores = [each for each in commits if each.info.get("operation") == "RESTORE"]
    if restores and _rows(before) != _rows(state):
        raise _failed(uri, before, restores[-1], "brought back an older state")
    if writer is None or _shape(before.metadata) != _shape(state.metadata):
        last = next(c for c in reversed(commits) if any(a.meta_data for a in c.actions))
        raise _failed(uri, before, last, "changed the columns or replaced the table")
    return state


def _ours(commit: DeltaCommit) -> bool:
    """Whether a commit is Headrace's, of any process and version."""
    names = (action.txn.app_id for action in commit.actions if action.txn)
    return any(name == VERSION or name.startswith(SEQUENCE) for name in names)


def judge_since_ours(folder: Folder, state: TableState, owner: str) -> bool:
    """Look at what others have committed after our last commit; False: nothing."""
    log = DeltaLog(folder)
    last = state.transactions.get(VERSION)
    known = last is not None
    if last is None:  # made before commits named themselves
        last = _last_of_ours(log, state.version)
    if last >= state.version:
        return False
    try:
        before = log.read(last)
    except TableFailed as error:
        raise TableFailed(
            f"the Delta table {folder.uri} was changed by another tool after version {last}, and "
            "its log no longer says how"
        ) from error
    assert before is not None
    if not known:
        before = replace(before, metadata=state.metadata)
    commits = [each for each in log.commits(last) if each.version <= state.version]
    judge(folder.uri, before, commits, owner)
    return True


def _last_of_ours(log: DeltaLog, version: int) -> int:
    """The last commit with changes of ours; the given version, if the log knows of none."""
    at = version
    while (commit := log.commit(at)) is not None:
        if _ours(commit):
            return at
        at -= 1
    return version


def _expect_not_ours(uri: str, commit: DeltaCommit) -> None:
    if _ours(commit) and (commit.adds or commit.removes):
        raise SinkFenced(
            f"another pipeline has just written the Delta table {uri}; this batch was not committed"
        )


def _new_rows(before: TableState, state: TableState, commit: DeltaCommit) -> list[str]:
    """The files of a commit that may hold rows that the table did not have."""
    added, moved = (
        [DataFile.of(each) for each in commit.adds if each.data_change is changed]
        for changed in (True, False)
    )
    removed = [state.files.get(DataFile.path_of(each.path)) for each in commit.removes]
    if any(
        file is None or file.vector != each.deletion_vector
        for file, each in zip(removed, commit.removes, strict=True)
    ):
        # It has read an earlier version: rows that were replaced since may be back.
        had = {path: file.vector for path, file in before.files.items()}
        return [f.path for f in (*added, *moved) if f.path not in had or had[f.path] != f.vector]
    most = sum(file.live for file in removed if file)
    new = [file for file in added if not _less(before.files.get(file.path), file)]
    if commit.info.get("operation") == "DELETE" and sum(file.live for file in new) <= most:
        new = []
    # An append may say, too, that it changes no data.
    fresh = [file for file in moved if not _less(state.files.get(file.path), file)]
    if sum(file.live for file in fresh) > most:
        new += fresh
    return [file.path for file in new]


def _moved(
    before: TableState, commit: DeltaCommit, added: Mapping[str, DeltaCommit]
) -> dict[str, DeltaCommit]:
    """The files into which a commit may have moved rows that an earlier one has added."""
    paths = (DataFile.path_of(each.path) for each in commit.removes)
    origin = next((added[path] for path in paths if path in added), None)
    if origin is None:
        return {}
    files = [DataFile.of(each) for each in commit.adds]
    return {file.path: origin for file in files if not _less(before.files.get(file.path), file)}


def _less(before: DataFile | None, now: DataFile) -> bool:
    """Whether a file has the rows that it had, or fewer."""
    if before is None:
        return False
    # The same file, so that the log need not say again how many rows it has.
    counted = msgspec.structs.replace(now, rows=before.rows)
    return before.vector == now.vector or counted.live < before.live


def _rows(state: TableState) -> dict[str, Any]:
    """What says which rows a table has."""
    return {path: file.vector for path, file in state.files.items()}


def _shape(metadata: Metadata) -> tuple[Any, ...]:
    fields = msgspec.json.decode(metadata.schema_string)["fields"]
    columns = [(each["name"], each["type"], each["nullable"]) for each in fields]
    return metadata.id, metadata.partition_columns, columns


def _failed(uri: str, before: TableState, commit: DeltaCommit, what: str) -> TableFailed:
    info = commit.info
    operation, engine = info.get("operation", "an operation"), info.get("engineInfo", "a tool")
    when = ""
    if isinstance(moment := info.get("timestamp"), int):
        when = f" at {datetime.fromtimestamp(moment / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return TableFailed(
        f"{operation} by {engine}{when} {what} in the Delta table {uri} (version {commit.version})",
        hint="Run `headrace snapshot SOURCE TABLE`: the table is filled anew and goes on. What is "
        f"no table of a source can be restored to version {before.version}.",
    )
