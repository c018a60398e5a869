"""The queries of docs/analysis.md, run as they are on two small runs: each answers its question as a plain loop does."""

import json
import random
import re
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from draftmill.jobs.cli import main
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.runs.metric_files import read_metrics
from draftmill.storage.stores.store import open_store
from tests.conftest import ROOT
from tests.jobs.compare.made_runs import write_metrics
from tests.runs.jobs_of_tests import VOCABULARY, write_spec

PAGE = (ROOT / "docs" / "analysis.md").read_text()
ACCEPTANCE, SLOWEST = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
OPENING, BY_LABEL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """runs/a and runs/b: 30 rows with a label, two of which fail, by two decoders, and metrics of both."""
    place = tmp_path_factory.mktemp("analysis")
    rng = random.Random(0)
    with (place / "rows.jsonl").open("w") as file:
        for number in range(30):
            ids = [rng.randrange(6, VOCABULARY) for _ in range(rng.randint(6, 30))]
            tokens: list[Any] = [None if rng.random() < 0.5 else token for token in ids]
            tokens = [VOCABULARY + 7, None] if number in (3, 8) else [None, *tokens]
            file.write(json.dumps({"id": f"row-{number}", "tokens": tokens, "level": f"level {number % 3}"}) + "\n")
    for name, decoder in {"a": {"kind": "any_subset"}, "b": {"kind": "assd", "k": 3}}.items():
        columns = {"path": str(place / "rows.jsonl"), "columns": {"id": "id", "tokens": "tokens"}, "keep": ["level"]}
        spec = write_spec(place, rows=place / "rows.jsonl", out=f"{name}", input=columns, decoder=decoder)
        settings = ["--set", f"output.path={place / 'runs' / name}", "--set", "errors.max_rate=0.5"]
        assert main(["run", str(spec), "--local", "--quiet", *settings]) == 0
        manifest = read_manifest(open_store(str(place / "runs" / name)))
        assert manifest is not None
        values = {
            "exact_match": [float(rng.random() > 0.5) for _ in range(30)],
            "rougeL": [rng.random() for _ in range(30)],
        }
        write_metrics(place / "runs" / name, values, units=len(manifest.units))
    return place


def rows(folder, run: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in sorted((folder / "runs" / run / "data").glob("*.parquet"))]
    measured = read_metrics(open_store(str(folder / "runs" / run)))
    assert measured is not None
    by_id = {entry["id"]: entry for entry in measured.to_pylist()}
    found: list[dict[str, Any]] = pa.concat_tables(tables, promote_options="default").to_pylist()
    return [row | {name: by_id[row["id"]][name] for name in ("exact_match", "rougeL")} for row in found]


def good(folder, run: str) -> list[dict[str, Any]]:
    return [row for row in rows(folder, run) if row["status"] == "ok"]


def sql(folder, query: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.chdir(folder)
    relation: Any = duckdb.sql(query)
    found: list[dict[str, Any]] = relation.to_arrow_table().to_pylist()
    return found


@pytest.mark.slow
def test_the_first_lines_open_a_run_in_four_ways(folder, tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    names: dict[str, Any] = {}
    exec(OPENING, names)
    ids = sorted(row["id"] for row in rows(folder, "a"))
    for found in (names["by_datasets"], names["by_pandas"], names["by_polars"]):
        assert sorted(found["id"]) == ids
    assert sorted(row[0] for row in names["by_duckdb"].fetchall()) == ids


def test_acceptance_by_decoder_and_length(folder, monkeypatch):
    every = good(folder, "a") + good(folder, "b")
    found = sql(folder, ACCEPTANCE, monkeypatch)
    groups = {(row["decoder"], row["new_tokens"] // 10 * 10) for row in every}
    assert [(row["decoder"], row["from_tokens"]) for row in found] == sorted(groups)
    for row in found:
        mine = [
            one
            for one in every
            if (one["decoder"], one["new_tokens"] // 10 * 10) == (row["decoder"], row["from_tokens"])
        ]
        sums = {name: sum(one[name] for one in mine) for name in ("accepted", "proposed", "nfe", "new_tokens")}
        assert row["samples"] == len(mine)
        assert row["acceptance"] == (pytest.approx(sums["accepted"] / sums["proposed"]) if sums["proposed"] else None)
        assert row["nfe_per_token"] == pytest.approx(sums["nfe"] / sums["new_tokens"])


def test_slowest_samples(folder, monkeypatch):
    every = good(folder, "a")
    expected = sorted(every, key=lambda row: -row["total_s"])[:10]
    found = sql(folder, SLOWEST, monkeypatch)
    assert [row["total_s"] for row in found] == [row["total_s"] for row in expected]
    total = sum(row["device_s"] for row in every)
    shares = {row["id"]: row["device_s"] / total for row in every}
    assert all(row["share_of_device"] == pytest.approx(shares[row["id"]]) for row in found)


def test_a_metric_by_a_kept_label(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(BY_LABEL, names)
    found = names["by_level"]
    assert list(found.index) == ["level 0", "level 1", "level 2"]
    for level, row in found.iterrows():
        values = [one["rougeL"] for one in good(folder, "a") if one["keep"]["level"] == level]
        assert row["count"] == len(values) and row["mean"] == pytest.approx(np.mean(values))
        assert row["sem"] == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5)
