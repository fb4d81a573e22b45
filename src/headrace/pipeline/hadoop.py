"""Checkpoints in a storage that Spark reaches by Hadoop's file systems, such as s3a:// or hdfs://.

What reads and writes there runs in Spark's Java process: it has the classes, and the keys in its
settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from uuid import uuid4

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkConf
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import CapturedException

from ..errors import CheckpointUnavailable, ConfigError, HeadraceError
from ..plugins import Finding
from .gateway import launched, masked, shut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Which package has the file system of a scheme. Its version is that of Spark's Hadoop.
_PACKAGES = {
    "s3a": "org.apache.hadoop:hadoop-aws",
    "abfs": "org.apache.hadoop:hadoop-azure",
    "abfss": "org.apache.hadoop:hadoop-azure",
    "gs": "org.apache.hadoop:hadoop-gcp",
    "oss": "org.apache.hadoop:hadoop-aliyun",
}
_NO_CLASS = ("ClassNotFoundException", "NoClassDefFoundError", "UnsupportedFileSystemException")
_LONGEST = 300  # characters of a reason
_MOST_CAUSES = 10

# A check is to say soon that nobody answers. A pipeline waits as long as Hadoop does by itself.
_IMPATIENT = {
    "spark.hadoop.fs.s3a.attempts.maximum": "1",
    "spark.hadoop.fs.s3a.retry.limit": "1",
    "spark.hadoop.fs.s3a.connection.establish.timeout": "5s",
    "spark.hadoop.fs.azure.io.retry.max.retries": "1",
    "spark.hadoop.ipc.client.connect.max.retries": "1",
}


@dataclass(frozen=True, slots=True)
class HadoopStorage:
    """The file systems of a Java process."""

    jvm: Any
    conf: Any  # Hadoop's Configuration
    settings: Mapping[str, str] = field(repr=False)  # of Spark, whose values no error may show

    @classmethod
    def of(cls, spark: SparkSession) -> Self:
        """Those of a session."""
        context = spark.sparkContext
        java: Any = context._jsc
        given = context.getConf().getAll()
        settings = {name: value for name, value in given if name.startswith("spark.hadoop.")}
        return cls(context._jvm, java.hadoopConfiguration(), settings)

    def location(self, address: str) -> str:
        """An address as this Hadoop has it: its own S3 file system is called s3a."""
        given = urlsplit(address)
        if given.scheme != "s3" or self.conf.get("fs.s3.impl"):
            return address
        return given._replace(scheme="s3a").geturl()

    def path(self, address: str) -> Any:
        """A path of Hadoop's."""
        return self.jvm.org.apache.hadoop.fs.Path(address)

    def expect_classes(self, address: str) -> None:
        """Raise ConfigError when there is no file system for an address.

        Whether it can be reached is another question, and the answer may change.
        """
        location = self.location(address)
        try:
            self.path(location).getFileSystem(self.conf)
        except (Py4JJavaError, PySparkException) as error:
            missing = [each for each in _java_causes(error) if each[0] in _NO_CLASS]
            if missing:
                raise self._refusal(address, location, missing[-1]) from error

    def _refusal(self, address: str, location: str, cause: tuple[str, str]) -> ConfigError:
        scheme = urlsplit(location).scheme
        kind, message = cause
        lacking = message.removeprefix("Class ").removesuffix(" not found").replace("/", ".")
        what = f"no file system for {scheme}" if kind.startswith("Unsupported") else lacking
        start = f"pipeline.checkpoint_dir: {address} cannot be used, because this Spark lacks"
        if (package := _PACKAGES.get(scheme)) is None:
            return ConfigError(
                f"{start} a Hadoop file system for {scheme}:// ({what})",
                hint="Add its jar in pipeline.spark, by spark.jars or spark.jars.packages, and set "
                f"spark.hadoop.fs.{scheme}.impl to its class; or set a folder of this machine.",
            )
        version = self.jvm.org.apache.hadoop.util.VersionInfo.getVersion()
        return ConfigError(
            f"{start} the package {package}:{version}, or one that it needs ({what})",
            hint=f"Set spark.jars.packages to {package}:{version} in pipeline.spark, or name its "
            "jars in spark.jars; or set a folder of this machine.",
        )

    @contextmanager
    def opened(self, location: str) -> Iterator[Any]:
        """The file system of a location; what it refuses is an error of ours."""
        try:
            yield self.path(location).getFileSystem(self.conf)
        except (Py4JJavaError, PySparkException) as error:
            causes = _java_causes(error)
            kind, message = causes[0] if causes else (type(error).__name__, "")
            if kind == "FileNotFoundException":
                raise FileNotFoundError(location) from error
            reason = masked(f"{kind}: {message}", self.settings)[:_LONGEST]
            raise CheckpointUnavailable(f"{location} cannot be used: {reason}") from error
        except (Py4JError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise CheckpointUnavailable(
                f"{location} cannot be used: Spark's Java process does not answer"
            ) from error


@dataclass(frozen=True, slots=True)
class HadoopFiles:
    """A checkpoint in a storage; see `sinks.checkpoints.CheckpointFiles`."""

    location: str
    storage: HadoopStorage

    @classmethod
    def of(cls, spark: SparkSession, address: str) -> Self:
        """The files below an address."""
        storage = HadoopStorage.of(spark)
        return cls(storage.location(address), storage)

    def names(self, folder: str) -> list[str]:
        """What is in one of the folders; nothing, if it is not there."""
        place = f"{self.location}/{folder}"
        try:
            with self.storage.opened(place) as system:
                return [each.getPath().getName() for each in system.listStatus(self._path(folder))]
        except FileNotFoundError:
            return []

    def exists(self, name: str = "") -> bool:
        """Whether a file or folder is there, by default the whole."""
        with self.storage.opened(self.location) as system:
            return bool(system.exists(self._path(name)))

    def read(self, name: str) -> str:
        """What a file holds; a FileNotFoundError when it is not there."""
        with self.storage.opened(f"{self.location}/{name}") as system:
            stream = system.open(self._path(name))
            try:
                return bytes(stream.readAllBytes()).decode()
            finally:
                stream.close()

    def write(self, name: str, text: str) -> None:
        """Replace a file: nobody sees a part of it."""
        # No file system of Hadoop's renames to a name that is taken. Whoever looks between the two
        # steps finds no file.
        path, fresh = self._path(name), self._path(f".{name}.{uuid4()}.new")
        with self.storage.opened(f"{self.location}/{name}") as system:
            stream = system.create(fresh, True)
            try:
                stream.write(text.encode())
            finally:
                stream.close()
            system.delete(path, False)
            self._expect(system.rename(fresh, path), name)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self.storage.opened(f"{self.location}/{name}") as system:
            system.delete(self._path(name), False)

    def move_aside(self) -> str | None:
        """Rename the whole; returns where it is then, None: there was nothing."""
        if not self.exists():
            return None
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        aside = f"{self.location}-until-{moment}"
        with self.storage.opened(self.location) as system:
            self._expect(system.rename(self._path(), self.storage.path(aside)), aside)
        return aside

    def _path(self, name: str = "") -> Any:
        return self.storage.path(f"{self.location}/{name}" if name else self.location)

    def _expect(self, done: bool, name: str) -> None:
        if not done:
            raise CheckpointUnavailable(f"{self.location}: {name} could not be renamed")


def check_storage(address: str, settings: Mapping[str, str]) -> Finding:
    """Whether a checkpoint can be kept at an address: by writing there, without a Spark session."""
    setting = "checkpoint_dir"
    known = {**_IMPATIENT, **settings, "spark.master": "local[1]"}
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            gateway = launched(known, Path(folder, "spark.log"))
            try:
                _probe(_storage(gateway, known), address)
            finally:
                shut(gateway)
    except HeadraceError as error:
        return Finding(setting, ok=False, detail=str(error), fix=error.hint)
    return Finding(setting, ok=True, detail=f"{address} can be written")


def _storage(gateway: Any, settings: Mapping[str, str]) -> HadoopStorage:
    """The file systems of a Java process without a session."""
    jvm = gateway.jvm
    conf = SparkConf(loadDefaults=True, _jvm=jvm).setAll(list(settings.items()))
    java: Any = conf._jconf
    known = jvm.org.apache.spark.deploy.SparkHadoopUtil.get().newConfiguration(java)
    return HadoopStorage(jvm, known, settings)


def _probe(storage: HadoopStorage, address: str) -> None:
    storage.expect_classes(address)
    files, name = HadoopFiles(storage.location(address), storage), f".headrace-check-{uuid4()}"
    files.write(name, "x")
    files.delete(name)


def _java_causes(error: BaseException) -> list[tuple[str, str]]:
    """The simple name and the message's first line of a Java exception, and of its causes."""
    found: list[tuple[str, str]] = []
    java = error._origin if isinstance(error, CapturedException) else None
    java = getattr(error, "java_exception", java)
    while java is not None and len(found) < _MOST_CAUSES:
        message, *_ = str(java.getMessage() or "").splitlines() or [""]
        found.append((java.getClass().getSimpleName(), message))
        java = java.getCause()
    return found
