"""The options of `format("headrace")`, read and checked whole."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..change.arrow.frame import FIELDS
from ..change.path import is_qualified, qualified
from ..errors import ConfigError

EARLIEST = "earliest"
LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which log to read, what of it, and in which portions; holds no secret, so it may be shown."""

    path: str = ""  # a log on a disk that the driver and every executor reach …
    url: str = ""  # … or a server; exactly one of them is set
    api_key_env: str = ""  # the environment variable, there and here, that holds the server's key …
    api_key_file: str = ""  # … or a file
    ca_file: str = ""  # who signs the server's certificate; "": whom the system trusts
    tables: tuple[str, ...] = ()  # globs; none: all
    table: str = ""  # schema.table: this one alone, with its own columns …
    source: str = ""  # … in this source, where several have it
    as_text: tuple[str, ...] = ()  # its columns that keep the source's exact text
    where: str = ""  # which of its changes: a condition of SQL
    chosen: tuple[str, ...] = ()  # columns; none: all
    starting: int | str = EARLIEST  # the first sequence delivered
    ending: int | str = LATEST  # the last one, of a batch read
    starting_time: int | None = None  # instead of sequences: what was captured from this on …
    ending_time: int | None = None  # … and before this (microseconds since 1970)
    most: int = 100_000  # changes in a batch, unless one transaction has more
    parts: int = 2  # ranges that a batch is read in, at least, if it is large enough
    report: str = ""  # the file with the report of the pipeline that a query belongs to …
    sink: str = ""  # … and the sink in it that is the query's
    pause: int = 0  # milliseconds between two looks, unless a batch could not take all
    log_ranges: int = 0  # >0: as ranges that tasks read by themselves, at most so many parts
    strict: bool = True  # changes that are no longer there are an error

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "Options":
        """The options of a query; a wrong one is refused by name."""
        options = cls(**parsed(given, _KNOWN, INTERNAL))
        options._agree()
        return options

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of changes that are read."""
        return self.chosen or tuple(FIELDS)

    def _agree(self) -> None:
        self._expect_columns()
        if self.table and self.tables:
            raise ConfigError("only one of the options table and tables may be given")
        if self.starting_time is not None and self.starting != EARLIEST:
            raise ConfigError(
                "only one of the options startingSequence and startingTimestamp may be given"
            )
        if self.ending_time is not None and self.ending != LATEST:
            raise ConfigError(
                "only one of the options endingSequence and endingTimestamp may be given"
            )
        if bool(self.path) == bool(self.url):
            raise ConfigError(
                "exactly one of the options path and url must be given",
                hint="path is the log's folder on this machine, url the address of a server.",
            )
        if self.api_key_env and self.api_key_file:
            raise ConfigError("only one of the options apiKeyEnv and apiKeyFile may be given")
        if self.path and (self.api_key_env or self.api_key_file):
            raise ConfigError("an API key goes with the option url, not with path")
        if self.ca_file and not self.url.startswith("https://"):
            raise ConfigError("the option caFile goes with a url that begins with https://")

    def _expect_columns(self) -> None:
        if self.table:
            return  # the table knows its own
        if self.source or self.as_text or self.where:
            raise ConfigError("the options source, asText and where go with the option table")
        for column in self.chosen:
            if column not in FIELDS:
                raise ConfigError(
                    f"the option columns names {column!r}; there are: {', '.join(FIELDS)}"
                )


Known = Mapping[str, tuple[str, Callable[[str, str], Any]]]
"""By the name of an option: the field that it sets, and what reads its text."""


def parsed(given: Mapping[str, str], known: Known, hidden: Collection[str]) -> dict[str, Any]:
    """The values of options by their fields; one that does not exist is refused by name."""
    found = {name.lower(): (name, *rest) for name, rest in known.items()}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name.lower() not in found:
            raise _unknown(name, [each for each in known if each not in hidden])
        proper, field, parse = found[name.lower()]
        values[field] = parse(proper, text)
    return values


def _unknown(name: str, public: Sequence[str]) -> ConfigError:
    if name.lower() == "apikey":
        return ConfigError(
            "the option apiKey is not taken: options are shown in query plans",
            hint="Name an environment variable in apiKeyEnv or a file in apiKeyFile.",
        )
    lower = {known.lower(): known for known in public}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    # In the message, not in the hint: Spark shows only the message.
    suggestion = f"did you mean {lower[near[0]]}?" if near else f"there are: {', '.join(public)}"
    return ConfigError(f"there is no option {name!r}; {suggestion}")


def read_text(name: str, text: str) -> str:
    if not text:
        raise ConfigError(f"the option {name} is empty")
    return text


def read_path(name: str, text: str) -> str:
    # Absolute from here on: a worker's own folder is another one than the driver's.
    plain = urlsplit(text).path if text.startswith("file:") else text
    return str(Path(read_text(name, plain)).absolute())


def _url(name: str, text: str) -> str:
    try:
        address = urlsplit(text)
        valid = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"the option {name} must be an address such as http://127.0.0.1:3000")
    if address.username or address.password or address.query:
        raise ConfigError(
            f"the option {name} must hold no user, password or query",
            hint="Name an environment variable in apiKeyEnv or a file in apiKeyFile.",
        )
    return text.rstrip("/")


def read_list(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError(f"the option {name} must be names between commas")
    return words


def read_table(name: str, text: str) -> str:
    if not is_qualified(text):
        raise ConfigError(f"the option {name} must be schema.table, not {text!r}")
    return qualified(text, "")


def read_columns(name: str, text: str) -> tuple[str, ...]:
    columns = read_list(name, text)
    if len(set(columns)) < len(columns):
        raise ConfigError(f"the option {name} names a column twice")
    return columns


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise ConfigError(f"the option {name} must be a whole number above 0, not {text!r}")
    return int(text)


def _start(name: str, text: str) -> int | str:
    word = text.lower()
    return word if word in (EARLIEST, LATEST) else _sequence(name, text, f"{EARLIEST}, {LATEST}")


def _end(name: str, text: str) -> int | str:
    return LATEST if text.lower() == LATEST else _sequence(name, text, LATEST)


def _sequence(name: str, text: str, words: str) -> int:
    if text.isascii() and text.isdigit():
        return _whole(name, text)
    raise ConfigError(f"the option {name} must be {words} or a sequence, not {text!r}")


def _moment(name: str, text: str) -> int:
    """Microseconds since 1970; as Kafka's source takes it (milliseconds), or as Delta's."""
    if text.isascii() and text.isdigit():
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"the option {name} must be a time such as 2026-01-31T10:30:00Z or milliseconds since "
            f"1970, not {text!r}"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def read_flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"the option {name} must be true or false, not {text!r}")
    return text.lower() == "true"


INTERNAL = frozenset(
    ("maxChangesPerBatch", "pauseMilliseconds", "logRanges", "sinkReport", "sinkName")
)
"""What the pipeline gives to its own queries, and earlier names."""

_KNOWN: Known = {
    "path": ("path", read_path),
    "url": ("url", _url),
    "apiKeyEnv": ("api_key_env", read_text),
    "apiKeyFile": ("api_key_file", read_text),
    "caFile": ("ca_file", read_text),
    "tables": ("tables", read_list),
    "table": ("table", read_table),
    "source": ("source", read_text),
    "asText": ("as_text", read_list),
    "where": ("where", read_text),
    "columns": ("chosen", read_columns),
    "startingTimestamp": ("starting_time", _moment),
    "endingTimestamp": ("ending_time", _moment),
    "startingSequence": ("starting", _start),
    "endingSequence": ("ending", _end),
    "maxChangesPerTrigger": ("most", _whole),
    "maxChangesPerBatch": ("most", _whole),  # its earlier name
    "minPartitions": ("parts", _whole),
    "sinkReport": ("report", read_text),
    "sinkName": ("sink", read_text),
    "pauseMilliseconds": ("pause", _whole),
    "logRanges": ("log_ranges", _whole),
    "failOnDataLoss": ("strict", read_flag),
}
