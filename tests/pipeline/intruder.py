"""Another user of the machine: a JVM without the secret, which sends StopExecutor to a driver.

python -m tests.pipeline.intruder PORT prints `stopped` when the driver obeyed.
"""

import subprocess
import sys
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import java_gateway


def intrude(port: int) -> str:
    """Send it to the driver that listens at a port of this machine."""
    launch: Any = java_gateway.launch_gateway
    jvm = launch(popen_kwargs={"stderr": subprocess.DEVNULL}).jvm
    spark = jvm.org.apache.spark
    conf = spark.SparkConf(False).set("spark.rpc.askTimeout", "60s")
    # Scala's constructors have their defaults in methods of a singleton.
    no_file = getattr(_object(spark, "SecurityManager"), "$lessinit$greater$default$3")()
    manager = spark.SecurityManager(conf, jvm.scala.Option.empty(), no_file)
    rpc = spark.rpc.RpcEnv.create("intruder", "127.0.0.1", 0, conf, manager, False)
    try:
        driver = spark.rpc.RpcAddress("127.0.0.1", port)
        endpoint = rpc.setupEndpointRef(driver, "LocalSchedulerBackendEndpoint")
        any_kind = _object(jvm.scala.reflect, "ClassTag").Any()
        message = _object(spark.scheduler.local, "StopExecutor")
        return "stopped" if endpoint.askSync(message, any_kind) else "ignored"
    except Py4JJavaError as error:
        return f"refused: {error.java_exception}"


def _object(package: Any, name: str) -> Any:
    """A singleton of Scala's."""
    return getattr(getattr(package, f"{name}$"), "MODULE$")


if __name__ == "__main__":
    sys.stdout.write(intrude(int(sys.argv[1])) + "\n")
