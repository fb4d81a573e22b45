"""Who may read a lake: its user alone, unless its sink says otherwise."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.terminal import open_lakes
from headrace.config import sink_class
from headrace.errors import ConfigError
from headrace.sinks import Sink
from headrace.sinks.lake.modes import difference, umask_of

KINDS = ["tables", "history", "files"]


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """That of most users, under which everybody could read what is made."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def sink(kind: str, path: Path, **settings: Any) -> Sink:
    made: Any = sink_class(kind)
    found: Sink = made(name="lake", path=str(path), **settings)
    return found


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


@pytest.mark.requirement("P-17")
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_lake_is_for_its_user_alone_unless_its_mode_says_otherwise(
    kind: str, tmp_path: Path
) -> None:
    sink(kind, tmp_path / "own").open("me")
    assert mode(tmp_path / "own") == "700"
    os.umask(0o077)
    sink(kind, tmp_path / "shared", mode="0755").open("me")
    assert mode(tmp_path / "shared") == "755"


@pytest.mark.parametrize(("given", "kept"), [(0o077, 0o027), (0o022, 0o022)])
def test_the_umask_of_lakes_only_ever_opens(given: int, kept: int) -> None:
    os.umask(given)
    open_lakes(0o027)
    assert os.umask(0o022) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_lake_stays_and_is_warned_of(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        sink(kind, tmp_path).open("me")
    assert mode(tmp_path) == "755"
    [warning] = caplog.messages
    assert f"{tmp_path} is open to other users (mode 0755): run `chmod 0700 {tmp_path}`" in warning
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        sink(kind, tmp_path, mode="0755").open("me")
    assert caplog.messages == []


def test_files_may_be_read_by_whoever_may_read_one_of_the_folders(tmp_path: Path) -> None:
    own, group = sink("tables", tmp_path / "a"), sink("history", tmp_path / "b", mode="750")
    assert umask_of([own]) == 0o077
    assert umask_of([own, group]) == 0o027
    (tmp_path / "old").mkdir(mode=0o755)
    assert umask_of([own, sink("files", tmp_path / "old")]) == 0o022, "its readers go on reading"
    assert umask_of([sink("tables", Path("s3://b/lake"))]) == 0o077


def test_a_mode_that_came_later_is_not_applied_but_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert "chmod -R u=rwX,go=rX" in difference(str(tmp_path), "0755")
    assert difference(str(tmp_path), "0700") == ""
    assert difference(str(tmp_path / "absent"), "0700") == ""


@pytest.mark.parametrize("given", ["755 ", "0644", "rwx", "", "1777", "0788"])
def test_a_mode_that_is_none_is_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no mode of a folder"):
        sink("tables", tmp_path, mode=given)
