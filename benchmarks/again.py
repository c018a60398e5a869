"""A job that runs again, drafted by its earlier run, beside the same job without a drafter.

    python -m benchmarks.again                        ar-tiny: unchanged, other temperatures, weights and templates
    python -m benchmarks.again --before FOLDER        the earlier run had another checkpoint, by `recipes.ar --start`
    python -m benchmarks.again --adapter FOLDER       it had a LoRA adapter
    python -m benchmarks.again --worlds "another seed" "another template"

Jobs run in this process, one after another, each pair twice in turn; seconds are CPU seconds of whole jobs but for the loading of
libraries. All texts are compared. `--quick` runs a small part, as a check.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

import draftmill
from benchmarks.suffix import BUILTIN, pieces

TEMPLATE = {"template": "# example\n{{ prompt }}"}
WORLDS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "temperature 0.8 after 0.75": {"sampling.temperature": 0.75},
    "float32 after bfloat16": {"model.dtype": "bfloat16"},
    "float32 after int8": {"model.weights": "int8"},
    "another template": {"prompt": TEMPLATE},
    "another seed": {"seed": 1},
}
"""What the earlier run had, where it differs."""


def main() -> None:
    """Print a table: the share of tokens that were reused, forwards a token, and the ratio of tokens per CPU second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:ar-tiny")
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, help="all of them where no other option chooses")
    parser.add_argument("--before", type=Path, help="an earlier checkpoint of the model")
    parser.add_argument("--adapter", type=Path, help="a LoRA adapter of the model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--blank-line", action="store_true", help="a blank line ends a text, so lengths differ")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    worlds = {name: WORLDS[name] for name in given.worlds or ()}
    for name, key, folder in (
        ("an earlier checkpoint", "model.path", given.before),
        ("a LoRA adapter", "model.adapter", given.adapter),
    ):
        if folder is not None:
            worlds[name] = {key: str(folder)}
    worlds = worlds or WORLDS
    if given.quick:
        given.rows, given.new, given.slots, worlds = 4, 16, [4], {"unchanged": WORLDS["unchanged"]}
    with tempfile.TemporaryDirectory(prefix="draftmill-again-") as name:
        print("world | T | slots | reused | forwards a token | x plain")
        for temperature in (0.0, 0.8):
            for slots in given.slots:
                folder = Path(name) / f"{temperature}-{slots}"
                folder.mkdir()
                rows = given.rows if slots > 1 else max(given.rows // 8, 4)
                spec = job(folder, given.model, rows, given.new, temperature, slots)
                spec["task"] |= {"stop": "\n\n"} if given.blank_line else {}
                for world, changes in worlds.items():
                    if temperature or "temperature" not in world:
                        print(f"{world} | {temperature:g} | {slots} | {row_of(spec, changes, folder)}", flush=True)


def job(folder: Path, model: str, rows: int, new: int, temperature: float, slots: int) -> dict[str, Any]:
    """The job without a drafter."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN / "ar-tiny")
    texts = [tokenizer.decode(ids) for ids in pieces(rows, one_file=False)]
    (folder / "rows.jsonl").write_text("\n".join(line_of(number, text) for number, text in enumerate(texts)))
    return {
        "name": "again",
        "input": {"path": str(folder / "rows.jsonl")},
        "task": {"kind": "complete", "max_new_tokens": new},
        "model": {"path": model, "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": temperature},
        "batching": {"max_rows": slots},
        "output": {"path": str(folder / "plain")},
    }


def line_of(number: int, text: str) -> str:
    """A row of the input."""
    return json.dumps({"id": f"{number:05d}", "prompt": text})


def row_of(spec: dict[str, Any], changes: dict[str, Any], folder: Path) -> str:
    """Run the earlier job, and in turn the job without and with it as the drafter."""
    old, seconds = folder / "old", {"plain": 0.0, "new": 0.0}
    shutil.rmtree(old, ignore_errors=True)
    draftmill.run(spec, local=True, changes={"output.path": str(old)} | changes)
    drafter = {"decoder": {"kind": "speculative", "drafter": {"kind": "run", "path": str(old)}}}
    for _ in range(2):
        for name, more in (("plain", {}), ("new", drafter)):
            shutil.rmtree(folder / name, ignore_errors=True)
            began = time.process_time()
            draftmill.run(spec, local=True, changes={"output.path": str(folder / name)} | more)
            seconds[name] += time.process_time() - began
    columns = ["id", "tokens", "nfe", "reused", "new_tokens"]
    plain, new = (sorted(draftmill.open_run(folder / name).rows(columns), key=_id) for name in ("plain", "new"))
    assert [row["tokens"] for row in plain] == [row["tokens"] for row in new], "another text"
    reused, forwards, tokens = (sum(row[name] for row in new) for name in ("reused", "nfe", "new_tokens"))
    ratio = seconds["plain"] / seconds["new"]
    return f"{reused / tokens:.2f} | {forwards / tokens:.3f} | {ratio:.2f}"


def _id(row: dict[str, Any]) -> str:
    return str(row["id"])


if __name__ == "__main__":
    main()
