"""Whole jobs of the models that ship: a decoder that keeps the text writes the baseline's rows, in fewer forwards."""

import sysconfig
from pathlib import Path

import pytest

from tests.runs.causal_jobs import next_job

MDM = {"kind": "specdiff", "drafter": {"path": "builtin:mdm-tiny"}}
MICRO, HEAD = {"kind": "model", "path": "builtin:ar-micro"}, {"kind": "head", "path": "builtin:ar-tiny-eagle3"}
BLOCKS = {"kind": "s2d2", "block_size": 4, "causal_cache": True}
CACHED = {"block_length": 16, "cache": "dual_strict"}
COMPLETE = {"kind": "complete", "max_new_tokens": 24, "stop": ["\n\n"]}
INFILL = {"kind": "infill", "mask": {"kind": "random", "rate": 0.4}}
JOBS: dict[str, tuple[str, dict, dict, dict[str, dict]]] = {
    "any subset": (
        "asarm-tiny",
        INFILL,
        {"kind": "any_subset"},
        {
            "its own drafts": {"kind": "assd", "k": 4},
            "ngram": {"kind": "assd", "k": 4, "drafter": "ngram"},
            "fused": {"kind": "assd", "k": 4, "fused": "rows"},
        },
    ),
    "masked": ("mdm-tiny", INFILL, {"kind": "stepwise"}, {"ssd": {"kind": "ssd"}}),
    "masked with a cache": ("mdm-tiny", INFILL, {"kind": "stepwise"} | CACHED, {"ssd": {"kind": "ssd"} | CACHED}),
    "causal": (
        "ar-tiny",
        COMPLETE,
        {"kind": "autoregressive"},
        {
            "ngram": {"kind": "speculative", "k": 4},
            "suffix": {"kind": "speculative", "k": 4, "drafter": {"kind": "suffix"}},
            "model": {"kind": "speculative", "k": 4, "drafter": MICRO},
            "published head": {"kind": "speculative", "k": 4, "drafter": HEAD},
            "jacobi": {"kind": "jacobi", "block_size": 4},
            "multiblock": {"kind": "multiblock_jacobi", "block_size": 4},
            "diffusion": MDM | {"gamma": 8, "steps": 2, "head": "none"},
            "diffusion with a head": MDM | {"gamma": 4, "steps": 1},
        },
    ),
    "distilled": (
        "ar-tiny-jacobi",
        COMPLETE,
        {"kind": "autoregressive"},
        {"jacobi": {"kind": "jacobi", "block_size": 16, "window": "fixed"}},
    ),
    "blocks": (
        "block-tiny",
        COMPLETE,
        {"kind": "block_diffusion", "block_size": 1, "causal_cache": True},
        {"verified": BLOCKS, "fused": BLOCKS | {"fused": True}},
    ),
}


def rows() -> list[dict]:
    """Pieces of real source, from nothing to several lines."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    return [{"id": str(n), "prompt": text[700 * n : 700 * n + 11 * n], "text": text[700 * n :][:90]} for n in range(10)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}], ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_lossless_decoders_write_the_baselines_rows_in_fewer_forwards(tmp_path, name, sampling):
    model, task, baseline, others = JOBS[name]

    def decoded(decoder: dict) -> tuple[dict, int, dict]:
        sections = {"model": {"path": f"builtin:{model}", "device": "cpu"}, "sampling": sampling}
        found = next_job(tmp_path, rows(), decoder=decoder, task=task, **sections)
        said = {key: [row[at] for at in ("status", "tokens", "text", "finish")] for key, row in found.items()}
        return said, sum(row["nfe"] for row in found.values()), found

    expected, forwards, plain = decoded(baseline)
    assert {row["status"] for row in plain.values()} == {"ok"} and len(plain) == 10
    for kind, decoder in others.items():
        said, fewer, found = decoded(decoder)
        assert said == expected, kind
        assert fewer < forwards, kind
        assert sum(row["accepted"] for row in found.values()) > 0, kind
