"""Small files of a table's folder, such as commits: read, listed, deleted, and made only once."""

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from .disk import sync_names

LEFTOVER = ".headrace-"  # how a file begins that is about to get its name
# What obstore takes as options of its client; delta-rs takes them among all others.
_CLIENT = re.compile(
    "allow_http|allow_invalid_certificates|connect_timeout|http1_only|http2_.*|pool_.*|proxy_.*"
    "|timeout|user_agent"
)
_PROVIDER = re.compile("^(aws|azure|google)_")
_PROVIDERS = {"s3": "aws_", "s3a": "aws_", "gs": "google_"}
_SYSTEM_MESSAGE = re.compile(r'\bmessage: "([^"]+)"')  # such as: Connection refused
_UNKNOWN_KEY = re.compile("key: '([^']+)'")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Entry(NamedTuple):
    """A file of a folder."""

    path: str
    modified: datetime


class Objects(Protocol):
    """A storage of files, paths being relative to a folder. What fails is an OSError."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        """A file or a piece of it; None: there is none."""

    def write(self, path: str, content: bytes) -> None:
        """A file that is whole and durable afterwards, in place of one that may be there."""

    def create(self, path: str, content: bytes) -> bool:
        """A file where none is; False: there is one. Of several writers exactly one gets True."""

    def entries(self, folder: str, after: str = "") -> Iterator[Entry]:
        """The files below a folder whose paths come after `after`."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; one that is gone already is no error."""


def objects(uri: str, options: Mapping[str, str]) -> Objects:
    """The storage behind a path or an address such as s3://bucket/lake."""
    return RemoteObjects(uri, options) if "://" in uri else LocalObjects(Path(uri))


class LocalObjects:
    """A folder of this machine, or of a file server that knows hard links."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        """See Objects."""
        try:
            with (self._root / path).open("rb") as file:
                file.seek(start)
                return file.read(length)
        except FileNotFoundError:
            return None

    def write(self, path: str, content: bytes) -> None:
        """See Objects."""
        with self._fresh(path, content) as fresh:
            fresh.rename(self._root / path)

    def create(self, path: str, content: bytes) -> bool:
        """See Objects."""
        with self._fresh(path, content) as fresh:
            try:
                os.link(fresh, self._root / path)  # fails where a rename would replace
            except FileExistsError:
                # A file server gets a request again whose response was lost, and then reports this.
                return fresh.stat().st_nlink > 1
            except OSError as error:
                if error.errno in _NO_LINKS:
                    error.strerror = "the file system has no hard links, by which tables are kept"
                raise
            return True

    @contextmanager
    def _fresh(self, path: str, content: bytes) -> Iterator[Path]:
        folder = (self._root / path).parent
        _make(folder)
        fresh = folder / f"{LEFTOVER}{uuid.uuid4().hex}"
        try:
            with fresh.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield fresh
        finally:
            fresh.unlink(missing_ok=True)
        sync_names(folder)

    def entries(self, folder: str, after: str = "") -> Iterator[Entry]:
        """See Objects."""
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        try:
            found = list(os.scandir(self._root / folder))
        except FileNotFoundError:
            return
        for each in found:
            path = prefix + each.name
            if each.is_dir(follow_symlinks=False):
                yield from self.entries(path, after)
            elif path > after:
                try:
                    modified = each.stat().st_mtime
                except FileNotFoundError:
                    continue  # deleted in the meantime
                yield Entry(path, datetime.fromtimestamp(modified, UTC))

    def delete(self, paths: Iterable[str]) -> None:
        """See Objects."""
        for path in paths:
            (self._root / path).unlink(missing_ok=True)


def _make(folder: Path) -> None:
    """A folder whose name is on disk."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_names(folder.parent)


class RemoteObjects:
    """A bucket, or a folder in one."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self._store = _store(uri, options)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes | None:
        """See Objects."""
        try:
            with _errors():
                if length is None:
                    return bytes(obstore.get(self._store, path).bytes())[start:]
                return bytes(obstore.get_range(self._store, path, start=start, length=length))
        except FileNotFoundError:
            return None

    def write(self, path: str, content: bytes) -> None:
        """See Objects."""
        with _errors():
            obstore.put(self._store, path, content, use_multipart=False)

    def create(self, path: str, content: bytes) -> bool:
        """See Objects."""
        try:
            with _errors():
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def entries(self, folder: str, after: str = "") -> Iterator[Entry]:
        """See Objects."""
        with _errors():
            for page in self._listed(folder, after):
                for each in page:
                    yield Entry(each["path"], each["last_modified"])

    def _listed(self, folder: str, after: str) -> Iterable[Any]:
        found: Iterable[Any] = obstore.list(
            self._store, folder or None, offset=after or None, chunk_size=1000
        )
        return found

    def delete(self, paths: Iterable[str]) -> None:
        """See Objects."""
        try:
            with _errors():
                obstore.delete(self._store, list(paths))
        except FileNotFoundError:
            return


def _store(uri: str, options: Mapping[str, str]) -> Any:
    """The store with those of delta-rs' options that it knows."""
    # obstore, too, takes options from the environment, but none of its client's if one is given.
    client: Any = dict(_of_environment(uri))
    config: Any = {}
    for name, value in options.items():
        short = _PROVIDER.sub("", name.lower())
        if _CLIENT.fullmatch(short):
            client[short] = value
        else:
            config[name.lower()] = value
    while True:
        try:
            return from_url(uri, config=config, client_options=client or None)
        except UnknownConfigurationKeyError as error:
            found = _UNKNOWN_KEY.search(str(error))
            if not found or config.pop(found[1], None) is None:
                raise


def _of_environment(uri: str) -> Iterator[tuple[str, str]]:
    """The options of a client that are set in the environment, such as AWS_ALLOW_HTTP."""
    provider = _PROVIDERS.get(uri.partition(":")[0], "azure_")
    for name, value in os.environ.items():
        short = name.lower().removeprefix(provider)
        if short != name.lower() and _CLIENT.fullmatch(short):
            yield short, value


@contextmanager
def _errors() -> Iterator[None]:
    """What the store raises as one of the system's errors, without its long repetition."""
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(str(error)) from error
    except (FileNotFoundError, NotFoundError) as error:
        # A bucket that is not there is reported like an object that is not.
        kind = OSError if "NoSuchBucket" in str(error) else FileNotFoundError
        raise kind(_text(error)) from error
    except BaseError as error:
        raise OSError(_text(error)) from error


def _text(error: Exception) -> str:
    text, _, debug = str(error).partition("\n\nDebug source")
    cause = _SYSTEM_MESSAGE.search(debug)
    return cause[1] if cause else text
