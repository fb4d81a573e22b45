"""A process that captures a SQLite database into a log until it is killed, or its input ends."""

import sys

from headrace.capture import Capture
from headrace.log import Log
from headrace.sources.sqlite import Sqlite
from headrace.sources.worker import Apart


def main(path: str, log_dir: str) -> None:
    """Capture, as `headrace run` does."""
    with Log.open(log_dir) as log:
        capture = Capture(Apart(Sqlite(name="shop", path=path)), log)
        capture.start()
        sys.stdin.read()
        capture.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
