"""The same from a client of Spark Connect: the server does the work, and has Headrace installed.

    pip install 'pyspark[connect]'
    SPARK_REMOTE=sc://spark.example:15002 python examples/spark_connect.py

`SPARK_REMOTE=local[2]` starts a server beside this program. Set `HEADRACE_URL` or `HEADRACE_LOG`
(as the server reaches it), and `HEADRACE_LAKE` to a folder of the server's or an address such as
s3://bucket/lake.
"""

import os
import sys

from pyspark.sql import SparkSession

from headrace.pipeline import apply_changes

URL = os.environ.get("HEADRACE_URL", "")
SOURCE = {"url": URL} if URL else {"path": os.path.abspath(os.environ.get("HEADRACE_LOG", "log"))}
LAKE = os.environ.get("HEADRACE_LAKE", "lake")
LAKE = LAKE if "://" in LAKE else os.path.abspath(LAKE)

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
spark = SparkSession.builder.remote(os.environ.get("SPARK_REMOTE", "local[2]")).getOrCreate()

# A table with its own columns.
orders = spark.read.format("headrace").options(**SOURCE, table="public.orders").load()
orders.groupBy("_change_type").count().show()

# All tables, kept equal: by the sink that is Spark's own …
changes = spark.readStream.format("headrace").options(**SOURCE).load()
by_format = (
    changes.writeStream.format("headrace.tables")
    .option("checkpointLocation", os.path.join(LAKE, "by_format", "_checkpoint"))
    .trigger(availableNow=True)
    .start(os.path.join(LAKE, "by_format"))
)
by_format.awaitTermination()

# … or by a function whose batches are applied by all tasks of the server.
by_function = apply_changes(
    changes,
    into=os.path.join(LAKE, "by_function"),
    checkpoint=os.path.join(LAKE, "by_function", "_checkpoint"),
    trigger={"availableNow": True},
)
by_function.awaitTermination()

reader = spark.read.format("headrace.tables").option("table", "public.orders")
for name in ("by_format", "by_function"):
    reader.load(os.path.join(LAKE, name)).orderBy("id").show()

spark.stop()
