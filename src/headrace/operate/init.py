"""A first config for a database: asked what it is and what it has, written with comments."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from ..config import Config, parse, source_class
from ..errors import ConfigError
from ..secret import Secret
from ..sources import Finding

_TYPES = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_VARIABLES = {"postgres": "PGPASSWORD", "mysql": "MYSQL_PASSWORD"}
_FORMS = "postgresql://user@host/database, mysql://user@host/database, or the file of a SQLite one"
_PLAIN = re.compile(r"[^a-z0-9_]+")


class ChosenDatabase(NamedTuple):
    """A database to capture, as somebody has named it."""

    type: str  # of its source
    name: str  # of its source
    address: str  # a URL without a password, or a path
    password: Secret | None = None  # as it stands in a URL
    variable: str = ""  # the environment's, with the password

    @classmethod
    def named(cls, given: str, *, name: str = "", variable: str = "") -> "ChosenDatabase":
        """What a URL or a path means; a ConfigError when it means nothing."""
        scheme, found, _ = given.partition("://")
        if not found or scheme == "sqlite":
            path = given.removeprefix("sqlite://").removeprefix("sqlite:")
            return cls("sqlite", name or _plain(Path(path).stem), path)
        if scheme not in _TYPES:
            raise ConfigError(
                f"there is no source for {scheme}:// databases", hint=f"Name one by {_FORMS}."
            )
        parts = urlsplit(given)
        if re.search(r"(^|&)password=", parts.query, re.IGNORECASE):
            raise ConfigError(
                "the password stands behind the ?", hint="Write it before the @, after the user."
            )
        kind, password = _TYPES[scheme], parts.password
        host = parts.netloc.rpartition("@")[2]
        user = "" if parts.username is None else f"{parts.username}@"
        bare = parts._replace(scheme=kind.replace("postgres", "postgresql"), netloc=user + host)
        return cls(
            kind,
            name or _plain(unquote(parts.path.strip("/")) or kind),
            bare.geturl(),
            None if password is None else Secret(password),
            variable or _VARIABLES[kind],
        )

    def with_password(self, password: str) -> "ChosenDatabase":
        """The same with a password, as it stands in a URL."""
        return self._replace(password=Secret(password))

    @property
    def needs_password(self) -> bool:
        """Whether it has a user, and nobody has named a password."""
        return self.password is None and "@" in self.address

    @property
    def setting(self) -> tuple[str, str]:
        """The setting that says where it is, as it stands in the file: without the password."""
        if self.type == "sqlite":
            return "path", self.address
        if self.password is None:
            return "url", self.address
        user, _, rest = self.address.partition("@")
        return "url", f"{user}:${{{self.variable}}}@{rest}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What the environment must have for the file."""
        return {} if self.password is None else {self.variable: self.password.reveal()}

    def source(self, tables: Sequence[str]) -> dict[str, Any]:
        """Its section of a config."""
        setting, value = self.setting
        return {"type": self.type, setting: value} | ({"tables": list(tables)} if tables else {})

    def check(self, tables: Sequence[str], folder: Path) -> list[Finding]:
        """Ask the database everything that capturing needs."""
        source_class(self.type)  # says what to install
        content = {"sources": {self.name: self.source(tables)}}
        config = parse(content, folder=folder, environment={**os.environ, **self.environment})
        return config.sources[0].check()


def _plain(text: str) -> str:
    """A name that a source may have."""
    name = _PLAIN.sub("_", text.lower()).strip("_")[:41]
    return name if name[:1].isalpha() else f"db_{name}".rstrip("_")[:41]


def connects(findings: Sequence[Finding]) -> bool:
    """Whether the database has answered at all."""
    return not any(each.name in ("connection", "database") and not each.ok for each in findings)


def content(
    database: ChosenDatabase, findings: Sequence[Finding], *, tables: Sequence[str], port: int
) -> str:
    """The config file."""
    return "\n".join([*_lines(database, findings, tables, port), ""])


def _lines(
    database: ChosenDatabase, findings: Sequence[Finding], tables: Sequence[str], port: int
) -> Iterator[str]:
    version = _comment(next((each.detail for each in findings if each.name == "version"), ""))
    yield "# What Headrace captures and where it serves it. docs/config.md has every setting."
    yield f"# Written by `headrace init`{f' for {version}' if version else ''}; edit it freely."
    yield ""
    yield "sources:"
    yield f"  {database.name}:"
    setting, value = database.setting
    yield f"    type: {database.type}"
    if database.password is not None:
        yield f"    # The password comes from the environment: export {database.variable}=…"
        yield "    # Write it as in a URL: %40 for @, %3A for :, %2F for /, %25 for %."
    yield f"    {setting}: {_scalar(value)}"
    yield from _tables(findings, tables)
    yield ""
    yield "data_dir: data  # the log of changes; keep it, it is what clients and sinks resume from"
    yield ""
    yield "server:"
    yield f"  port: {port}  # on this machine alone; docs/security.md says how to open it to others"
    yield ""
    yield "# cdc:"
    yield "#   retention_days: 30  # how long changes are kept for clients to come back"
    yield ""
    yield "# pipeline:  # needs Java and `pip install 'headrace[spark]'`; docs/pipeline.md"
    yield "#   sinks:"
    yield "#     lake: {type: tables, path: lake}  # a Delta table for each table"
    yield from _missing(findings)


def _tables(findings: Sequence[Finding], tables: Sequence[str]) -> Iterator[str]:
    found = [each for each in findings if each.name.startswith("table ")]
    yield f"    # Patterns of schema.table. {len(found) or 'No'} tables match now:"
    for each in found:
        yield f"    #   {_comment(each.name.removeprefix('table '))}: {_comment(each.detail)}"
        if each.ok:  # what could be better; the rest is below
            yield from (f"    #     {_printable(line)}" for line in each.fix.splitlines())
    if tables:
        yield f"    tables: [{', '.join(map(_scalar, tables))}]"
    else:
        yield '    # tables: ["public.*"]'


def _missing(findings: Sequence[Finding]) -> Iterator[str]:
    missing = [each for each in findings if not each.ok]
    if missing:
        yield ""
        yield "# When this was written, the database was not ready; `headrace check` looks again:"
    for each in missing:
        yield f"#   {_comment(each.name)}: {_comment(each.detail)}"
        yield from (f"#     {_printable(line)}" for line in each.fix.splitlines())


def _scalar(text: str) -> str:
    """A text as a value of YAML."""
    return str(yaml.safe_dump(text, default_style='"', width=10_000)).strip()


def _comment(text: str) -> str:
    """A text on one line, whatever it has: a table's name may hold a whole config."""
    return _printable(" ".join(text.split()))


def _printable(text: str) -> str:
    """The same without characters that no YAML may have."""
    return "".join(each if each.isprintable() else "?" for each in text)


def write(file: Path, text: str, database: ChosenDatabase) -> Config:
    """Write a config that nobody else may read; a ConfigError when there is a file already."""
    config = parse(
        yaml.safe_load(text),
        folder=file.parent,
        environment={**os.environ, **database.environment},
    )
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{file} is there already", hint="Name another file with --config, or remove it."
        ) from error
    with open(opened, "w", encoding="utf-8") as out:
        out.write(text)
    return config
