"""Whole jobs that score texts with builtin models of every family: scores agree with what the decoders say, and runs resume."""

import json
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.rows.text import load_tokenizer
from draftmill.jobs.cli import main
from draftmill.storage.runs.records import TIMING_COLUMNS, read_results
from draftmill.storage.stores.store import open_store

DECODERS = {
    "asarm-tiny": "any_subset",
    "ar-tiny": "autoregressive",
    "mdm-tiny": "stepwise",
    "block-tiny": "block_diffusion",
}


def pieces(count: int, size: int) -> list[str]:
    """Pieces of real source."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    return [text[900 * n : 900 * n + size + 7 * n] for n in range(2, count + 2)]


def spec(folder: Path, model: str, rows: list[dict[str, Any]], name: str = "run", **sections: Any) -> Path:
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


def ran(file: Path) -> dict[str, dict[str, Any]]:
    """The result rows by id of a job that this runs."""
    assert main(["run", str(file), "--local", "--quiet"]) == 0
    return {row["id"]: row for row in table_of(file).to_pylist()}


def scored_again(folder: Path, model: str, generated: dict[str, dict[str, Any]], prompts: Any, **task: Any) -> Any:
    """Scores of what was generated, as token ids."""
    rows = [{"id": name, "tokens": prompts[name], "answer": row["tokens"]} for name, row in generated.items()]
    columns = {"id": "id", "tokens": "tokens", "reference": "answer"}
    source = {"path": str(folder / "again.jsonl"), "columns": columns}
    return ran(spec(folder, model, rows, "again", task={"kind": "score"} | task.pop("task", {}), input=source, **task))


# ---- the families whose scores are exact: what a decoder says of its own text


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_any_subset_models_score_is_the_log_probability_of_its_infill(tmp_path, temperature):
    rows = [{"id": str(n), "text": text} for n, text in enumerate(pieces(6, 90))]
    task = {"kind": "infill", "mask": {"kind": "random", "rate": 0.4}}
    filled = ran(spec(tmp_path, "asarm-tiny", rows, task=task, sampling={"temperature": temperature}))
    # The same rows with the text that was filled in: random masks hide the same positions of as many tokens.
    ids = {name: tokens_of(filled[name], rows[int(name)]["text"]) for name in filled}
    source = {"path": str(tmp_path / "ids.jsonl"), "columns": {"id": "id", "tokens": "ids"}}
    again = ran(
        spec(
            tmp_path,
            "asarm-tiny",
            [{"id": name, "ids": tokens} for name, tokens in ids.items()],
            "ids",
            task=task | {"kind": "score"},
            input=source,
        )
    )
    for name, row in filled.items():
        assert again[name]["tokens"] == row["tokens"] and again[name]["nfe"] == 1
        assert again[name]["logprob"] == pytest.approx(row["logprob"], abs=1e-3)
        assert sum(again[name]["token_logprobs"]) == pytest.approx(row["logprob"], abs=1e-3)
        assert again[name]["is_greedy"] or temperature > 0


def tokens_of(row: dict[str, Any], text: str) -> list[int]:
    """The ids of a filled canvas: those of the text, and in its holes those that were generated."""
    tokenizer = load_tokenizer(fetch_model("builtin:asarm-tiny"))
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    positions = [place for fill in row["fills"] for place in range(fill["start"], fill["end"])]
    for place, token in zip(positions, row["tokens"], strict=True):
        ids[place] = token
    return ids


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        ("ar-tiny", {"kind": "autoregressive"}),
        ("block-tiny", {"kind": "block_diffusion", "block_size": 1, "schedule": "static"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.slow
def test_a_score_is_the_log_probability_of_a_completion(tmp_path, model, decoder, temperature):
    rng = np.random.default_rng(3)
    prompts = {str(n): rng.integers(300, 1500, 6 + 3 * n).tolist() for n in range(6)}
    task = {"kind": "complete", "max_new_tokens": 12, "ignore_eos": True}
    source = {"path": str(tmp_path / "run.jsonl"), "columns": {"id": "id", "tokens": "tokens"}}
    rows = [{"id": name, "tokens": tokens} for name, tokens in prompts.items()]
    written = ran(
        spec(tmp_path, model, rows, task=task, input=source, decoder=decoder, sampling={"temperature": temperature})
    )
    again = scored_again(tmp_path, model, written, prompts, decoder=decoder)
    for name, row in written.items():
        assert again[name]["tokens"] == row["tokens"] and again[name]["nfe"] == 1
        assert again[name]["logprob"] == pytest.approx(row["logprob"], abs=1e-3)
        assert again[name]["is_greedy"] or temperature > 0
        assert again[name]["logprob_stderr"] is None and len(again[name]["token_logprobs"]) == 12


# ---- masked diffusion: a slow loop of whole forwards


# ---- every family


def specs(folder: Path) -> Iterator[tuple[str, Path]]:
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
