"""The server against what /openapi.json promises, asked by Schemathesis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.change.event import Op
from headrace.serve import ServerSettings
from headrace.sources import Phase, Status
from tests.serve.conftest import Site, Sites

ROOT = Path(__file__).parents[2]

# `positive_data_acceptance` is run by the check of openapi_checks.py.
LEFT_OUT = "positive_data_acceptance"


@pytest.fixture
def shop(sites: Sites) -> Site:
    """A server with something of everything: changes, a cursor, a key, a source."""
    site = sites(ServerSettings(port=0, stall_seconds=86_400.0))
    site.statuses = [Status(source="shop", phase=Phase.STREAMING)]
    site.writer.put_many("users", 20)
    site.writer.put("orders", "1", op=Op.READ, total="9.90")
    site.writer.delete("orders", "1")
    site.http.put("/v1/cursors/billing", json={"sequence": 3}).raise_for_status()
    site.http.post("/v1/keys", json={"tenant": "t1"}).raise_for_status()
    return site


@pytest.mark.slow
def test_every_answer_is_one_that_is_described(shop: Site, tmp_path: Path) -> None:
    # No 500, and no status, media type, header or body that is not in the description; what it
    # calls wrong is refused, and what it calls right is taken.
    done = _schemathesis(shop, tmp_path)
    assert done.returncode == 0, done.stdout[-20_000:]
    paths = shop.get("/openapi.json").json()["paths"].values()
    routes = sum(method in ("get", "put", "post", "delete") for path in paths for method in path)
    assert f"Selected: {routes}/{routes}" in done.stdout  # none was left out
    assert f"Tested: {routes}" in done.stdout


def _schemathesis(site: Site, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{site.url}/openapi.json"),
        *("--checks", "all", "--exclude-checks", LEFT_OUT),
        *("--suppress-health-check", "all", "--request-timeout", "60", "--no-color"),
        # One worker: CPython 3.11 takes the syntax trees of two threads for a broken one
        # ("AST constructor recursion depth mismatch").
        *("--max-examples", "10", "--workers", "1"),
    ]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.serve.openapi_checks", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        env=os.environ | hooks,
        cwd=folder,  # it keeps what it found where it runs
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
