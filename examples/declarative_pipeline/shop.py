"""A captured database in a declarative pipeline: a table of Spark's, and Delta tables of ours.

Set `HEADRACE_URL` to a running server or `HEADRACE_LOG` to the log's folder on this machine, and
`HEADRACE_LAKE` to where the Delta tables shall be.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

URL = os.environ.get("HEADRACE_URL", "")
SOURCE = {"url": URL} if URL else {"path": os.environ.get("HEADRACE_LOG", "data/log")}
LAKE = os.environ.get("HEADRACE_LAKE", "lake")

spark = SparkSession.active()


# A streaming table with the columns of a captured one, and what happened to its rows. The source
# itself knows the columns: a function such as `rows`, which asks Spark for a plan's columns, is
# refused within a pipeline.
@dp.table
def order_changes() -> DataFrame:
    """Every change of an order."""
    orders = spark.readStream.format("headrace").options(**SOURCE)
    return orders.option("table", "public.orders").load().drop("_absent")


@dp.materialized_view
def changes_by_kind() -> DataFrame:
    """How often orders were inserted, updated and deleted."""
    return spark.read.table("order_changes").groupBy("_change_type").count()


# All tables of the database, kept equal to it.
dp.create_sink("lake", "headrace.tables", {"path": LAKE})


@dp.append_flow(target="lake")
def mirror() -> DataFrame:
    """All changes of all tables."""
    return spark.readStream.format("headrace").options(**SOURCE).load()
