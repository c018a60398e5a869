"""A whole job with the causal models that ship: two workers on a real Ray write the rows of one worker with other slots."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.storage.runs.records import TIMING_COLUMNS
from tests.runs.causal_jobs import job_spec, results_of, run_here

pytestmark = pytest.mark.ray

SPECULATIVE = {"kind": "speculative", "k": 4, "drafter": {"kind": "model", "path": "builtin:ar-micro"}}


def prompts() -> list[dict[str, Any]]:
    """Twenty pieces of real source, from one word to several lines."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    return [{"id": f"{n:02}", "prompt": text[500 * n : 500 * n + 4 + 11 * n]} for n in range(20)]


@pytest.mark.slow
def test_rows_do_not_depend_on_workers_slots_or_units(ray_session, tmp_path):
    sections: dict[str, Any] = {
        "task": {"kind": "complete", "max_new_tokens": 12, "stop": ["\n\n"]},
        "model": {"path": "builtin:ar-tiny", "device": "cpu"},
        "sampling": {"temperature": 0.9, "top_p": 0.95},
        "decoder": SPECULATIVE,
    }
    output = {"path": str(tmp_path / "ray"), "unit_rows": 3}
    spec = job_spec(tmp_path, prompts(), **sections, output=output, workers={"count": 2}, batching={"max_rows": 3})
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert main(["run", str(path), "--quiet"]) == 0
    by_two = results_of(spec)

    output = {"path": str(tmp_path / "here"), "unit_rows": 20}
    by_one = run_here(job_spec(tmp_path, prompts(), **sections, output=output, batching={"max_rows": 16}))
    left_out = {*TIMING_COLUMNS, "unit"}
    assert len(by_one) == 20 and by_one.keys() == by_two.keys()
    for name, row in by_one.items():
        assert row["status"] == "ok"
        kept = [{key: value for key, value in each.items() if key not in left_out} for each in (row, by_two[name])]
        assert kept[0] == kept[1]
    assert {row["finish"] for row in by_one.values()} == {"length", "stop"}
    assert sum(row["accepted"] for row in by_one.values()) >= 20

    sections["decoder"] = {"kind": "autoregressive"}
    sequential = run_here(job_spec(tmp_path, prompts(), **sections, output={"path": str(tmp_path / "ar")}))
    for name, row in sequential.items():
        assert [row[key] for key in ("tokens", "text", "finish")] == [
            by_one[name][key] for key in ("tokens", "text", "finish")
        ]
