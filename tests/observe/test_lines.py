"""The lines of a log: logfmt that any parser reads, or JSON; a field for each named value."""

import io
import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.observe.lines import LineFormatter, LogFormat, is_line, level_of, parts_of
from headrace.operate.show import Journal

PAIR = re.compile(r'([^\s"=\x00-\x1f]+)=(?:("(?:[^"\\\n]|\\.)*")|([^\s"=\x00-\x1f]+))(?: |$)')


def parsed(line: str) -> dict[str, str]:
    """A line of logfmt, read as strictly as its grammar is; every byte belongs to a pair."""
    found, rest = {}, line
    while rest:
        match = PAIR.match(rest)
        assert match is not None, f"no logfmt from {rest!r}"
        key, quoted, bare = match.groups()
        assert key not in found, line
        found[key] = json.loads(quoted) if quoted else bare
        rest = rest[match.end() :]
    return found


def record(template: str, *values: Any, name: str = "headrace.run", **more: Any) -> Any:
    given_info = more.pop("exc_info", None)
    return logging.LogRecord(name, logging.WARNING, "", 0, template, values, given_info)


def text(template: str, *values: Any, **more: Any) -> dict[str, str]:
    line = LineFormatter(LogFormat.TEXT).format(record(template, *values, **more))
    assert is_line(line, LogFormat.TEXT)
    return parsed(line)


def as_json(template: str, *values: Any, **more: Any) -> dict[str, Any]:
    line = LineFormatter(LogFormat.JSON).format(record(template, *values, **more))
    assert is_line(line, LogFormat.JSON)
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("template", "values", "message", "fields"),
    [
        ("source=%s phase=%s", ("shop", "streaming"), "", {"source": "shop", "phase": "streaming"}),
        ("%s was open (mode %o)", ("/data", 0o755), "/data was open (mode 755)", {}),
        (
            "source=%s halted, it is served; error=%s; hint=%s",
            ("shop", "slot gone", ""),
            "halted, it is served",
            {"source": "shop", "error": "slot gone", "hint": ""},
        ),
        ("it ended code=%d wait=%g", (1, 0.5), "it ended", {"code": 1, "wait": 0.5}),
        ("lost=%d-%d first_kept=%d", (1, 4, 5), "", {"lost": "1-4", "first_kept": 5}),
        ("lost=%s, which are gone", ("1-4",), "which are gone", {"lost": "1-4"}),
        ("%s=%s reset by=%s", ("sink", "lake", "me"), "reset", {"sink": "lake", "by": "me"}),
        ("refused=%d: as many are open", (3,), "as many are open", {"refused": 3}),
        ("did not stop within %d s", (20,), "did not stop within 20 s", {}),
        ("request=%s path=/v1/stream", ("7",), "", {"request": "7", "path": "/v1/stream"}),
        ("rate=%.0f of 100%%", (12.6,), "of 100%", {"rate": "13"}),
        ("level=%s by=%s by=%s", ("x", "a", "b"), "", {"level_": "x", "by": "a", "by_": "b"}),
    ],
)
def test_named_values_become_fields_and_the_rest_the_message(
    template: str, values: tuple[Any, ...], message: str, fields: dict[str, Any]
) -> None:
    assert parts_of(record(template, *values)) == (message, fields)
    shown = text(template, *values)
    assert {key: shown[key] for key in fields} == {key: str(v) for key, v in fields.items()}
    assert shown.get("msg", "") == message
    assert shown["level"] == "warning"
    read = as_json(template, *values)
    assert {key: read[key] for key in fields} == fields
    assert (read["msg"], read["logger"]) == (message, "headrace.run")


NASTY = st.text(st.characters(codec="utf-8")) | st.sampled_from(
    ['a "quoted" = thing', "two\nlines", "level=error ts=now", "\x1b[31m", "\\", "", "é 漢", " "]
)


@given(NASTY)
def test_a_value_stays_itself_whatever_it_contains(value: str) -> None:
    assert text("error=%s source=%s", value, "shop") | {"ts": ""} == {
        "ts": "", "level": "warning", "error": value, "source": "shop",
    }  # fmt: skip
    assert as_json("error=%s", value)["error"] == value


@given(NASTY)
def test_what_others_log_is_a_message_and_never_fields(value: str) -> None:
    assert set(text(value, name="uvicorn.error")) <= {"ts", "level", "msg"}
    assert text("x %s", value, name="asyncio")["msg"] == f"x {value}"


def test_an_exception_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        info = sys.exc_info()
    assert "two\nlines" in text("path=%s", "/", exc_info=info)["exception"]
    assert "two\nlines" in as_json("path=%s", "/", exc_info=info)["exception"]


def test_a_template_that_does_not_fit_its_values_is_still_a_line() -> None:
    assert "'shop'" in text("source=%s phase=%s", "shop")["msg"]


@pytest.mark.parametrize("line_format", LogFormat)
def test_lines_of_another_process_keep_their_level_and_are_not_wrapped_again(
    line_format: LogFormat, caplog: pytest.LogCaptureFixture
) -> None:
    printed = io.StringIO()
    journal = Journal(Console(file=printed, width=40), line_format)
    own = LineFormatter(line_format).format(record("sink=%s phase=%s :x: [red]", "lake", "halted"))
    journal.pass_on(own)
    assert printed.getvalue() == own + "\n"
    logger = logging.getLogger("headrace.pipeline")
    logger.addHandler(journal)
    try:
        with caplog.at_level(logging.INFO, logger="headrace"):
            journal.pass_on("26/11/16 09:14:16 WARN NativeCodeLoader: Unable to load")
            journal.pass_on("")
            journal.pass_on('Exception in thread "main" java.lang.Error: x=1')
    finally:
        logger.removeHandler(journal)
    _, warning, error = printed.getvalue().splitlines()
    read = parsed if line_format is LogFormat.TEXT else json.loads
    assert read(warning)["level"] == "warning"
    assert read(warning)["msg"].endswith("WARN NativeCodeLoader: Unable to load")
    assert read(error)["level"] == "error"
    assert read(error)["msg"].endswith("java.lang.Error: x=1")


def test_a_line_without_a_level_is_information() -> None:
    assert level_of("Setting default log level") == logging.INFO
    assert level_of("Traceback (most recent call last):") == logging.ERROR
