"""Spark's session, when its Java process goes away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("java")]

# A killed process closes its connections a moment before it can be seen to have ended.
ENDING = """
import sys
from pathlib import Path
from headrace.pipeline.session import opened_session, rejects_tasks

with opened_session("local[1]", {}, journal=Path(sys.argv[1])) as spark:
    assert not rejects_tasks(spark)
    java = spark.sparkContext._gateway.proc
    java.kill()
    java.wait()
    java.poll = lambda: None
    assert not rejects_tasks(spark)
print("ended in order")
"""


def test_a_java_that_is_ending_is_no_error_of_its_own(tmp_path: Path) -> None:
    run = [sys.executable, "-c", ENDING, str(tmp_path / "spark.log")]
    told = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "ended in order\n"), told.stderr


HANGING = """
import os, signal, sys
from pathlib import Path
from headrace.pipeline.session import ends_in_time, opened_session

with opened_session("local[1]", {}, journal=Path(sys.argv[1])) as spark, ends_in_time(spark, 2.0):
    os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGSTOP)
"""


def test_a_java_that_never_answers_does_not_keep_the_process(tmp_path: Path) -> None:
    run = [sys.executable, "-c", HANGING, str(tmp_path / "spark.log")]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert "not ended after seconds=2, so Spark is killed" in done.stderr
    assert "opened_session" in done.stderr  # what it waits for


HIDING = """
import sys
from pathlib import Path
from pyspark.errors import PySparkException
from headrace.pipeline.session import hide_task_errors, opened_session

with opened_session("local[1]", {"spark.ui.enabled": "false"}, journal=Path(sys.argv[1])) as spark:
    if sys.argv[2] == "hidden":
        hide_task_errors(spark)
    try:
        spark.range(1).selectExpr("CAST(concat('Oleander-', id) AS int)").collect()
    except PySparkException:
        print("failed")
"""


def test_errors_of_tasks_are_not_in_sparks_log(tmp_path: Path) -> None:
    shown = {}
    for how in ("hidden", "shown"):
        journal = tmp_path / how / "spark.log"
        run = [sys.executable, "-c", HIDING, str(journal), how]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.stdout == "failed\n", done.stderr
        files = [journal, journal.with_suffix(".out")]
        shown[how] = done.stderr + "".join(file.read_text() for file in files if file.exists())
    assert "Oleander" not in shown["hidden"]
    assert "Oleander" in shown["shown"]  # or it would prove nothing


PAGES = """
import socket, sys, urllib.request
from pathlib import Path
import psutil
from headrace.pipeline.session import opened_session

given = {"spark.hadoop.fs.s3a.key": "Oleander-4711", "spark.ui.port": sys.argv[2]}
with opened_session("local[1]", given, journal=Path(sys.argv[1])) as spark:
    address = spark.sparkContext.uiWebUrl
    place = f"{address}/api/v1/applications/{spark.sparkContext.applicationId}/environment"
    page = urllib.request.urlopen(place).read().decode()
    java = psutil.Process(spark.sparkContext._gateway.proc.pid)
    ports = [each for each in java.net_connections() if each.status == "LISTEN"]
    print(address, "fs.s3a.key" in page, "Oleander" in page)
    print({each.laddr.ip.removeprefix("::ffff:") for each in ports})
"""


def test_pages_of_spark_are_for_this_machine_and_show_no_setting(tmp_path: Path) -> None:
    port = str(free_port())
    run = [sys.executable, "-c", PAGES, str(tmp_path / "spark.log"), port]
    environment = {k: v for k, v in os.environ.items() if k != "SPARK_LOCAL_IP"}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"http://127.0.0.1:{port} True False",
        "{'127.0.0.1'}",
    ]
