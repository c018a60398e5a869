"""`decoder: fastest` beside every fixed lossless decoder of the same model: whole jobs, and the best fixed one in pairs.

    python -m benchmarks.fastest                          jobs of 2,000 rows; one slot with 250
    python -m benchmarks.fastest --worlds causal-0 --rows 500
    python -m benchmarks.fastest --model FOLDER           the causal worlds on another model

A quarter of the rows ranks the fixed decoders. The best of them and `fastest` then decode all rows in turn. Texts are compared.
Seconds are CPU seconds of whole jobs in this process, one thread. `--quick` runs a small part, as a check.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

import draftmill
from benchmarks.again import line_of
from benchmarks.suffix import BUILTIN, pieces
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.stores.store import open_store

COMPLETE = {"kind": "complete", "max_new_tokens": 64}
INFILL = {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}}
CAUSAL: list[dict[str, Any]] = [
    {"kind": "autoregressive"},
    *({"kind": "speculative", "k": k} for k in (1, 2, 4, 8, "auto")),
    {"kind": "jacobi", "block_size": 8, "window": "running"},
]
ANY_SUBSET: list[dict[str, Any]] = [
    {"kind": "any_subset"},
    *({"kind": "assd", "k": k} for k in (2, 5, "auto")),
    *({"kind": "assd", "fused": "rows", "k": k} for k in (1, 2, 4)),
]
MASKED: list[dict[str, Any]] = [{"kind": "stepwise"}, *({"kind": "ssd", "draft_length": k} for k in (1, 2, 4))]
ONE: dict[str, Any] = {"kind": "block_diffusion", "block_size": 1, "causal_cache": True}
BLOCKS: list[dict[str, Any]] = [
    ONE,
    ONE | {"fused": True},
    *({"kind": "s2d2", "block_size": size, "causal_cache": True, "fused": True} for size in (2, 4, 8)),
]


@dataclass(frozen=True, slots=True)
class World:
    """A model, what it decodes, and the decoders that give its text."""

    model: str
    task: dict[str, Any]
    decoders: list[dict[str, Any]]
    temperature: float
    slots: int
    rows: int


WORLDS = {
    "causal-0": World("ar-tiny", COMPLETE, CAUSAL, 0.0, 64, 2000),
    "causal-0.8": World("ar-tiny", COMPLETE, CAUSAL, 0.8, 64, 2000),
    "causal-0-one": World("ar-tiny", COMPLETE, CAUSAL, 0.0, 1, 250),
    "causal-0.8-one": World("ar-tiny", COMPLETE, CAUSAL, 0.8, 1, 250),
    "distilled-0-one": World("ar-tiny-jacobi", COMPLETE, CAUSAL, 0.0, 1, 250),
    "any-subset-1": World("asarm-tiny", INFILL, ANY_SUBSET, 1.0, 64, 2000),
    "any-subset-1-one": World("asarm-tiny", INFILL, ANY_SUBSET, 1.0, 1, 250),
    "masked-1": World("mdm-tiny", INFILL, MASKED, 1.0, 16, 1000),
    "masked-1-one": World("mdm-tiny", INFILL, MASKED, 1.0, 1, 150),
    "blocks-1": World("block-tiny", COMPLETE, BLOCKS, 1.0, 16, 1000),
    "blocks-1-one": World("block-tiny", COMPLETE, BLOCKS, 1.0, 1, 150),
}


def main() -> None:
    """Print a table: the fixed decoders' tokens per CPU second, and `fastest` beside the best of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--model", help="in place of the causal worlds' model")
    parser.add_argument("--rows", type=int, help="of each job")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ["any-subset-1"] if given.quick else given.worlds
    print("world | fixed, tokens/s of a quarter | the best | fastest: x the best | drafts")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="draftmill-fastest-") as folder:
            print(
                f"{name} | {row_of(WORLDS[name], Path(folder), given.model, 8 if given.quick else given.rows)}",
                flush=True,
            )


def row_of(world: World, folder: Path, model: str | None, rows: int | None) -> str:
    """Rank the fixed decoders, then decode all rows by the best and by `fastest`, twice in turn."""
    rows = rows or world.rows
    spec = job(world, folder, model, rows)
    quarter = {_name(one): timed(spec, one, folder, limit=max(rows // 4, 4)) for one in world.decoders}
    assert len({found.text for found in quarter.values()}) == 1, "another text"
    best = max(world.decoders, key=lambda one: quarter[_name(one)].rate)
    seconds, texts = {"best": 0.0, "fastest": 0.0}, set[str]()
    for _ in range(2):
        for which, decoder in (("best", best), ("fastest", {"kind": "fastest"})):
            found = timed(spec, decoder, folder)
            seconds[which] += found.seconds
            texts.add(found.text)
    assert len(texts) == 1, "another text"
    ways = read_manifest(open_store(str(folder / "run")))
    shares = ", ".join(f"{share:.0%} {way}" for way, share in (ways.ways or {}).items() if share > 0.02) if ways else ""
    rates = ", ".join(f"{name} {found.rate:,.0f}" for name, found in quarter.items())
    return f"{rates} | {_name(best)} | {seconds['best'] / seconds['fastest']:.3f} | {shares}"


def job(world: World, folder: Path, model: str | None, rows: int) -> dict[str, Any]:
    """A world's job; its texts are pieces of the standard library."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN / "ar-tiny")
    texts = [tokenizer.decode(ids) for ids in pieces(rows, one_file=False)]
    column = "text" if world.task["kind"] == "infill" else "prompt"
    lines = [line_of(number, text).replace('"prompt"', f'"{column}"') for number, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return {
        "name": "fastest",
        "input": {"path": str(folder / "rows.jsonl")},
        "task": world.task,
        "model": {"path": model or f"builtin:{world.model}", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": world.temperature},
        "batching": {"max_rows": world.slots},
        "output": {"path": str(folder / "run")},
    }


@dataclass(frozen=True, slots=True)
class Timed:
    """A job's CPU seconds, its tokens per CPU second, and its texts."""

    seconds: float
    rate: float
    text: str


def timed(spec: dict[str, Any], decoder: dict[str, Any], folder: Path, limit: int | None = None) -> Timed:
    """Decode the job, or its first rows."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    began = time.process_time()
    draftmill.run(spec, local=True, changes={"decoder": decoder, "input.limit": limit})
    seconds = time.process_time() - began
    rows = sorted(draftmill.open_run(folder / "run").rows(["id", "tokens"]), key=lambda row: str(row["id"]))
    tokens = sum(len(row["tokens"]) for row in rows)
    return Timed(seconds, tokens / seconds, json.dumps([row["tokens"] for row in rows]))


def _name(decoder: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in decoder.items() if key != "causal_cache")


if __name__ == "__main__":
    main()
