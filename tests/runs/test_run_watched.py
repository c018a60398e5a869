"""Watching whole jobs: the metrics that Ray serves of a run on it."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jobs.cli import main
from jobs.watching.metrics import METRICS
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec

EXPORT_S = 60.0
"""Ray's exporter is told every 10 s; on a busy machine it takes longer."""


@pytest.mark.ray
def test_the_metrics_of_a_real_run_are_served_and_agree_with_its_results(
    ray_session: ModuleType, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    with rows.open("a") as file:
        file.write('{"id": "bad", "tokens": "no list"}\n')
    spec = write_spec(
        tmp_path, rows=rows, name="watched", workers={"price_per_hour": 2.0}, errors={"max_rate": 0.5},
    )  # fmt: skip
    assert main(["run", str(spec), "--quiet"]) == 0
    values = served(ray_session, "watched")
    table = rows_of(tmp_path / "run")
    tokens = sum(table["new_tokens"].to_pylist())
    assert values["ray_draftmill_samples_total", "ok"] == 12 and values["ray_draftmill_samples_total", "failed"] == 1
    assert values["ray_draftmill_tokens_total", ""] == values["ray_draftmill_decoded_tokens_total", ""] == tokens
    assert values["ray_draftmill_nfe_total", ""] == sum(filter(None, table["nfe"].to_pylist()))
    assert values["ray_draftmill_drafts_proposed_total", ""] == sum(filter(None, table["proposed"].to_pylist()))
    assert values["ray_draftmill_drafts_accepted_total", ""] == sum(filter(None, table["accepted"].to_pylist()))
    assert values["ray_draftmill_errors_total", "bad_tokens"] == 1
    assert values["ray_draftmill_commit_seconds_count", ""] == values["ray_draftmill_units", "done"] == 4
    assert values["ray_draftmill_running", ""] == 0
    assert values["ray_draftmill_cost_total", ""] > 0
    silent = {
        "draftmill_worker_deaths",
        "draftmill_unit_failures",
        "draftmill_nfe_draft",
    }  # nothing failed; it drafts itself
    names = {name for name, _ in values}
    assert {metric.name for metric in METRICS} == {
        metric.name for metric in METRICS if metric.exported in names or f"{metric.exported}_sum" in names
    } | silent


def served(ray: ModuleType, run: str) -> dict[tuple[str, str], float]:
    """The values of one run at the metrics port of Ray's node, by name and own label, once its end is there."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    until_s = time.monotonic() + EXPORT_S
    values: dict[tuple[str, str], float] = {}
    while values.get(("ray_draftmill_running", "")) != 0 and time.monotonic() < until_s:
        time.sleep(0.5)
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        values = {
            (sample.name, sample.labels.get("status", sample.labels.get("error_class", ""))): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("run") == run and "le" not in sample.labels
        }
        assert all(sample["decoder"] == "assd" for sample in labels_of(families, run))
    return values


def labels_of(families: Sequence[Metric], run: str) -> list[dict[str, str]]:
    samples = [sample for family in families for sample in family.samples]
    return [sample.labels for sample in samples if sample.labels.get("run") == run]
