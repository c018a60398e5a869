"""Masked diffusion: tokens/s, forwards and sequence-forwards of every decoder over batch sizes, beside a public loop.

    python -m benchmarks.masked_diffusion speed     stepwise, threshold, ssd over batch sizes, beside the public loop at batch 1
    python -m benchmarks.masked_diffusion specdiff  a diffusion drafter for a causal model, over gamma and steps

`--quick` runs a small part, as a check. Canvases are pieces of the standard library's held-out files; the masks are a
completion's, and for `--holes` half of the tokens anywhere. Every side gets the same ones; texts of lossless decoders are
compared. Prints tables with ratios measured side by side; a slow machine is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from benchmarks.any_subset import drain
from benchmarks.causal import equal_share, header, row
from benchmarks.causal_runs import Plan, Totals, held_out_prompts
from benchmarks.public_masked import PublicMasked
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone, pick_device
from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.causal.settings import AutoregressiveSettings, SpecDiffSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import SelfSpeculativeSettings, StepwiseSettings, ThresholdSettings
from draftmill.decoders.registry import build_decoder, find_heads

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
STEPWISE = "stepwise"
_SHOWN = 8


def _ssd(**settings: Any) -> SelfSpeculativeSettings:
    return SelfSpeculativeSettings.model_validate({"kind": "ssd", **settings})


DECODERS: dict[str, tuple[DecoderChoice, str]] = {
    STEPWISE: (StepwiseSettings(kind="stepwise"), STEPWISE),
    **{f"ssd, N={n}": (_ssd(draft_length=n), STEPWISE) for n in (1, 2, 4, 8)},
    **{f"ssd, N={n}, mixed": (_ssd(draft_length=n, tree="mixed"), STEPWISE) for n in (2, 4, 12)},
    "stepwise, dual cache": (StepwiseSettings(kind="stepwise", cache="dual_strict"), "stepwise, dual cache"),
    **{f"ssd, N={n}, dual cache": (_ssd(draft_length=n, cache="dual_strict"), "stepwise, dual cache") for n in (2, 4)},
    "ssd, N=4, mixed, dual cache": (
        _ssd(draft_length=4, cache="dual_strict", tree="mixed"),
        "stepwise, dual cache",
    ),
    "threshold 0.9": (ThresholdSettings(kind="threshold"), ""),
    "threshold 0.9, dual cache": (ThresholdSettings(kind="threshold", cache="dual_strict"), ""),
}
"""Name -> settings, and the baseline whose texts it must reproduce; empty for a lossy decoder."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode."""

    backbone: Model
    info: ModelInfo
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Totals):
    """Totals of one run; `nodes` are sequence-forwards, the cost in a large batch; `commits[j]` iterations decided j tokens."""

    nodes: int
    iterations: int
    commits: list[int]

    @property
    def prefixes(self) -> list[float]:
        """The share of iterations whose first j = 1, 2, ... drafts were accepted; an iteration commits one token more."""
        total = sum(self.commits)
        return [sum(self.commits[j + 1 :]) / total for j in range(1, len(self.commits) - 1)] if total else []


def load(folder: Path, device: str) -> Loaded:
    """Load a checkpoint."""
    return Loaded(load_backbone(folder, device=device), inspect_model(folder), folder)


def measure(
    model: Loaded, settings: DecoderChoice, requests: list[Request], *, rows: int, temperature: float, **more: Any
) -> Measured:
    """Run one decoder over enough of the requests with `rows` slots."""
    sampling = Sampling(temperature=temperature)
    size: dict[str, Any] = {"max_rows": rows, "max_tokens": 1 << 24}
    decoder = build_decoder(
        Setup(backbone=model.backbone, info=model.info, sampling=sampling, **size, **more), settings
    )
    chosen = enough(requests, rows)
    started = time.perf_counter()
    outcomes = drain(decoder, chosen)
    seconds = time.perf_counter() - started
    nfe, proposed = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("nfe", "proposed"))
    return Measured(
        texts={outcome.index: outcome.tokens.tolist() for outcome in outcomes},
        seconds=seconds,
        nfe=nfe,
        nfe_draft=sum(outcome.nfe_draft for outcome in outcomes),
        nodes=nfe + proposed,
        accepted=sum(outcome.accepted for outcome in outcomes),
        proposed=proposed,
        iterations=sum(outcome.iterations for outcome in outcomes),
        commits=[
            sum(counts) for counts in itertools.zip_longest(*(outcome.accept_hist for outcome in outcomes), fillvalue=0)
        ],
    )


def enough(requests: list[Request], rows: int) -> list[Request]:
    """Fewer samples for fewer slots, so that small batches do not take most of the time."""
    return requests[: max(4, min(len(requests), 3 * rows))]


def with_holes(requests: list[Request]) -> list[Request]:
    """The same canvases, with half of the tokens masked at random places instead."""
    holed = []
    for request in requests:
        rng, canvas = np.random.default_rng(request.index), request.canvas[request.canvas != HOLE].copy()
        canvas[rng.permutation(len(canvas))[: len(canvas) // 2]] = HOLE
        holed.append(dataclasses.replace(request, canvas=canvas))
    return holed


# ---- masked diffusion ------------------------------------------------------------------------------------------------


def speed(model: Loaded, loop: PublicMasked, requests: list[Request], flags: argparse.Namespace) -> None:
    """Tokens/s over batch sizes beside the public loop (greedy), and over our own stepwise."""
    public = loop.stepwise(enough(requests, 1), block_length=flags.block_length)
    print(f"\npublic loop, batch 1: {public.rate:.1f} tokens/s, one forward a token\n")
    columns = [*(f"B={rows}" for rows in flags.batches), "NFE/token", "nodes/token"]
    ratios = ["best / public loop (limit >= 8x)", *(f"over its stepwise, B={rows}" for rows in flags.batches), "text"]
    print(header("decoder", *columns, *ratios))
    baselines: dict[str, list[Measured]] = {}
    for name in flags.decoders:
        settings, baseline = DECODERS[name]
        settings = settings.model_copy(update={"block_length": flags.block_length})
        runs = [measure(model, settings, requests, rows=rows, temperature=flags.temperature) for rows in flags.batches]
        baselines[name] = runs
        best = max(run.rate for run in runs) / public.rate
        per_token = (f"{getattr(runs[-1], what) / runs[-1].count:.3f}" for what in ("nfe", "nodes"))
        beside = baselines.get(baseline)
        over = [f"{run.rate / other.rate:.2f}x" for run, other in zip(runs, beside, strict=True)] if beside else []
        same = f"{equal_share(runs[-1].texts, beside[-1].texts):.0%} equal" if beside else "lossy"
        cells = [*(f"{run.rate:.0f}" for run in runs), *per_token, f"{best:.1f}x", *(over or [""] * len(runs)), same]
        print(row(name, *cells), flush=True)
    greedy = baselines.get(STEPWISE)
    if greedy and not flags.temperature:
        print(f"\nstepwise gives the public loop's text on {equal_share(greedy[0].texts, public.tokens):.0%}")


# ---- speculative diffusion decoding ------------------------------------------------------------------------------------


def specdiff(target: Loaded, drafter: Loaded, requests: list[Request], flags: argparse.Namespace) -> None:
    """Tokens/s and accepted tokens per draft over gamma and steps, over autoregressive decoding of the same prompts."""
    plain = [
        measure(
            target, AutoregressiveSettings(kind="autoregressive"), requests, rows=rows, temperature=flags.temperature
        )
        for rows in flags.batches
    ]
    columns = [*(f"B={rows}" for rows in flags.batches), *(f"over autoregressive, B={rows}" for rows in flags.batches)]
    print(header("gamma, steps, head", *columns, "NFE/token", "drafter's/token", "accepted/draft", "text"))
    print(row("autoregressive", *(f"{run.rate:.0f}" for run in plain)), flush=True)
    accepted = []
    for gamma, steps, head in [(g, t, h) for g in flags.gamma for t in flags.steps for h in ("none", "auto")]:
        if gamma != "auto" and steps > int(gamma):
            continue
        settings = SpecDiffSettings.model_validate(
            {
                "kind": "specdiff",
                "gamma": gamma if gamma == "auto" else int(gamma),
                "steps": steps,
                "head": head,
                "drafter": {"path": str(drafter.folder)},
            }
        )
        more = {
            "drafter": drafter.backbone,
            "drafter_info": drafter.info,
            "heads": find_heads(settings, drafter.folder, drafter.backbone),
            "stops": Stops(),
        }
        runs = [
            measure(target, settings, requests, rows=rows, temperature=flags.temperature, **more)
            for rows in flags.batches
        ]
        last = runs[-1]
        same = min(equal_share(run.texts, other.texts) for run, other in zip(runs, plain, strict=True))
        cells = [*(f"{run.rate:.0f}" for run in runs)]
        cells += [f"{run.rate / other.rate:.2f}x" for run, other in zip(runs, plain, strict=True)]
        cells += [f"{last.nfe / last.count:.3f}", f"{last.nfe_draft / last.count:.3f}"]
        cells += [f"{last.accepted / max(last.iterations, 1):.2f}", f"{same:.0%} equal"]
        print(row(f"{gamma}, {steps}, {head}", *cells), flush=True)
        accepted.append((f"{gamma}, {steps}, {head}", last.prefixes))
    print("\nhow many iterations accept the first j drafts; in brackets, of those that accept the first j - 1\n")
    print(header("gamma, steps, head", *(f"j={j}" for j in range(1, _SHOWN + 1))))
    for name, prefixes in accepted:
        shares = zip(prefixes[:_SHOWN], [1.0, *prefixes], strict=False)
        print(row(name, *(f"{share:.2f} ({share / before if before else 0:.2f})" for share, before in shares)))


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "specdiff"])
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=32, help="of `speed`, of all sides")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--holes", action="store_true", help="for `speed`: mask half of the tokens instead of a completion"
    )
    parser.add_argument("--decoders", nargs="+", choices=list(DECODERS), default=list(DECODERS), help="of `speed`")
    parser.add_argument("--gamma", nargs="+", default=["4", "8", "16", "auto"], help="of `specdiff`")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2], help="of `specdiff`")
    parser.add_argument("--model", type=Path, default=BUILTIN / "mdm-tiny")
    parser.add_argument("--target", type=Path, default=BUILTIN / "ar-tiny", help="of `specdiff`")
    flags = parser.parse_args(arguments)
    if flags.quick:
        flags.batches, flags.samples, flags.new_tokens, flags.gamma = [1, 2], 4, 12, ["4", "auto"]
    return flags


def prompts(flags: argparse.Namespace) -> list[Request]:
    """The canvases, from held-out files."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.model)
    plan = Plan(
        batches=flags.batches,
        samples=flags.samples,
        new_tokens=flags.new_tokens,
        repeats=1,
        temperature=flags.temperature,
        ends="eos",
        stops=Stops(),
        decoders=[],
    )
    requests = held_out_prompts(tokenizer, plan)
    return with_holes(requests) if flags.holes else requests


def main() -> None:
    """Print one part's tables."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    device = pick_device(flags.device)
    model, requests = load(flags.model, device), prompts(flags)
    if flags.part == "specdiff":
        specdiff(load(flags.target, device), model, requests, flags)
        return
    speed(model, PublicMasked.of(flags.model, model.info, device), requests, flags)


if __name__ == "__main__":
    main()
