"""deploy/: the alert rules and the dashboard, against the metrics of a real server."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.serve import ServerSettings
from headrace.sinks import FailedTable, SinkPhase, SinkStatus, report, verification
from headrace.sinks.report import PipelineFolder
from headrace.sinks.verification import TableOutcome, TableVerification, Verification
from headrace.sources import Phase, Status
from tests.needs import missing
from tests.serve.conftest import Site, Sites

pytestmark = pytest.mark.requirement("P-19")

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "headrace.rules.yml"
DASHBOARD = ROOT / "deploy" / "headrace.dashboard.json"
PAGE = ROOT / "docs" / "deployment.md"
PROMETHEUS_OWN = {"up", "ALERTS"}  # Prometheus makes these itself
SELECTOR = re.compile(r"\b((?:headrace|process)_\w+|up|ALERTS)\b(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")
ADDED = {"job", "instance"}  # labels that a scrape adds


# --- what is written in deploy/ ------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    [group] = msgspec.yaml.decode(RULES.read_bytes())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def shown() -> list[str]:
    """Every expression of the dashboard, with its variables set."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    found += [each["expr"] for each in dashboard["annotations"]["list"]]
    values = {"$__rate_interval": "5m", "$instance": ".*"}
    for name, value in values.items():
        found = [expr.replace(name, value) for expr in found]
    assert not [expr for expr in found if "$" in expr]
    return found


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + shown()


# --- a server in a state -------------------------------------------------------------------------


def source(phase: Phase = Phase.STREAMING, **fields: Any) -> Status:
    now = time.time_ns() // 1000
    given = {"heard_at": now, "stored_at": now} | fields
    return Status(source="shop", phase=phase, **given)


def sink(phase: SinkPhase = SinkPhase.STREAMING, **fields: Any) -> SinkStatus:
    known = {"sequence": 20, "lag": 0, "batch": 1, "batch_seconds": 0.5}
    return SinkStatus(sink="lake", phase=phase, **(known | fields))


class Watched:
    """A server with a source and a sink, which are well until a test says otherwise."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.folder = folder
        self.be()

    def be(
        self,
        status: Status | None = None,
        stored: SinkStatus | None = None,
        verified: TableOutcome = TableOutcome.EQUAL,
    ) -> None:
        """Be in this state."""
        self.site.statuses = [status or source()]
        report.write(self.folder, [stored or sink()])
        table = TableVerification(source="shop", table="public.users", outcome=verified, rows=20)
        found = Verification(sink="lake", at=time.time_ns() // 1000, tables=(table,))
        verification.note(self.folder / "lake", found)

    def scrape(self) -> dict[str, float]:
        """Every series, as Prometheus stores it."""
        families = text_string_to_metric_families(self.site.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        own = {"job": "headrace", "instance": "here:3000"}
        stored = {sample.name + _labels(sample.labels | own): sample.value for sample in samples}
        return stored | {f"up{_labels(own)}": 1.0}


def _labels(labels: dict[str, str]) -> str:
    pairs = (f"{name}={json.dumps(value)}" for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


@pytest.fixture
def watched(sites: Sites, tmp_path: Path) -> Watched:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    pipeline = PipelineFolder(folder=folder, sinks=("lake",))
    site = sites(ServerSettings(port=0, pipeline=pipeline))
    site.writer.put_many("users", 20)
    site.http.put("/v1/cursors/billing", json={"sequence": 3}).raise_for_status()
    site.get("/v1/changes")
    site.service.requests.grpc["Poll", "OK"] += 1
    site.service.requests.grpc_seconds["Poll"].observe(0.1)
    return Watched(site, folder)


# --- every name is one that is scraped -----------------------------------------------------------


def test_every_metric_and_label_of_an_expression_is_in_a_scrape(watched: Watched) -> None:
    known: dict[str, set[str]] = {}
    for series in watched.scrape():
        name, _, labels = series.partition("{")
        known.setdefault(name, set()).update(LABEL.findall(labels))
    for expr in expressions():
        selectors = SELECTOR.findall(expr)
        assert selectors, expr
        for name, labels in selectors:
            if name not in PROMETHEUS_OWN:
                assert name in known, f"{name} of {expr}"
                unknown = set(LABEL.findall(labels)) - known[name] - ADDED
                assert not unknown, f"{unknown} of {expr}"


def test_every_alert_is_in_the_docs_and_none_other() -> None:
    written = re.findall(r"^\| `(Headrace\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(written) == sorted(rule["alert"] for rule in rules())


# --- promtool ------------------------------------------------------------------------------------


def promtool(*arguments: str | Path, given: str = "") -> str:
    """What promtool prints when it finds no mistake."""
    own = ROOT / ".venv" / "promtool" / "usr" / "bin"  # by scripts/setup.sh
    program = shutil.which("promtool", path=f"{os.environ['PATH']}:{own}")
    if program is None:
        missing("promtool is not installed (scripts/setup.sh promtool)")
    command = [program, *map(str, arguments)]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_reads_every_rule_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    promtool("check", "rules", RULES)
    records = [{"record": f"r{n}", "expr": expr} for n, expr in enumerate(shown())]
    file = tmp_path / "dashboard.yml"
    file.write_bytes(msgspec.yaml.encode({"groups": [{"name": "shown", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", file)


def test_promtool_finds_nothing_wrong_with_the_metrics_but_old_names(watched: Watched) -> None:
    told = promtool("check", "metrics", given=watched.site.get("/metrics").text)
    assert told == ""


FAILED = FailedTable("public.users", 7, "no key", "Give it one.")
STATES: dict[str, tuple[set[str], Callable[[Watched], object]]] = {
    "well": (set(), lambda w: w.be()),
    "a source has halted": (
        {"HeadraceSourceHalted", "HeadraceUnhealthy"},
        lambda w: w.be(source(Phase.HALTED, error="gone")),
    ),
    "a database is away": (
        {"HeadraceSourceWaiting", "HeadraceDegraded"},
        lambda w: w.be(source(Phase.WAITING, error="refused")),
    ),
    "a source is behind": (
        {"HeadraceSourceBehind", "HeadraceUnhealthy"},
        lambda w: w.be(source(lag_seconds=100.0)),
    ),
    "a source is paused": (
        {"HeadraceSourcePaused"},
        lambda w: w.be(source(Phase.PAUSED, lag_seconds=100.0)),
    ),
    "a table is not captured": (
        {"HeadraceTablesFailed", "HeadraceDegraded"},
        lambda w: w.be(source(errored={"public.maps": "no"})),
    ),
    "a database keeps too much": (
        {"HeadraceSourceRetains"},
        lambda w: w.be(source(retained_bytes=20_000_000_000)),
    ),
    "a source warns": (
        {"HeadraceSourceWarns", "HeadraceDegraded"},
        lambda w: w.be(source(warnings=("soon",))),
    ),
    "the pipeline is down": (
        {"HeadracePipelineDown", "HeadraceSinkDown", "HeadraceDegraded"},
        lambda w: (w.folder / report.REPORT).unlink(),
    ),
    "a sink has halted": (
        {"HeadraceSinkHalted", "HeadraceSinkDown", "HeadraceDegraded"},
        lambda w: w.be(stored=sink(SinkPhase.HALTED, error="fenced")),
    ),
    "a sink waits": (
        {"HeadraceSinkDown", "HeadraceDegraded"},
        lambda w: w.be(stored=sink(SinkPhase.WAITING, error="refused")),
    ),
    "a sink is paused": (
        {"HeadraceSinkPaused"},
        lambda w: w.be(stored=sink(SinkPhase.PAUSED)),
    ),
    "a sink does not follow a table": (
        {"HeadraceSinkTablesFailed", "HeadraceDegraded"},
        lambda w: w.be(stored=sink(failed_tables=(FAILED,))),
    ),
    "a table is not equal to its source": (
        {"HeadraceSinkTablesDiffer", "HeadraceDegraded"},
        lambda w: w.be(verified=TableOutcome.DIFFERS),
    ),
    "dead letters": (
        {"HeadraceDeadLetters", "HeadraceDegraded"},
        lambda w: w.be(stored=sink(dead_letters=3)),
    ),
}
# What a test cannot bring a server to is set in what it was scraped.
CHANGED = {
    "it does not answer": ({"HeadraceDown"}, {"up": 0.0}),
    "a sink is behind": ({"HeadraceSinkBehind"}, {"headrace_sink_lag_seconds": 400.0}),
    "the log has no room": ({"HeadraceLogWarns"}, {"headrace_log_warnings": 1.0}),
    "the disk is full": ({"HeadraceDiskFull"}, {"headrace_disk_free_bytes": 1.0}),
}


def test_every_state_that_somebody_must_act_on_fires_its_alerts_and_no_other(
    watched: Watched, tmp_path: Path
) -> None:
    tests, tried = [], set[str]()
    for name, (alerts, bring_about) in STATES.items():
        watched.be()
        bring_about(watched)
        tests.append(_expecting(name, alerts, watched.scrape()))
        tried |= alerts
    watched.be()
    for name, (alerts, changed) in CHANGED.items():
        scraped = watched.scrape()
        for metric, value in changed.items():
            [series] = [each for each in scraped if each.partition("{")[0] == metric]
            scraped[series] = value
        tests.append(_expecting(name, alerts, scraped))
        tried |= alerts
    tests += [_errors(watched.scrape()), _rescued(watched.scrape())]
    assert tried | {"HeadraceErrors", "HeadraceValuesRescued"} == {
        rule["alert"] for rule in rules()
    }
    file = tmp_path / "states.yml"
    file.write_bytes(msgspec.yaml.encode({"rule_files": [str(RULES)], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)


def _expecting(name: str, alerts: set[str], scraped: dict[str, float]) -> dict[str, Any]:
    """A unit test for promtool: after two hours in this state, these alerts fire."""
    # The disk of this machine may be as full as it likes; 1 byte left is this test's.
    disk = {"headrace_disk_free_bytes": 50.0, "headrace_disk_size_bytes": 100.0}
    series = []
    for each, value in scraped.items():
        steady = disk.get(each.partition("{")[0], value) if value != 1.0 else value
        series.append({"series": each, "values": f"{steady}x130"})
    fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(alerts)]
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    check = {"expr": expr, "eval_time": "2h", "exp_samples": fires}
    return {
        "name": name,
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [check],
    }


def _errors(scraped: dict[str, float]) -> dict[str, Any]:
    """Requests that fail, ten a minute."""
    test = _expecting("requests fail", {"HeadraceErrors"}, scraped)
    labels = {"route": "/v1/changes", "method": "GET", "status": "503", "instance": "here:3000"}
    series = "headrace_http_requests_total" + _labels(labels)
    test["input_series"].append({"series": series, "values": "0+10x130"})
    return test


def _rescued(scraped: dict[str, float]) -> dict[str, Any]:
    """Values that do not fit their columns, one a minute."""
    test = _expecting("values do not fit", {"HeadraceValuesRescued"}, scraped)
    for each in test["input_series"]:
        if each["series"].startswith("headrace_sink_rescued_values_total"):
            each["values"] = "0+1x130"
    return test
