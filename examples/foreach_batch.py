"""One table's changes, batch by batch, into a function of one's own.

Set `HEADRACE_URL` or `HEADRACE_LOG` as in `structured_streaming.py`, and `HEADRACE_LAKE` to a
folder for what is written.
"""

import os
import sys

from pyspark.sql import DataFrame, SparkSession

URL = os.environ.get("HEADRACE_URL", "")
SOURCE = {"url": URL} if URL else {"path": os.environ.get("HEADRACE_LOG", "data/log")}
LAKE = os.environ.get("HEADRACE_LAKE", "lake")

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.appName("foreach-batch").getOrCreate()

# The table's own columns, and what happened. `columns` and `where` choose before Spark sees a row.
orders = (
    spark.readStream.format("headrace")
    .options(**SOURCE)
    .option("table", "public.orders")
    .option("columns", "id,status,_change_type,_commit_timestamp,_sequence")
    .option("where", "_change_type IN ('insert', 'update_postimage')")
    .load()
)


def store(batch: DataFrame, batch_id: int) -> None:
    """Write how many orders have come to each status."""
    counts = batch.groupBy("status").count()
    # The batch's own folder is overwritten, because a batch may come twice.
    counts.write.mode("overwrite").parquet(os.path.join(LAKE, f"statuses/batch={batch_id}"))


query = (
    orders.writeStream.foreachBatch(store)
    .option("checkpointLocation", os.path.join(LAKE, "_statuses"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
