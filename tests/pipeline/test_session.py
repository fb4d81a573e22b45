"""Spark's session, when its Java process goes away."""

import subprocess
import sys
from pathlib import Path

import pytest

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
