"""Causal decoding: tokens/s, forwards and acceptance of every decoder over batch sizes, beside transformers'.

    python -m benchmarks.causal speed      every decoder over batch sizes, beside `generate`, assisted generation, public Jacobi
    python -m benchmarks.causal auto       `k: auto` beside `autoregressive`: they should never be slower
    python -m benchmarks.causal distilled  tokens per forward of the Jacobi decoders before and after distillation

`--quick` runs a small part, as a check. Prompts are pieces of the standard library's held-out files; every side gets the same
ones, and greedy texts are compared. `--ends eos` ends a text at the end token, which a small model rarely generates; `blank` also
ends it at a blank line, so that texts of one batch differ in length as in most jobs. Prints tables with ratios measured side by
side; a slow machine is no failure. Times are of one process on one CPU or GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from benchmarks.causal_runs import (
    AUTOREGRESSIVE,
    JACOBI,
    VARIANTS,
    Measured,
    Models,
    Plan,
    ends_of,
    held_out_prompts,
    load_models,
    measure,
)
from benchmarks.public_causal import Generated, PublicCausal
from draftmill.decoders.backbones.load import pick_device
from draftmill.decoders.base import Request

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
PUBLIC_BLOCKS = (16, 32)
"""Blocks of the batch-1 Jacobi loop: ours, and the public code's default."""


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def header(*names: str) -> str:
    """The two lines that begin a Markdown table."""
    return f"{row(*names)}\n{'|---' * len(names)}|"


def equal_share(texts: dict[int, list[int]], others: dict[int, list[int]]) -> float:
    """The share of equal texts among those that both sides have."""
    both = texts.keys() & others.keys()
    return sum(texts[index] == others[index] for index in both) / max(len(both), 1)


# ---- speed -----------------------------------------------------------------------------------------------------------


def theirs(loops: PublicCausal, requests: list[Request], plan: Plan) -> dict[str, list[Generated]]:
    """Measure transformers and the public Jacobi loop: `generate` at every batch size, the others at batch 1."""
    loops.stop_ids, loops.temperature, some = list(plan.stops.ids), plan.temperature, plan.enough(requests, 1)
    loops.generate(some[:1], rows=1)  # the first call is slow
    loops_of = {
        "generate": [loops.generate(plan.enough(requests, rows), rows=rows) for rows in plan.batches],
        "assisted, as it comes": [loops.with_assistant(some)],
        "assisted, k=5": [loops.with_assistant(some, num_drafts=5)],
        "prompt look-up, k=5": [loops.lookup(some, num_drafts=5)],
    }
    if plan.temperature == 0.0:
        loops_of |= {f"public Jacobi loop, n={n}": [loops.jacobi(some, block_size=n)] for n in PUBLIC_BLOCKS}
    return loops_of


def speed(models: Models, loops: PublicCausal, requests: list[Request], plan: Plan) -> None:
    """Tokens/s of public code and ours over batch sizes, and the ratios between them."""
    public = theirs(loops, requests, plan)
    print(plan.title("What people run today"))
    print(header("", *(f"B={rows}" for rows in plan.batches), "forwards/token at the first"))
    for name, results in public.items():
        cells = [f"{result.rate:.0f}" for result in results] + [""] * (len(plan.batches) - len(results))
        print(row(name, *cells, f"{results[0].forwards / results[0].count:.3f}"), flush=True)
    print(plan.title("Decoders"))
    ratios = ["best / generate's best", "first B / best assisted, B=1"]
    if plan.temperature == 0.0:
        ratios += ["best / public Jacobi", "same text as generate"]
    columns = ["NFE/token", "drafter's/token", "acceptance", "limit", *ratios]
    print(header("decoder", *(f"B={rows}" for rows in plan.batches), *columns))
    for name in plan.decoders:
        runs = [measure(models, VARIANTS[name], requests, plan, rows=rows) for rows in plan.batches]
        print(row(name, *_cells(runs), *_ratios(name, runs, public)), flush=True)
    print("\nlimit: tokens/s at the last B if nothing but the decoder's forwards took time")


def _cells(runs: list[Measured]) -> list[str]:
    last = runs[-1]
    per_token = f"{last.nfe / last.count:.3f}", f"{last.nfe_draft / last.count:.3f}"
    return [*(f"{run.rate:.0f}" for run in runs), *per_token, last.acceptance, f"{last.limit:.0f}"]


def _ratios(name: str, runs: list[Measured], public: dict[str, list[Generated]]) -> list[str]:
    best = max(run.rate for run in runs)
    generate = max(result.rate for result in public["generate"])
    assisted = max(result.rate for key, results in public.items() if "assisted" in key for result in results)
    ratios = [f"{best / generate:.2f}x", f"{runs[0].rate / assisted:.2f}x"]
    loop = [result.rate for key, results in public.items() if "Jacobi" in key for result in results]
    if loop:
        same = equal_share(runs[0].texts, public["generate"][0].tokens)
        ratios += [f"{best / max(loop):.1f}x" if "jacobi" in name else "", f"{same:.3f}"]
    return ratios


# ---- k: auto ---------------------------------------------------------------------------------------------------------


def auto(models: Models, requests: list[Request], plan: Plan) -> None:
    """`auto` over `autoregressive`, run alternately: the median of the ratios, and the smallest and largest."""
    print(plan.title("auto / autoregressive (limit: >= 1 within noise)"))
    print(header("decoder", *(f"B={rows}" for rows in plan.batches), "text"))
    for name in (name for name in VARIANTS if name.endswith("auto")):
        cells, same = [], 1.0
        for rows in plan.batches:
            ratios = []
            for _ in range(plan.repeats):
                plain, drafting = (
                    measure(models, VARIANTS[variant], requests, plan, rows=rows) for variant in (AUTOREGRESSIVE, name)
                )
                ratios.append(drafting.rate / plain.rate)
                same = min(same, equal_share(plain.texts, drafting.texts))
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        print(row(name, *cells, f"{same:.0%} equal"), flush=True)


# ---- distillation ----------------------------------------------------------------------------------------------------


def distillation(before: Models, after: Models, requests: list[Request], plan: Plan) -> None:
    """Tokens per forward and tokens/s of the Jacobi decoders on both models at the largest batch size."""
    rows = plan.batches[-1]
    print(plan.title("Distilled / undistilled (limit of tokens per forward: >= 1.8x)"))
    print(header("decoder", "tokens/forward", "distilled", "ratio", f"tokens/s, B={rows}", "distilled", "ratio"))
    for name in (AUTOREGRESSIVE, *JACOBI):
        first, second = (measure(models, VARIANTS[name], requests, plan, rows=rows) for models in (before, after))
        won = first.count / first.nfe, second.count / second.nfe
        rates = f"{first.rate:.0f}", f"{second.rate:.0f}", f"{second.rate / first.rate:.2f}x"
        print(row(name, f"{won[0]:.2f}", f"{won[1]:.2f}", f"{won[1] / won[0]:.2f}x", *rates), flush=True)


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "auto", "distilled"])
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--decoders", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="of `speed`")
    parser.add_argument("--repeats", type=int, default=3, help="of each pair in `auto`")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--ends", nargs="+", choices=["eos", "blank"], default=["eos", "blank"])
    parser.add_argument("--target", type=Path, default=BUILTIN / "ar-tiny")
    parser.add_argument("--drafter", type=Path, default=BUILTIN / "ar-micro")
    parser.add_argument("--head", type=Path, default=BUILTIN / "ar-tiny-eagle3", help="the target's draft head")
    parser.add_argument("--distilled", type=Path, default=BUILTIN / "ar-tiny-jacobi")
    return parser.parse_args(arguments)


def plans(flags: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> list[Plan]:
    """The plans for the flags, one for each kind of end and each temperature."""
    quick: bool = flags.quick
    return [
        Plan(
            batches=[1, 4] if quick else flags.batches,
            samples=8 if quick else flags.samples,
            new_tokens=16 if quick else flags.new_tokens,
            repeats=1 if quick else flags.repeats,
            temperature=temperature,
            ends=ends,
            stops=ends_of(flags.target, tokenizer, ends),
            decoders=flags.decoders,
        )
        for ends, temperature in itertools.product(flags.ends, flags.temperatures)
    ]


def main() -> None:
    """Print one part's tables."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    device = pick_device(flags.device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.target)
    models = load_models(flags.target, flags.drafter, device, flags.head)
    after = load_models(flags.distilled, flags.drafter, device) if flags.part == "distilled" else models
    loops = PublicCausal(flags.target, flags.drafter, device=device, dtype=models.target.dtype)
    for plan in plans(flags, tokenizer):
        requests = held_out_prompts(tokenizer, plan)
        match flags.part:
            case "speed":
                speed(models, loops, requests, plan)
            case "auto":
                auto(models, requests, plan)
            case "distilled":
                distillation(models, after, requests, plan)


if __name__ == "__main__":
    main()
