"""Metrics, dashboard, alerts and docs agree: each name that one of them uses is known to the others."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.jobs.drive.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "infra" / "grafana.json").read_text())
ALERTS = ROOT / "infra" / "alerts.yaml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
EXPORTED = {metric.exported: metric for metric in METRICS}
HISTOGRAMS = {
    f"{name}_{part}": metric
    for name, metric in EXPORTED.items()
    if metric.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
SERIES = {name: metric for name, metric in (EXPORTED | HISTOGRAMS).items() if f"{name}_bucket" not in HISTOGRAMS}

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def expressions() -> list[str]:
    """Every query of the dashboard and of the alerts."""
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    return shown + asked + [rule["expr"] for rule in RULES]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression))


def test_dashboard_and_alerts_use_metrics_that_exist_and_every_metric_is_used():
    used = set().union(*map(names_in, expressions()))
    assert used <= set(SERIES), f"unknown: {sorted(used - set(SERIES))}"
    shown = {SERIES[name].name for name in used}
    assert shown == {metric.name for metric in METRICS}


def test_labels_in_queries_are_those_of_the_metrics():
    for expression in expressions():
        for name, selector in re.findall(r"\b(ray_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*=", selector))
            assert labels <= {"run", "decoder", *SERIES[name].labels}, expression
        grouped = {label for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in found.split(", ")}
        known = {"run", "le"}.union(*(SERIES[name].labels for name in names_in(expression)))
        assert grouped <= known, expression


def test_counters_are_used_as_rates_only():
    for expression in expressions():
        for name in names_in(expression):
            if SERIES[name].kind != "gauge":
                assert re.search(rf"(rate|increase)\({name}\b", expression), expression


@promtool
def test_promtool_accepts_the_rules_and_finds_a_planted_mistake(tmp_path):
    def checked(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)

    result = checked(ALERTS)
    assert result.returncode == 0 and f"{len(RULES)} rules found" in result.stdout, result.stderr
    broken = tmp_path / "broken.yaml"
    broken.write_text(ALERTS.read_text().replace("sum by (run) (", "sum by (run (", 1))
    assert checked(broken).returncode != 0


@promtool
def test_the_alerts_fire_for_what_they_are_for_and_for_nothing_else(tmp_path):
    """Five runs, scraped every 15 s for an hour: one goes well, one stalls, one's driver is killed, one ends, one fails."""

    def series(name: str, run: str, values: str, **labels: str) -> dict[str, str]:
        more = "".join(f',{label}="{value}"' for label, value in labels.items())
        return {"series": f'{name}{{run="{run}",WorkerId="{run}"{more}}}', "values": values}

    always, until_half = "x240", "x120"
    given = [
        *(series("ray_draftmill_running", run, f"1+0{always}") for run in ("well", "stalled", "failing")),
        series("ray_draftmill_running", "killed", f"1+0{until_half} stale"),
        series("ray_draftmill_running", "ended", f"1+0{until_half} 0 stale"),
        *(series("ray_draftmill_workers", run, f"2+0{always}", status="up") for run in ("well", "failing")),
        series("ray_draftmill_workers", "stalled", f"0+0{always}", status="up"),
        series("ray_draftmill_seconds_without_progress", "well", f"3+0{always}"),
        series("ray_draftmill_seconds_without_progress", "stalled", f"0+15{always}"),
        series("ray_draftmill_samples_total", "well", f"0+10{always}", status="ok"),
        series("ray_draftmill_samples_total", "well", f"0+0{always}", status="failed"),
        series("ray_draftmill_samples_total", "failing", f"0+10{always}", status="ok"),
        series("ray_draftmill_samples_total", "failing", f"0+2{always}", status="failed"),
        series("ray_draftmill_worker_deaths_total", "failing", f"0+1{always}"),
        series("ray_draftmill_unit_failures_total", "failing", f"0+1{always}", error_class="store"),
        series("ray_draftmill_commit_seconds_bucket", "failing", f"0+0{always}", le="30"),
        series("ray_draftmill_commit_seconds_bucket", "failing", f"0+5{always}", le="100"),
        series("ray_draftmill_commit_seconds_bucket", "failing", f"0+5{always}", le="+Inf"),
    ]
    fires = {
        "DraftmillRunStalled": ["stalled"],
        "DraftmillNoWorkers": ["stalled"],
        "DraftmillDriverGone": ["killed"],
        "DraftmillErrorRate": ["failing"],
        "DraftmillUnitFailures": ["failing"],
        "DraftmillWorkerDeaths": ["failing"],
        "DraftmillSlowCommits": ["failing"],
    }
    assert set(fires) == {rule["alert"] for rule in RULES}
    at = {alert: "40m" if alert == "DraftmillDriverGone" else "58m" for alert in fires}
    (tmp_path / "fires.yaml").write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(tmp_path / "alerts.yaml")],
                "evaluation_interval": "1m",
                "tests": [
                    {
                        "interval": "15s",
                        "input_series": given,
                        "alert_rule_test": [
                            {
                                "eval_time": at[alert],
                                "alertname": alert,
                                "exp_alerts": [
                                    {"exp_labels": {"run": run, "severity": severity(alert)}} for run in runs
                                ],
                            }
                            for alert, runs in fires.items()
                        ],
                    }
                ],
            }
        )
    )
    bare = [{name: rule[name] for name in ("alert", "expr", "for", "labels")} for rule in RULES]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "draftmill", "rules": bare}]}))
    result = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "fires.yaml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def severity(alert: str) -> str:
    return str(next(rule["labels"]["severity"] for rule in RULES if rule["alert"] == alert))
