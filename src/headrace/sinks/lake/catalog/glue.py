"""AWS Glue's Data Catalog, through boto3.

An entry is what Athena, Trino, EMR and Glue's own crawlers take for a Delta table: they read the
columns from the Delta log, and people read them here.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from ....errors import ConfigError, SinkRefused, SinkUnavailable
from ....plugins import Finding
from ..refusal import refusal
from .entry import CatalogColumn, CatalogEntry, TableCatalog, expect_no_password, type_text

_SECONDS = 15
# What Glue stores at most: characters of a column's comment, bytes of a table's description.
_COMMENT, _DESCRIPTION = 255, 2048
# What it refuses: characters that control something, and lines in a column's comment.
_REFUSED = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_BREAKS = re.compile(r"[\r\n]+")
_PARAMETERS = {
    "EXTERNAL": "TRUE",
    "classification": "delta",
    "table_type": "DELTA",
    "spark.sql.sources.provider": "delta",
}
# As Spark writes them for a table that Hive itself cannot read.
_FORMATS = {
    "InputFormat": "org.apache.hadoop.mapred.SequenceFileInputFormat",
    "OutputFormat": "org.apache.hadoop.hive.ql.io.HiveSequenceFileOutputFormat",
}
_SERDE = "org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe"
_OPTIONS = {
    "aws_access_key_id": "aws_access_key_id",
    "aws_secret_access_key": "aws_secret_access_key",
    "aws_session_token": "aws_session_token",
    "aws_region": "region_name",
    "aws_default_region": "region_name",
}
_LATER = ("Throttling", "InternalService", "OperationTimeout", "ConcurrentModification")
# Of an entry that is there, what an update must repeat or else it is lost.
_KEPT = ("Owner", "Retention", "LastAccessTime", "LastAnalyzedTime")


class GlueCatalog(TableCatalog, frozen=True, kw_only=True, tag="glue"):
    """The Data Catalog of an AWS account."""

    WITHIN: ClassVar[str] = "database"

    database: str = ""  # for all tables; "": each in the database that has the name of its schema
    region: str = ""  # "": that of the sink's storage, or of the environment
    account: str = ""  # whose catalog; "": that of the credentials
    endpoint: str = ""  # "": Amazon's own

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_no_password("endpoint", self.endpoint, "the sink's storage")

    def register(self, entry: CatalogEntry) -> bool:
        """Make the entry, or change it."""
        with self._connected(entry.folder.options) as glue:
            found = self._found(glue, entry)
            if found is None:
                self._create(glue, entry)
                return True
            place = (found.get("StorageDescriptor") or {}).get("Location") or ""
            entry.expect_ours(place, self.WITHIN)
            wanted = _input(entry)
            kept = {name: found[name] for name in _KEPT if name in found}
            given = found.get("Parameters") or {}
            if _shown(found) == _shown(wanted) and given == given | _PARAMETERS:
                return False
            wanted = {**kept, **wanted, "Parameters": {**given, **_PARAMETERS}}
            glue.update_table(**self._account, DatabaseName=entry.name.schema, TableInput=wanted)
            return True

    def check(self, storage: Mapping[str, str]) -> Finding:
        """Whether Glue answers, and takes the credentials."""
        with self._connected(storage) as glue:
            glue.get_databases(**self._account, MaxResults=1)
        return Finding("catalog", ok=True, detail="Glue answers and takes the credentials")

    @property
    def _account(self) -> dict[str, str]:
        return {"CatalogId": self.account} if self.account else {}

    def _found(self, glue: Any, entry: CatalogEntry) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = glue.get_table(
                **self._account, DatabaseName=entry.name.schema, Name=entry.name.table
            )["Table"]
        except glue.exceptions.EntityNotFoundException:
            return None
        return found

    def _create(self, glue: Any, entry: CatalogEntry) -> None:
        database, wanted = entry.name.schema, _input(entry)
        try:
            glue.create_table(**self._account, DatabaseName=database, TableInput=wanted)
        except glue.exceptions.EntityNotFoundException:
            glue.create_database(**self._account, DatabaseInput={"Name": database})
            glue.create_table(**self._account, DatabaseName=database, TableInput=wanted)

    @contextmanager
    def _connected(self, storage: Mapping[str, str]) -> Iterator[Any]:
        try:
            # Only here: the extra `glue` is for those who have such a catalog.
            import boto3  # noqa: PLC0415
            from botocore.config import Config  # noqa: PLC0415
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "catalog type glue needs boto3: pip install 'headrace[glue]'"
            ) from None
        given = {
            _OPTIONS[name.lower()]: value
            for name, value in storage.items()
            if name.lower() in _OPTIONS
        }
        if self.region:
            given["region_name"] = self.region
        limits = Config(
            connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"total_max_attempts": 2}
        )
        try:
            yield boto3.client("glue", endpoint_url=self.endpoint or None, config=limits, **given)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            message = f"Glue: {refusal(error, storage)}"
            if (
                code.startswith(_LATER)
                or error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500
            ):
                raise SinkUnavailable(message) from None
            raise SinkRefused(
                message, hint="Check the sink's catalog and storage, and what they permit in Glue."
            ) from None
        except BotoCoreError as error:
            raise SinkUnavailable(f"Glue: {refusal(error, storage)}") from None


def _input(entry: CatalogEntry) -> dict[str, Any]:
    """A table as Glue takes it.

    No partition keys: Glue would then be asked for partitions, which only the Delta log has.
    """
    return {
        "Name": entry.name.table,
        "Description": _cut(entry.comment, _DESCRIPTION),
        "TableType": "EXTERNAL_TABLE",
        "Parameters": dict(_PARAMETERS),
        "PartitionKeys": [],
        "StorageDescriptor": {
            "Columns": [_column(each) for each in entry.columns],
            "Location": entry.location,
            **_FORMATS,
            "SerdeInfo": {
                "SerializationLibrary": _SERDE,
                "Parameters": {"path": entry.location, "serialization.format": "1"},
            },
        },
    }


def _column(each: CatalogColumn) -> dict[str, str]:
    # Hive's timestamp has no zone, and no other name for one without.
    kind = type_text(each.type).replace("timestamp_ntz", "timestamp")
    column = {"Name": each.name.lower(), "Type": kind}
    comment = _cut(_BREAKS.sub(" ", each.comment), _COMMENT)
    return column | {"Comment": comment} if comment else column


def _cut(text: str, most: int) -> str:
    """A text that Glue takes, in at most so many bytes, which are never fewer than characters."""
    text = _REFUSED.sub(" ", text)
    content = text.encode()
    return text if len(content) <= most else content[: most - 3].decode(errors="ignore") + "…"


def _shown(table: Mapping[str, Any]) -> tuple[str, list[tuple[str, str, str]]]:
    columns = (table.get("StorageDescriptor") or {}).get("Columns") or []
    return table.get("Description") or "", [
        (each["Name"], each.get("Type") or "", each.get("Comment") or "") for each in columns
    ]
