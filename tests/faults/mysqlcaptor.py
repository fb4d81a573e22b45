"""A process that captures a MySQL or MariaDB database into a log until its standard input ends.

python -m tests.faults.mysqlcaptor DATA_DIR URL [SNAPSHOT_ROWS_PER_SECOND]
"""

import select
import sys

from headrace.capture import Capture
from headrace.log import Log
from headrace.secret import Secret
from headrace.sources import Phase
from headrace.sources.mysql import Mysql
from headrace.sources.worker import Apart


def main(data_dir: str, url: str, *pace: str) -> int:
    """Capture; 3: it has halted."""
    source = Mysql(
        name="faults",
        url=Secret(url),
        heartbeat_seconds=0.5,
        snapshot_rows_per_second=int(pace[0]) if pace else None,
    )
    with Log.open(data_dir) as log:
        capture = Capture(Apart(source), log)  # as `headrace run` does
        capture.start()
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            if capture.status().phase is Phase.HALTED:
                sys.stderr.write(f"{capture.status()}\n")
                return 3
        capture.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
