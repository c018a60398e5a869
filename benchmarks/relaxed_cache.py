"""`ssd` with `cache: dual_relaxed`: forwards saved over `dual_strict`, and how often its text differs.

    python -m benchmarks.relaxed_cache [MODEL]        a masked-diffusion checkpoint with the builtin tokenizer; default mdm-tiny

Both are compared with `stepwise` with the same cache; `dual_strict` has its text by construction. Half of the tokens of held-out
windows are masked. Prints one table; counts, not times.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np

import draftmill.decoders.builtin
from benchmarks.any_subset import drain, held_out_windows, with_masks
from draftmill.decoders.backbones.base import TokenBackbone
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import ModelInfo, Outcome, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import SelfSpeculativeSettings, StepwiseSettings
from draftmill.decoders.registry import build_decoder

BUILTIN = Path(draftmill.decoders.builtin.__path__[0]) / "mdm-tiny"
LIVES: tuple[tuple[int, int | None], ...] = ((8, None), (8, 32), (32, None), (32, 8))
Cache = Literal["dual_strict", "dual_relaxed"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model and the canvases to fill in."""

    backbone: TokenBackbone
    info: ModelInfo
    requests: list[Request]

    def run(self, settings: DecoderChoice, temperature: float) -> list[Outcome]:
        """Outcomes in the order of the requests."""
        sampling = Sampling(temperature=temperature)
        decoder = build_decoder(
            Setup(backbone=self.backbone, info=self.info, sampling=sampling, max_rows=8, max_tokens=1 << 24), settings
        )
        return sorted(drain(decoder, self.requests), key=lambda outcome: outcome.index)


def tokens_per_forward(outcomes: list[Outcome]) -> float:
    """New tokens over forwards in which their sample took part."""
    return sum(len(outcome.tokens) for outcome in outcomes) / sum(outcome.nfe for outcome in outcomes)


def mismatch(outcomes: list[Outcome], expected: list[Outcome]) -> tuple[float, float]:
    """(Share of tokens that differ, share of samples in which any does)."""
    differs = [ours.tokens != theirs.tokens for ours, theirs in zip(outcomes, expected, strict=True)]
    return float(np.concatenate(differs).mean()), float(np.mean([each.any() for each in differs]))


def compare(bench: Bench, life: tuple[int, int | None], temperature: float, draft_length: int) -> str:
    """A row of the table."""
    block, refresh = life
    base = StepwiseSettings(kind="stepwise", block_length=block, cache="dual_strict", refresh=refresh)
    expected, cells = bench.run(base, temperature), []
    caches: tuple[Cache, ...] = ("dual_strict", "dual_relaxed")
    for cache in caches:
        settings = SelfSpeculativeSettings(
            kind="ssd", block_length=block, cache=cache, refresh=refresh, draft_length=draft_length
        )
        outcomes = bench.run(settings, temperature)
        tokens, samples = mismatch(outcomes, expected)
        cells += [f"{tokens_per_forward(outcomes):.2f}", f"{tokens:.1%}", f"{samples:.0%}"]
    return f"| {temperature:g} | {block} | {refresh or 'each block'} | " + " | ".join(cells) + " |"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--draft-length", type=int, default=4)
    args = parser.parse_args()
    backbone = cast(TokenBackbone, load_backbone(args.model, device=args.device))
    bench = Bench(backbone, inspect_model(args.model), with_masks(held_out_windows(128, args.samples), "m50"))
    print(
        "| T | block | refresh | strict: tokens/forward | tokens differ | samples differ | relaxed: tokens/forward |",
        end="",
    )
    print(" tokens differ | samples differ |\n" + "|---" * 9 + "|")
    for temperature in (0.0, 1.0):
        for life in LIVES:
            print(compare(bench, life, temperature, args.draft_length), flush=True)


if __name__ == "__main__":
    main()
