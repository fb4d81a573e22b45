"""A query from the log into Delta tables, and Spark SQL over them: no jar, no code of one's own.

Set `HEADRACE_URL` to a running server (such as `http://127.0.0.1:3000`) or `HEADRACE_LOG` to the
log's folder on this machine, and `HEADRACE_LAKE` to where the tables shall be.
"""

import os
import sys

from pyspark.sql import SparkSession

URL = os.environ.get("HEADRACE_URL", "")
SOURCE = {"url": URL} if URL else {"path": os.environ.get("HEADRACE_LOG", "data/log")}
LAKE = os.environ.get("HEADRACE_LAKE", "lake")

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.appName("structured-streaming").getOrCreate()

changes = spark.readStream.format("headrace").options(**SOURCE).load()

# Started again, the query goes on where its checkpoint is, and applies no change twice. Without
# the trigger it runs on; `query.lastProgress` says how far it is.
query = (
    changes.writeStream.format("headrace.tables")
    .option("checkpointLocation", os.path.join(LAKE, "_checkpoint"))
    .trigger(availableNow=True)
    .start(LAKE)
)
query.awaitTermination()

# The table as it is now. Rows that were replaced or deleted are not read.
orders = spark.read.format("headrace.tables").option("table", "public.orders").load(LAKE)
orders.createOrReplaceTempView("orders")
by_status = spark.sql("SELECT status, count(*) AS orders FROM orders GROUP BY status ORDER BY 1")
by_status.show()
