"""Makes the sinks in this folder known to a Headrace that finds it in PYTHONPATH."""

from pathlib import Path

import headrace.sinks

headrace.sinks.__path__.append(str(Path(__file__).parent / "sinks"))
