"""Jobs with the builtin masked-diffusion model: ssd writes stepwise's text, and it drafts the text of `autoregressive`."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from draftmill.actors.checkpoints.models import builtin_models, fetch_model
from draftmill.decoders.backbones.checkpoint import inspect_model
from tests.runs.causal_jobs import next_job

MODEL = "builtin:mdm-tiny"
WARPS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}]


def pieces(count: int, size: int) -> list[str]:
    """Pieces of real source."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    return [text[700 * n : 700 * n + size + 9 * n] for n in range(count)]


def decoded(folder: Path, decoder: dict[str, Any], rows: list[dict[str, Any]], **sections: Any) -> Any:
    return next_job(folder, rows, decoder=decoder, **{"model": {"path": MODEL, "device": "cpu"}} | sections)


def same_text(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether the rows say the same for the same reason, and how many there are."""
    keys = ("status", "tokens", "text", "finish")
    said = [{name: [row[key] for key in keys] for name, row in rows.items()} for rows in (found, expected)]
    return said[0] == said[1] and all(row["status"] == "ok" for row in found.values())


def total(rows: dict[str, Any], column: str) -> int:
    return sum(row[column] for row in rows.values())


def test_it_ships_and_has_the_tokenizer_of_the_others():
    assert "mdm-tiny" in builtin_models()
    folder, target = fetch_model(MODEL), fetch_model("builtin:ar-tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (target / name).read_bytes()
    info = inspect_model(folder)
    assert (info.family, info.max_length) == ("llada", 512)
    assert (folder / "model.safetensors").stat().st_size < 8 * 2**20


@pytest.mark.parametrize("sampling", WARPS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", ["none", "dual_strict"])
@pytest.mark.slow
def test_ssd_infills_what_stepwise_does_in_fewer_forwards(tmp_path, sampling, cache):
    rows = [{"id": str(n), "text": text} for n, text in enumerate(pieces(10, 90))]
    task = {"kind": "infill", "mask": {"kind": "random", "rate": 0.4}}

    def infilled(kind: str) -> dict[str, Any]:
        decoder = {"kind": kind, "block_length": 16, "cache": cache}
        return decoded(tmp_path, decoder, rows, task=task, sampling=sampling)

    plain, ours = infilled("stepwise"), infilled("ssd")
    assert same_text(ours, plain)
    assert total(plain, "nfe") == total(plain, "new_tokens") > 100
    assert total(ours, "nfe") < 0.9 * total(plain, "nfe")


@pytest.mark.parametrize("sampling", WARPS, ids=["greedy", "sampled"])
@pytest.mark.slow
def test_it_drafts_for_the_builtin_causal_model(tmp_path, sampling):
    rows = [{"id": str(n), "prompt": text} for n, text in enumerate(["", *pieces(9, 1)])]
    sections: dict[str, Any] = {"model": {"path": "builtin:ar-tiny", "device": "cpu"}, "sampling": sampling}
    sections["task"] = {"kind": "complete", "max_new_tokens": 24, "stop": ["\n\n"]}
    plain = decoded(tmp_path, {"kind": "autoregressive"}, rows, **sections)
    for settings in ({"gamma": 4, "steps": 1}, {"gamma": 8, "steps": 2}):
        decoder = {"kind": "specdiff", "drafter": {"path": MODEL}, **settings}
        ours = decoded(tmp_path, decoder, rows, **sections)
        assert same_text(ours, plain)
        assert total(ours, "accepted") > 0.05 * total(ours, "proposed")
        assert total(ours, "nfe") < 0.9 * total(plain, "nfe")


@pytest.mark.slow
def test_its_draft_head_makes_more_drafts_come_true_and_changes_no_text(tmp_path):
    rows = [{"id": str(n), "prompt": text} for n, text in enumerate(pieces(12, 60))]
    sections: dict[str, Any] = {"model": {"path": "builtin:ar-tiny", "device": "cpu"}}
    sections |= {"sampling": {"temperature": 0.0}, "task": {"kind": "complete", "max_new_tokens": 32}}
    bare, headed = (
        decoded(
            tmp_path,
            {"kind": "specdiff", "drafter": {"path": MODEL}, "gamma": 6, "steps": 1, "head": head},
            rows,
            **sections,
        )
        for head in ("none", "auto")
    )
    assert same_text(headed, bare)
    assert total(headed, "nfe") < total(bare, "nfe")
