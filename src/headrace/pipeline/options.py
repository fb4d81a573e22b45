"""The options of `format("headrace")`, read and checked whole."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..change.arrow.frame import FIELDS
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
    columns: tuple[str, ...] = tuple(FIELDS)
    starting: int | str = EARLIEST  # the first sequence delivered
    ending: int | str = LATEST  # the last one, of a batch read
    most: int = 100_000  # changes in a batch, unless one transaction has more
    parts: int = 2  # ranges that a batch is read in, at least, if it is large enough
    pause: int = 0  # milliseconds between two looks, unless a batch could not take all
    log_ranges: int = 0  # >0: as ranges that tasks read by themselves, at most so many parts
    strict: bool = True  # changes that are no longer there are an error

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "Options":
        """The options of a query; a wrong one is refused by name."""
        known = {name.lower(): (name, *rest) for name, rest in _KNOWN.items()}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name.lower() not in known:
                raise _unknown(name)
            proper, field, parse = known[name.lower()]
            values[field] = parse(proper, text)
        options = cls(**values)
        options._agree()
        return options

    def _agree(self) -> None:
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


def _unknown(name: str) -> ConfigError:
    if name.lower() == "apikey":
        return ConfigError(
            "the option apiKey is not taken: options are shown in query plans",
            hint="Name an environment variable in apiKeyEnv or a file in apiKeyFile.",
        )
    lower = {known.lower(): known for known in _KNOWN}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    # In the message, not in the hint: Spark shows only the message.
    suggestion = f"did you mean {lower[near[0]]}?" if near else f"there are: {', '.join(_KNOWN)}"
    return ConfigError(f"there is no option {name!r}; {suggestion}")


def _text(name: str, text: str) -> str:
    if not text:
        raise ConfigError(f"the option {name} is empty")
    return text


def _path(name: str, text: str) -> str:
    # Absolute from here on: a worker's own folder is another one than the driver's.
    plain = urlsplit(text).path if text.startswith("file:") else text
    return str(Path(_text(name, plain)).absolute())


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


def _list(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError(f"the option {name} must be names between commas")
    return words


def _columns(name: str, text: str) -> tuple[str, ...]:
    columns = _list(name, text)
    for column in columns:
        if column not in FIELDS:
            raise ConfigError(f"the option {name} names {column!r}; there are: {', '.join(FIELDS)}")
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


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"the option {name} must be true or false, not {text!r}")
    return text.lower() == "true"


_KNOWN: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "path": ("path", _path),
    "url": ("url", _url),
    "apiKeyEnv": ("api_key_env", _text),
    "apiKeyFile": ("api_key_file", _text),
    "caFile": ("ca_file", _text),
    "tables": ("tables", _list),
    "columns": ("columns", _columns),
    "startingSequence": ("starting", _start),
    "endingSequence": ("ending", _end),
    "maxChangesPerBatch": ("most", _whole),
    "minPartitions": ("parts", _whole),
    "pauseMilliseconds": ("pause", _whole),
    "logRanges": ("log_ranges", _whole),
    "failOnDataLoss": ("strict", _flag),
}
