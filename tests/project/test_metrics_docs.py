"""docs/metrics.md names every metric and setting, and its examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from draftmill.actors.metrics.settings import KINDS, Metrics

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()


def test_every_metric_and_setting_is_in_the_docs() -> None:
    for kind, settings in KINDS.items():
        assert kind == "file" or re.search(rf"^\| {kind}\b", TEXT, re.MULTILINE), kind
        for setting in set(settings.model_fields) - {"kind"}:
            assert re.search(rf"\b{setting}\b", TEXT), f"{kind}.{setting}"


def test_the_examples_of_specs_are_valid_metrics() -> None:
    found = [yaml.safe_load(block).get("metrics", []) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    assert sum(map(len, found)) >= 4
    for metrics in found:
        TypeAdapter(Metrics).validate_python(metrics, strict=True)
