"""Options of Spark's Java in tests: no test runs long enough to be worth the better compiler."""

QUICK_JAVA = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
}
