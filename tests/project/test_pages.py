"""Pages agree with the code: claims have tests, tables are those of docs/make_specs.py, and all know the same metrics."""

import json
import re
from pathlib import Path

import pytest
import yaml

from docs.make_specs import PAGES, REGION, TABLES, filled
from draftmill.decoders.settings import DECODERS
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict = json.loads((ROOT / "infra" / "grafana.json").read_text())
GROUPS: list[dict] = yaml.safe_load((ROOT / "infra" / "alerts.yaml").read_text())["groups"]
RULES: list[dict] = [rule for group in GROUPS for rule in group["rules"]]
EXPORTED = {metric.exported: metric for metric in METRICS}
HISTOGRAMS = {
    f"{name}_{part}": metric
    for name, metric in EXPORTED.items()
    if metric.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
SERIES = {name: metric for name, metric in (EXPORTED | HISTOGRAMS).items() if f"{name}_bucket" not in HISTOGRAMS}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_settings(page):
    text = page.read_text()
    assert filled(text) == text, "python -m docs.make_specs"


def test_every_table_is_in_one_page_and_every_decoder_has_one():
    found = [name for page in PAGES for _, name, _ in REGION.findall(page.read_text())]
    assert sorted(found) == sorted(TABLES)
    assert all(f"decoder.{kind}" in found for kind, one in DECODERS.items() if set(one.model_fields) != {"kind"})


def test_a_changed_description_would_change_the_page():
    name = "decoder.jacobi"
    line = next(line for line in TABLES[name]().splitlines() if "tokens of a block" in line)
    page = f"<!-- table: {name} -->\n\n{TABLES[name]()}\n<!-- end -->"
    assert filled(page) == page
    assert filled(page.replace(line, "| block_size | text | 1 | another meaning |")) == page
    with pytest.raises(ValueError, match="other numbers of"):
        filled(page.replace("<!-- end -->", "", 1))


def test_the_json_schema_of_a_spec_describes_every_key():
    schema = JobSpec.model_json_schema()
    bare = [
        f"{model}.{key}"
        for model, one in [*schema["$defs"].items(), ("JobSpec", schema)]
        for key, value in one.get("properties", {}).items()
        if "description" not in value and key != "kind" and not {"$ref", "oneOf"} & value.keys()
    ]
    assert not bare
    assert not [model for model, one in schema["$defs"].items() if not one.get("description")]


PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TESTS = yaml.safe_load((ROOT / "tests" / "project" / "guarantee_tests.yaml").read_text())


def missing(named):
    """Those of the tests, `path` or `path::name`, that do not exist."""
    pairs = [test.partition("::") for test in sorted(named)]
    return [
        f"{path}::{name}"
        for path, _, name in pairs
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]


def test_every_test_of_a_guarantee_or_fault_exists():
    named = {test for tests in TESTS.values() for test in tests}
    assert len(named) > 100 and sum("::" in test for test in named) > 60
    assert not missing(named)
    assert missing(["tests/project/test_pages.py::test_none", "tests/test_none.py"]) != []


def test_every_test_and_file_of_tests_that_a_document_names_exists():
    texts = [page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "add-a-decoder.md"]
    named = {name for text in texts for name in re.findall(r"[\w/]+/test_\w+\.py(?:::test_\w+)?", text)}
    assert sum("::" in name for name in named) > 20
    assert not missing({f"tests/{name.removeprefix('tests/')}" for name in named})


def test_every_guarantee_and_fault_has_a_test_and_every_entry_is_one():
    tables = "".join(re.findall(r"^\|.*\| what you lose \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
    faults = re.findall(r"^\| (.*?) \| ", tables, re.MULTILINE)
    guarantees = re.findall(r"^- \*\*(.*?)\.\*\* ", PAGE, re.MULTILINE)
    assert len(faults) > 35 and len(guarantees) > 25
    assert sorted(faults + guarantees) == sorted(TESTS)
    assert all(TESTS.values())
