"""Whole jobs that score texts: transformers' own law, and builtin models of every family, alone, resumed and under masks."""

import json
import math
import sysconfig
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml

from draftmill.jobs.cli import main
from draftmill.storage.runs.records import TIMING_COLUMNS, read_results
from draftmill.storage.stores.store import open_store
from tests.runs.causal_jobs import World, run_here

DECODERS = {
    "asarm-tiny": "any_subset",
    "ar-tiny": "autoregressive",
    "mdm-tiny": "stepwise",
    "block-tiny": "block_diffusion",
}


def pieces(count: int, size: int) -> list[str]:
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    return [text[900 * n : 900 * n + size + 7 * n] for n in range(2, count + 2)]


def spec(folder: Path, model: str, rows: list[dict], name: str = "run", **sections) -> Path:
    """The file of a spec for these rows; `sections` replace whole sections."""
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "input": {"path": str(folder / f"{name}.jsonl")},
        "model": {"path": f"builtin:{model}", "device": "cpu"},
        "decoder": {"kind": DECODERS[model]},
        "output": {"path": str(folder / name), "unit_rows": 4},
    } | sections
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
    return folder / f"{name}.yaml"


def table_of(file: Path) -> pa.Table:
    """All results of the finished run."""
    path = yaml.safe_load(file.read_text())["output"]["path"]
    return pa.concat_tables(read_results(open_store(path))).sort_by("id")


def ran(file: Path) -> dict[str, dict]:
    """The result rows by id of a job that this runs."""
    assert main(["run", str(file), "--local", "--quiet"]) == 0
    return {row["id"]: row for row in table_of(file).to_pylist()}


def specs(folder: Path):
    """A job of each kind of score."""
    texts = pieces(6, 80)
    rows = [{"id": str(n), "text": text, "prompt": text[:40], "answer": text[40:]} for n, text in enumerate(texts)]
    mask = {"kind": "score", "mask": {"kind": "lines", "count": 1}}
    few = {"estimate": {"samples": 4}}
    for model, name, task, more in (
        ("ar-tiny", "causal", {"kind": "score"}, {}),
        ("asarm-tiny", "whole", {"kind": "score"}, {}),
        ("asarm-tiny", "masked", mask, {}),
        ("mdm-tiny", "whole-bound", {"kind": "score"} | few, {}),
        ("mdm-tiny", "masked-bound", mask | few, {}),
        ("block-tiny", "blocks", {"kind": "score"} | few, {"decoder": {"kind": "block_diffusion", "block_size": 8}}),
        ("block-tiny", "one-by-one", {"kind": "score"}, {"decoder": {"kind": "block_diffusion", "block_size": 1}}),
    ):
        yield name, spec(folder, model, rows, name, task=task, **more)


@pytest.mark.slow
def test_scores_are_the_same_alone_in_a_resumed_run_and_in_a_dry_run(tmp_path, capsys):
    for name, file in specs(tmp_path):
        found = ran(file)
        assert all(row["status"] == "ok" and row["logprob"] < 0 for row in found.values()), name
        before = {path: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        # What an interruption leaves: a unit without its file, and no manifest.
        lost = min((tmp_path / name / "data").iterdir())
        table = table_of(file)
        for path in (lost, tmp_path / name / "_manifest.json", tmp_path / name / "_SUCCESS"):
            path.unlink()
        ran(file)
        after, timing = table_of(file), sorted(TIMING_COLUMNS)
        assert after.drop_columns(timing).equals(table.drop_columns(timing)), name
        kept = [path for path in before if path.parent.name == "data" and path != lost]
        assert kept and all(path.read_bytes() == before[path] for path in kept), name
        capsys.readouterr()
        assert main(["verify", str(tmp_path / name), "--invariance", "6"]) == 0
        assert "6 equal (100.0%)" in capsys.readouterr().out, name
        assert main(["validate", str(file)]) == 0
        said = capsys.readouterr().out
        assert "to score" in said and "memory" in said, f"{name}:\n{said}"


def test_a_masks_score_shows_the_text_and_its_holes(tmp_path):
    texts = pieces(4, 200)
    rows = [{"id": str(n), "text": text} for n, text in enumerate(texts)]
    found = ran(spec(tmp_path, "asarm-tiny", rows, task={"kind": "score", "mask": {"kind": "lines", "count": 2}}))
    for n, text in enumerate(texts):
        row = found[str(n)]
        assert row["text"] == text and row["fills"] and row["finish"] == "filled"
        assert all(fill["text"] in text and "\n" not in fill["text"] for fill in row["fills"])
        num_bytes = sum(len(fill["text"].encode()) for fill in row["fills"])
        bits = -row["logprob"] / math.log(2) / num_bytes
        assert dict(row["metrics"]) == {"bits_per_byte": pytest.approx(bits)}
        assert row["new_tokens"] == sum(fill["end"] - fill["start"] for fill in row["fills"]) == len(row["tokens"])


TEXTS: list[dict] = [
    {"id": "whole", "text": "import os\nimport sys\n"},
    {"id": "behind", "prompt": "def f(x):", "completion": "\n    return é\n"},
    {"id": "alone", "completion": "x = 1"},
    {"id": "nothing", "text": ""},
    {"id": "long", "text": "the quick brown fox " * 40},
]


@pytest.fixture(scope="module")
def scored(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("scores")
    return folder, run_here(world.spec(folder, TEXTS, task={"kind": "score"}))


def law_of(world: World, ids: list[int], first: int) -> list[float]:
    """transformers' log-probabilities of ids[first:], each given all ids before it."""
    with torch.no_grad():
        laws = world.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(laws[place - 1, ids[place]]) for place in range(first, len(ids))]


def test_scores_are_the_models_law(world, scored):
    for row in TEXTS[:3]:
        found = scored[1][row["id"]]
        before, text = row.get("prompt", ""), str(row.get("completion", row.get("text")))
        prompt, ids = world.ids(before), world.tokenizer.encode(text)
        expected = law_of(world, [*prompt, *ids], len(prompt))
        assert found["tokens"] == ids and found["text"] == text and found["finish"] == "filled"
        assert (found["prompt_tokens"], found["new_tokens"], found["nfe"]) == (len(prompt), len(ids), 1)
        assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert found["logprob"] == pytest.approx(sum(expected), abs=1e-3)
        bits = -sum(expected) / math.log(2) / len(text.encode())
        assert dict(found["metrics"]) == {"bits_per_byte": pytest.approx(bits, rel=1e-5)}
        assert found["fills"] is None and found["drafter"] is None


def test_texts_that_can_not_be_scored_fail_alone(scored):
    kinds = {name: row["error_kind"] for name, row in scored[1].items() if row["status"] == "failed"}
    assert kinds == {"nothing": "empty_text", "long": "too_long"}
