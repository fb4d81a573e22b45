"""Runs SQL on Delta tables with delta-spark, on a Spark that it knows; lines in, lines of JSON out.

PYTHONPATH=…/python python tests/faults/delta_spark.py JARS
"""

import json
import sys

from pyspark.sql import SparkSession

MARK = "RESULT "  # Spark writes lines of its own


def main() -> None:
    """Answer until the input ends."""
    settings: dict[str, bool | float | int | str | None] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.jars": sys.argv[1],
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        # Or VACUUM has 10,000 tasks.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "1",
        # The tables are small: compiling takes longer than everything else.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    for statement in sys.stdin:
        rows = [list(map(str, row)) for row in spark.sql(statement).collect()]
        sys.stdout.write(f"{MARK}{json.dumps(rows)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
