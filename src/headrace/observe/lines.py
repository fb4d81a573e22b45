"""The lines of a process's log: logfmt, or JSON.

Messages name their values, `"source=%s halted; error=%s"`. Each `name=value` of such a template
becomes a field of the line and the rest its message, so that a value may contain anything: what
looks like a field within a value is none.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

_PLACE = r"%(?:\.\d+)?[sdrgfox]"
_FIELD = re.compile(
    rf"(?P<key>[a-z_]\w*|{_PLACE})=(?P<value>(?:{_PLACE}|[^\s%])+?)(?=[;,:.]*(?:\s|$))[;,:.]*"
    rf"|(?P<place>{_PLACE})|%%"
)
_PLACES = re.compile(_PLACE)
_BARE = re.compile(r"[^\s\"=]+")  # a value that needs no quotes
_OURS = "headrace"  # the loggers whose templates are known to name their values
_OWN_KEYS = ("ts", "level", "logger", "msg", "exception")
_TEXT_LINE = re.compile(r"ts=\S+ level=[a-z]+(?: |$)")
_JVM_LEVEL = re.compile(r"\b(ERROR|FATAL|WARN(?:ING)?|DEBUG|TRACE)\b")
_LEVELS = {"ERROR": logging.ERROR, "FATAL": logging.CRITICAL, "DEBUG": logging.DEBUG}
_LEVELS |= {"WARN": logging.WARNING, "WARNING": logging.WARNING, "TRACE": logging.DEBUG}


class LogFormat(StrEnum):
    """How lines are written."""

    TEXT = "text"  # logfmt
    JSON = "json"


class LineParts(NamedTuple):
    """A record taken apart."""

    message: str
    fields: Mapping[str, Any]


def parts_of(record: logging.LogRecord) -> LineParts:
    """The message of a record without the values that it names, and these."""
    known = getattr(record, "parts", None)
    if isinstance(known, LineParts):
        return known
    ours = record.name.split(".")[0] == _OURS and isinstance(record.args, tuple)
    if not ours or not isinstance(record.msg, str):
        return LineParts(record.getMessage(), {})
    try:
        return _taken_apart(record.msg, iter(record.args or ()))
    except (StopIteration, TypeError, ValueError):  # a template that does not fit its values
        return LineParts(f"{record.msg} {record.args}", {})


def _taken_apart(template: str, values: Iterator[object]) -> LineParts:
    fields: dict[str, Any] = {}

    def place(match: re.Match[str]) -> str:
        if match["key"] is None:
            return "%" if match["place"] is None else match["place"] % (next(values),)
        key = str(next(values)) if match["key"].startswith("%") else match["key"]
        fields[_unused(key, fields)] = _value(match["value"], values)
        return ""

    message = " ".join(_FIELD.sub(place, template).split())
    return LineParts(message.strip(" ;,:"), fields)


def _value(template: str, values: Iterator[object]) -> object:
    if _PLACES.fullmatch(template):
        value = next(values)
        # Numbers stay numbers for JSON, unless the template rounds them.
        plain = isinstance(value, int | float) and template in ("%d", "%s", "%g")
        return value if plain else template % (value,)
    return _PLACES.sub(lambda found: found[0] % (next(values),), template)


def _unused(key: str, fields: Mapping[str, Any]) -> str:
    key = re.sub(r"\W", "_", key) or "_"
    while key in fields or key in _OWN_KEYS:
        key += "_"
    return key


class LineFormatter(logging.Formatter):
    """Writes a record as one line."""

    def __init__(self, line_format: LogFormat) -> None:
        super().__init__()
        self._json = line_format is LogFormat.JSON

    def format(self, record: logging.LogRecord) -> str:
        """The line, whatever the record contains."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message, fields = parts_of(record)
        line: dict[str, Any] = {"ts": moment.replace("+00:00", "Z")}
        line["level"] = record.levelname.lower()
        if self._json:
            line["logger"] = record.name
        if message or self._json:
            line["msg"] = message
        line |= fields
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(line, default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in line.items())


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable()
    return text if plain and _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=not plain)


def is_line(text: str, line_format: LogFormat) -> bool:
    """Whether a process of ours has written this line into its log."""
    if line_format is LogFormat.TEXT:
        return _TEXT_LINE.match(text) is not None
    return text.startswith('{"ts": "') and text.endswith("}")


def level_of(text: str) -> int:
    """The level of a line that another program printed, such as Java's."""
    if text.startswith(("Traceback ", "Exception in ", "error: ")):
        return logging.ERROR
    found = _JVM_LEVEL.search(text[:100])
    return logging.INFO if found is None else _LEVELS[found[1]]
