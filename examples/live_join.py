"""Two captured tables joined while they change: orders, with the customers as they are now.

Each batch of one table's changes is joined with the other table as a sink keeps it. An order whose
customer changes later is not shown again; for that, join the Delta tables of both. Set
`HEADRACE_URL` or `HEADRACE_LOG` as in `structured_streaming.py`, and `HEADRACE_LAKE` to a folder
of this program's own: tables have one writer. To join with those that `headrace pipeline` keeps,
leave out the first query, and read them from the folder of its sink.
"""

import os
import sys

from pyspark.sql import DataFrame, SparkSession

URL = os.environ.get("HEADRACE_URL", "")
SOURCE = {"url": URL} if URL else {"path": os.environ.get("HEADRACE_LOG", "data/log")}
LAKE = os.environ.get("HEADRACE_LAKE", "lake")

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.appName("live-join").getOrCreate()

# This query keeps the customers; it takes the changes that are there, and ends.
customers_only = spark.readStream.format("headrace").options(**SOURCE, tables="public.customers")
keeping = (
    customers_only.load()
    .writeStream.format("headrace.tables")
    .option("checkpointLocation", os.path.join(LAKE, "_customers"))
    .trigger(availableNow=True)
    .start(LAKE)
)
keeping.awaitTermination()

orders = (
    spark.readStream.format("headrace")
    .options(**SOURCE, table="public.orders", where="_change_type = 'insert'")
    .load()
)


def join(batch: DataFrame, batch_id: int) -> None:
    """Write the new orders with their customers."""
    # Read here, the customers are those of now. A DataFrame that is made once, and joined with the
    # stream itself, stays as it was when the query began.
    reader = batch.sparkSession.read.format("headrace.tables")
    customers = reader.options(table="public.customers", columns="id,name").load(LAKE)
    joined = batch.join(customers.withColumnRenamed("id", "customer_id"), "customer_id", "left")
    # The batch's own folder is overwritten, because a batch may come twice.
    folder = os.path.join(LAKE, f"orders_with_customers/batch={batch_id}")
    joined.select("id", "customer_id", "name").write.mode("overwrite").parquet(folder)


query = (
    orders.writeStream.foreachBatch(join)
    .option("checkpointLocation", os.path.join(LAKE, "_joined"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
