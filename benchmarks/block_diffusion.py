"""Block diffusion: speed and text quality of static, dynamic and S2D2 decoding, over block sizes and routers.

    python -m benchmarks.block_diffusion

`--quick` runs a small part, as a check. Prompts are pieces of the standard library's held-out files; every side gets the same
ones and generates the same number of tokens. Beside each decoder's speed is the quality of its text under the same model at
block size 1, its autoregressive mode: nats per token, and the share of tokens that are that model's first choice. Speeds are
relative to two baselines of that mode: the papers' with two forwards per token, and one with one forward. With `--points FILE`
every run is also written as a line of CSV, for a plot like the paper's Figure 3. Prints tables with ratios measured side by
side; a slow machine is no failure. Times are of one process on one CPU or GPU.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from benchmarks.block_runs import (
    Loaded,
    Measured,
    Quality,
    decoders_of,
    load,
    measure,
    one_by_one,
    quality,
)
from benchmarks.causal import equal_share, header, row
from benchmarks.causal_runs import Plan, held_out_prompts
from benchmarks.public_block import PublicBlock
from benchmarks.public_causal import Generated
from draftmill.decoders.backbones.load import pick_device
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.engine.ends import Stops

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
TWO, ONE, OTHER = "block size 1, two forwards", "block size 1, one forward", "autoregressive, another model"
BASELINES = (TWO, ONE)
LEGEND = """R=n: tokens per second with n slots. Rows: tokens that forwards ran, copies and drafts included. Nats per token and
first choices are those of the model at block size 1, given all tokens to the left; same text: as at block size 1."""


@dataclass(slots=True)
class Bench:
    """The models, the public loop, the requests and the settings to measure; `points` are the lines of the CSV file."""

    model: Loaded
    other: Loaded | None
    loop: PublicBlock
    requests: list[Request]
    rows: list[int]
    blocks: list[int]
    taus: list[float]
    points: list[list[Any]] = field(default_factory=list)

    def enough(self, rows: int) -> list[Request]:
        """Fewer samples for fewer slots, so that small batches do not take most of the time."""
        return self.requests[: max(4, min(len(self.requests), 3 * rows))]

    def measure(self, settings: DecoderChoice, temperature: float, model: Loaded | None = None) -> list[Measured]:
        """Run one decoder for each number of slots."""
        return [
            measure(model or self.model, settings, self.enough(rows), rows=rows, temperature=temperature)
            for rows in self.rows
        ]


# ---- tables ----------------------------------------------------------------------------------------------------------


def frontier(bench: Bench, temperature: float) -> None:
    """A table of the baselines, then one of every block size."""
    print(f"\n## Temperature {temperature:g}\n\n{LEGEND}\n")
    baselines, columns = _baselines(bench, temperature), list(_columns(bench))
    print(header("one token at a time", *columns))
    for name, runs in baselines.items():
        print(row(name, *_cells(bench, runs, baselines, (temperature, 1, name))), flush=True)
    if bench.other is not None:
        runs = bench.measure(AutoregressiveSettings(kind="autoregressive"), temperature, bench.other)
        print(row(OTHER, *_speeds(runs, baselines), *_forwards(runs[-1]), "", "", ""), flush=True)
    for size in bench.blocks:
        print(f"\n### Blocks of {size}, temperature {temperature:g}\n")
        print(header("decoder", *columns))
        # Run again, so that compared runs are close in time.
        baselines = _baselines(bench, temperature)
        for name, settings in decoders_of(size, bench.taus).items():
            runs = bench.measure(settings, temperature)
            print(row(name, *_cells(bench, runs, baselines, (temperature, size, name))), flush=True)


def _baselines(bench: Bench, temperature: float) -> dict[str, list[Measured]]:
    return {
        TWO: bench.measure(one_by_one(fused=False), temperature),
        ONE: bench.measure(one_by_one(fused=True), temperature),
    }


def _columns(bench: Bench) -> Iterator[str]:
    yield from (f"R={rows}" for rows in bench.rows)
    yield from (f"over {name.split(', ')[1]}, R={rows}" for name in BASELINES for rows in bench.rows)
    yield from (
        "NFE/token",
        "prefill",
        "draft",
        "verify",
        "commit",
        "rows/token",
        "nats/token",
        "first choice",
        "same text",
    )


def _cells(
    bench: Bench, runs: list[Measured], baselines: dict[str, list[Measured]], point: tuple[float, int, str]
) -> Iterator[str]:
    worth = quality(bench.model, bench.requests, runs[-1].texts)
    for rows, run in zip(bench.rows, runs, strict=True):
        bench.points.append([*point, rows, run.rate, run.nfe / run.count, worth.nats, worth.agreement])
    yield from _speeds(runs, baselines)
    yield from _forwards(runs[-1])
    yield from _worth(worth)
    yield f"{equal_share(runs[-1].texts, baselines[TWO][-1].texts):.0%}"


def _speeds(runs: list[Measured], baselines: dict[str, list[Measured]]) -> Iterator[str]:
    yield from (f"{run.rate:.0f}" for run in runs)
    for name in BASELINES:
        yield from (f"{run.rate / other.rate:.2f}x" for run, other in zip(runs, baselines[name], strict=True))


def _forwards(run: Measured) -> Iterator[str]:
    yield f"{run.nfe / run.count:.3f}"
    yield from (f"{share:.3f}" for share in run.per_token)
    yield f"{run.token_rows / run.count:.1f}"


def _worth(worth: Quality) -> Iterator[str]:
    yield f"{worth.nats:.3f}"
    yield f"{worth.agreement:.3f}"


# ---- the public loop -------------------------------------------------------------------------------------------------


def public(bench: Bench) -> None:
    """The public loop at batch 1, greedy, beside ours with the same settings; and ours with many slots."""
    print("\n## What people run today: a loop at batch 1, temperature 0\n")
    ours = [f"ours, R={rows}" for rows in bench.rows]
    print(
        header(
            "decoder", "block", "tokens/s", "forwards/token", *ours, *(f"{name} / theirs" for name in ours), "same text"
        )
    )
    some = bench.enough(1)
    for name, size, theirs, settings in _pairs(bench, some):
        runs = bench.measure(settings, 0.0)
        ratios = (f"{run.rate / theirs.rate:.1f}x" for run in runs)
        same = f"{equal_share(runs[0].texts, theirs.tokens):.0%}"
        cells = [f"{theirs.rate:.0f}", f"{theirs.forwards / theirs.count:.3f}", *(f"{run.rate:.0f}" for run in runs)]
        print(row(name, size, *cells, *ratios, same), flush=True)


def _pairs(bench: Bench, requests: list[Request]) -> Iterator[tuple[str, int, Generated, DecoderChoice]]:
    """A decoder's name, its block size, the public loop's result, and our settings for the same."""
    loop, tau = bench.loop, bench.taus[-1]
    loop.block_diffusion(requests[:1], block_size=4, tau=None)  # the first call is slow
    yield TWO, 1, loop.block_diffusion(requests, block_size=1, tau=None), one_by_one(fused=False)
    for size in bench.blocks:
        every = decoders_of(size, bench.taus)
        yield "static", size, loop.block_diffusion(requests, block_size=size, tau=None), every["static, 1 a step"]
        name = f"dynamic, tau={tau:g}"
        yield name, size, loop.block_diffusion(requests, block_size=size, tau=tau), every[name]
        yield "s2d2, always", size, loop.s2d2(requests, block_size=size), every["s2d2, always"]


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--taus", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--points", type=Path, help="where to write every run as a line of CSV")
    parser.add_argument("--model", type=Path, default=BUILTIN / "block-tiny")
    parser.add_argument("--other", type=Path, default=BUILTIN / "ar-tiny", help="a causal model of about the same size")
    flags = parser.parse_args(arguments)
    if flags.quick:
        flags.slots, flags.blocks, flags.taus, flags.samples, flags.new_tokens = [2], [4], [0.85], 4, 12
    return flags


def prompts(flags: argparse.Namespace) -> list[Request]:
    """Prompts from held-out files, of any length modulo the blocks'."""
    plan = Plan(
        batches=flags.slots,
        samples=flags.samples,
        new_tokens=flags.new_tokens,
        repeats=1,
        temperature=0.0,
        ends="eos",
        stops=Stops(),
        decoders=[],
    )
    return held_out_prompts(PreTrainedTokenizerFast.from_pretrained(flags.model), plan)


def bench_of(flags: argparse.Namespace, requests: list[Request], other: Path | None) -> Bench:
    """Load what is measured."""
    device = pick_device(flags.device)
    model = load(flags.model, device, decoder="s2d2")
    return Bench(
        model=model,
        other=load(other, device, decoder="autoregressive") if other else None,
        loop=PublicBlock.of(flags.model, model.info, device),
        requests=requests,
        rows=flags.slots,
        blocks=flags.blocks,
        taus=flags.taus,
    )


def run(bench: Bench, flags: argparse.Namespace) -> None:
    """Print all tables, and write the points."""
    public(bench)
    for temperature in flags.temperatures:
        frontier(bench, temperature)
    if flags.points:
        names = ["temperature", "block", "decoder", "slots", "tokens_per_s", "nfe_per_token", "nats", "agreement"]
        with flags.points.open("w", newline="") as file:
            csv.writer(file).writerows([names, *bench.points])


def main() -> None:
    """Print the tables."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    run(bench_of(flags, prompts(flags), flags.other), flags)


if __name__ == "__main__":
    main()
