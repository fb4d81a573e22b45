"""How much a run tries; `make nightly` tries more."""

import os

NIGHTLY = bool(os.environ.get("HEADRACE_NIGHTLY"))


def times(usual: int, *, nightly: int) -> int:
    """How often to try something."""
    return nightly if NIGHTLY else usual
