"""The session catalog of the pipeline's own Spark: a Hive metastore, where Spark has one.

Where Delta's catalog is on Spark's class path, an entry is a table `USING delta`. Elsewhere it is
one `USING headrace.tables`, which every Spark with Headrace installed reads. Spark hands the
options of a table in a catalog to no source written in Python, so the first column's metadata say
where the table is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ....errors import SinkRefused, SinkUnavailable
from ....plugins import Finding
from .entry import CatalogEntry, TableCatalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACE = "headrace.path"  # in the metadata of a column
PROVIDER = "headrace.tables"
_DELTA_CATALOG = "DeltaCatalog"


class SparkCatalog(TableCatalog, frozen=True, kw_only=True, tag="spark"):
    """The catalog that Spark calls spark_catalog."""

    WITHIN: ClassVar[str] = "database"

    database: str = ""  # for all tables; "": each in the database that has the name of its schema

    def register(self, entry: CatalogEntry) -> bool:
        """Make the entry; one with other columns is made anew."""
        # Only here: the config is also read where there is no pyspark.
        from py4j.protocol import Py4JError  # type: ignore[import-untyped] # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415
        from pyspark.sql import SparkSession  # noqa: PLC0415

        # Not `getOrCreate`: in a pipeline that is ending, it would start another Spark.
        running = SparkSession._instantiatedSession
        if running is None or running.sparkContext._jsc is None:
            raise SinkUnavailable("Spark's catalog: Spark has ended")
        try:
            return _register(running, entry, self.WITHIN)
        except PySparkException as error:
            reason = error.getCondition() or type(error).__name__
            raise SinkRefused(
                f"Spark's catalog refuses {entry.name}: {reason}",
                hint="Look into Spark's log, pipeline/spark.log in data_dir, for the whole reason.",
            ) from None
        except (Py4JError, OSError) as error:
            raise SinkUnavailable(f"Spark's catalog: {type(error).__name__}") from None

    def check(self, storage: Mapping[str, str]) -> Finding:
        """Nothing can be asked without Spark; the pipeline finds out when it starts."""
        return Finding(
            "catalog", ok=True, detail="Spark's own catalog; the pipeline looks at it when it runs"
        )


def _register(spark: "SparkSession", entry: CatalogEntry, setting: str) -> bool:
    name = _quoted(entry)
    found = _found(spark, entry)
    uses_delta = _DELTA_CATALOG in (spark.conf.get("spark.sql.catalog.spark_catalog", "") or "")
    if found is not None:
        entry.expect_ours(found.place, setting)
        # Delta's catalog shows what the Delta log says.
        if found.provider == "delta" or (found.columns, found.comment) == _shown(entry):
            return False
        if found.provider != PROVIDER:
            raise SinkRefused(
                f"{entry.name} in Spark's catalog is a table USING {found.provider} in the same "
                "folder; it is left as it is",
                hint=f"Remove that entry, or set catalog.{setting} or catalog.names of the sink.",
            )
        spark.sql(f"DROP TABLE {name}")
    else:
        spark.sql(f"CREATE DATABASE IF NOT EXISTS `spark_catalog`.`{entry.name.schema}`")
    if uses_delta:
        place = _path(entry).replace("\\", "\\\\").replace("'", "\\'")
        spark.sql(f"CREATE TABLE {name} USING delta LOCATION '{place}'")
    else:
        _create(spark, entry)
    return True


class _Found(msgspec.Struct):
    place: str
    provider: str
    columns: list[Any]
    comment: str


def _found(spark: "SparkSession", entry: CatalogEntry) -> _Found | None:
    """What the catalog has under that name; DESCRIBE shows no folder of a source in Python."""
    jvm: Any = spark.sparkContext._jvm
    session: Any = spark._jsparkSession
    catalog = session.sessionState().catalog()
    schema = jvm.scala.Option.apply(entry.name.schema)
    ident = jvm.org.apache.spark.sql.catalyst.TableIdentifier(entry.name.table, schema)
    if not catalog.tableExists(ident):
        return None
    table = catalog.getTableMetadata(ident)
    uri = table.storage().locationUri()
    provider, comment = table.provider(), table.comment()
    return _Found(
        uri.get().toString() if uri.isDefined() else "",
        provider.get().lower() if provider.isDefined() else "",
        msgspec.json.decode(table.schema().json())["fields"],
        comment.get() if comment.isDefined() else "",
    )


def _shown(entry: CatalogEntry) -> tuple[list[Any], str]:
    """Columns and comment as the catalog is to have them."""
    columns = [
        {"name": each.name, "type": each.type, "nullable": each.nullable, "metadata": metadata}
        for at, each in enumerate(entry.columns)
        for metadata in [
            ({"comment": each.comment} if each.comment else {})
            | ({PLACE: entry.folder.uri} if at == 0 else {})
        ]
    ]
    return columns, entry.comment


def _quoted(entry: CatalogEntry) -> str:
    """The name for Spark's parser, to which 2024 without quotes is a number."""
    return ".".join(f"`{part}`" for part in ("spark_catalog", *entry.name))


def _path(entry: CatalogEntry) -> str:
    """The folder as Hadoop writes it: an address in which nothing is escaped."""
    uri = entry.folder.uri
    return uri if "://" in uri else f"file://{uri}"


def _create(spark: "SparkSession", entry: CatalogEntry) -> None:
    from pyspark.sql.types import StructType  # noqa: PLC0415 - as above

    columns, comment = _shown(entry)
    spark.catalog.createTable(
        _quoted(entry),
        path=_path(entry),
        source=PROVIDER,
        schema=StructType.fromJson({"type": "struct", "fields": columns}),
        description=comment,
    )
