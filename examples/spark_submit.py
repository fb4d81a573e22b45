"""A job for `spark-submit`: all that the log holds now, applied to Delta tables, for a timer.

    spark-submit --master spark://spark.example:7077 examples/spark_submit.py LOG LAKE

LOG is the address of a running server, or the log's folder where every executor is on its machine.
The Python of driver and executors (`PYSPARK_PYTHON`) has Headrace installed.
"""

import os
import sys

from pyspark.sql import SparkSession

from headrace.pipeline import apply_changes

log, lake = sys.argv[1:]
source = {"url": log} if log.startswith("http") else {"path": log}

spark = SparkSession.builder.appName("headrace").getOrCreate()
query = apply_changes(
    spark.readStream.format("headrace").options(**source).load(),
    into=lake,
    checkpoint=os.path.join(lake, "_checkpoint"),
    trigger={"availableNow": True},
)
query.awaitTermination()
spark.stop()
