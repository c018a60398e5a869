"""Any-subset decoding: tokens/s and NFE per token of every decoder, over batch sizes, against a public batch-1 loop.

    python -m benchmarks.any_subset speed     builtin model, batch sizes 1 .. 64, beside the public loop in the same run
    python -m benchmarks.any_subset nfe       NFE per token on held-out files, both acceptance rules, masks of three kinds
    python -m benchmarks.any_subset base      an XLNet-base-shaped random model at canvas length 512

Prints tables with ratios measured side by side; a slow machine is no failure. Times are of one process on one CPU or GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast, XLNetConfig, XLNetLMHeadModel

import draftmill.decoders.builtin
from benchmarks.public_loop import LoopResult, PublicLoop
from draftmill.decoders.any_subset.settings import AnySubsetSettings, AssdSettings, ParallelSettings
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.markov import DraftHeads
from draftmill.decoders.backbones.load import load_backbone, pick_device
from draftmill.decoders.base import CachedDecoder, ModelInfo, Outcome, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, find_heads
from recipes.corpus import encode, split, standard_library

BUILTIN = Path(draftmill.decoders.builtin.__path__[0]) / "asarm-tiny"
Settings = AnySubsetSettings | AssdSettings | ParallelSettings
NGRAM, PAPER, WITH_HEAD = "assd n-gram k=5", "assd k=5", "assd k=5 + head"
VARIANTS: dict[str, tuple[Settings, bool]] = {
    "any_subset": (AnySubsetSettings(kind="any_subset"), False),
    NGRAM: (AssdSettings(kind="assd", k=5, drafter="ngram"), False),
    "assd k=3": (AssdSettings(kind="assd", k=3), False),
    PAPER: (AssdSettings(kind="assd", k=5), False),
    "assd k=8": (AssdSettings(kind="assd", k=8), False),
    WITH_HEAD: (AssdSettings(kind="assd", k=5), True),
    "fused rows k=2": (AssdSettings(kind="assd", k=2, fused="rows"), True),
    "fused rows k=3, ends": (AssdSettings(kind="assd", k=3, fused="rows", rows="ends"), True),
    "fused rows k=5, ends": (AssdSettings(kind="assd", k=5, fused="rows", rows="ends"), True),
    "fused rows k=5": (AssdSettings(kind="assd", k=5, fused="rows"), True),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode."""

    backbone: Model
    info: ModelInfo
    heads: DraftHeads | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals of one run."""

    tokens: int
    seconds: float
    nfe: int
    accepted: int
    proposed: int
    lane_eff: float
    padding_eff: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def load(folder: Path, device: str) -> Loaded:
    """Load a checkpoint and its draft head."""
    backbone = load_backbone(folder, device=device)
    return Loaded(backbone, inspect_model(folder), find_heads(AssdSettings(kind="assd"), folder, backbone))


def held_out_windows(length: int, count: int) -> list[NDArray[np.int32]]:
    """Take `count` windows of `length` tokens, spread evenly over the held-out files of the standard library."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN)
    _, files = split(standard_library())
    windows = []
    for file in files:
        ids = np.array(encode(tokenizer, file.text), dtype=np.int32)
        windows += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [windows[i * len(windows) // count] for i in range(min(count, len(windows)))]


def with_masks(windows: list[NDArray[np.int32]], kind: str) -> list[Request]:
    """Mask 95 % or 50 % of the tokens at random (m95, m50), or one span of 40 tokens (span40)."""
    rng = np.random.default_rng(0)
    requests = []
    for index, window in enumerate(windows):
        canvas = window.copy()
        if kind == "span40":
            start = int(rng.integers(1, len(canvas) - 40))
            canvas[start : start + 40] = -1
        else:
            share = {"m95": 0.95, "m50": 0.5}[kind]
            canvas[rng.permutation(len(canvas))[: round(share * len(canvas))]] = -1
        requests.append(Request(index, sample_key(0, str(index)), canvas))
    return requests


def drain(decoder: CachedDecoder, requests: list[Request]) -> list[Outcome]:
    """Decode all requests, refilling slots as they free up."""
    queue, outcomes = list(reversed(requests)), []
    while queue or decoder.active:
        room = decoder.room(len(queue[-1].canvas)) if queue else 0
        decoder.admit([queue.pop() for _ in range(min(room, len(queue)))])
        outcomes += decoder.step()
    return outcomes


def measure(model: Loaded, name: str, requests: list[Request], *, rows: int, acceptance: str = "coupled") -> Measured:
    """Run one decoder over the requests with `rows` slots."""
    settings, with_head = VARIANTS[name]
    sampling = Sampling.model_validate({"acceptance": acceptance})
    heads = model.heads if with_head else None
    decoder = build_decoder(
        Setup(
            backbone=model.backbone, info=model.info, sampling=sampling, max_rows=rows, max_tokens=1 << 24, heads=heads
        ),
        settings,
    )
    started = time.perf_counter()
    outcomes = drain(decoder, requests)
    seconds, stats = time.perf_counter() - started, decoder.stats
    return Measured(
        tokens=sum(len(outcome.tokens) for outcome in outcomes),
        seconds=seconds,
        nfe=sum(outcome.nfe for outcome in outcomes),
        accepted=sum(outcome.accepted for outcome in outcomes),
        proposed=sum(outcome.proposed for outcome in outcomes),
        lane_eff=stats.active_slot_steps / max(stats.slot_steps, 1),
        padding_eff=stats.useful_rows / max(stats.computed_rows, 1),
    )


def run_loop(loop: PublicLoop, requests: list[Request], *, seconds: float) -> LoopResult:
    """Run the public loop sample by sample for about `seconds`, and finish the last sample."""
    tokens = forwards = 0
    spent = 0.0
    for request in requests:
        result = loop.decode(request.canvas)
        tokens, forwards, spent = tokens + result.tokens, forwards + result.forwards, spent + result.seconds
        if spent >= seconds:
            break
    return LoopResult(tokens, forwards, spent)


def speed(device: str, batches: list[int], samples: int, names: list[str], acceptance: str) -> None:
    """Tokens/s over batch sizes on the builtin model at 95 % masked, and the ratio to the public loop."""
    model = load(BUILTIN, device)
    requests = with_masks(held_out_windows(128, samples), "m95")
    loop = run_loop(PublicLoop.load(BUILTIN, k=5), requests, seconds=20.0)
    loop_rate = loop.tokens / loop.seconds
    print(f"public loop, batch 1, k=5: {loop_rate:.1f} tokens/s, NFE per token {loop.forwards / loop.tokens:.3f}")
    print("| decoder | " + " | ".join(f"B={rows}" for rows in batches) + " | NFE/token | best / public loop |")
    print("|---" * (len(batches) + 3) + "|")
    for name in names:
        measured = [measure(model, name, _enough(requests, rows), rows=rows, acceptance=acceptance) for rows in batches]
        rates = [part.rate for part in measured]
        cells = " | ".join(f"{rate:.0f}" for rate in rates)
        print(
            f"| {name} | {cells} | {measured[-1].nfe / measured[-1].tokens:.3f} | {max(rates) / loop_rate:.1f}x |",
            flush=True,
        )


def _enough(requests: list[Request], rows: int) -> list[Request]:
    """Fewer samples for fewer slots, so that small batches do not take most of the time."""
    return requests[: max(4, min(len(requests), 3 * rows))]


def nfe(device: str, samples: int) -> None:
    """NFE per token of every decoder on held-out files, and its ratio to ASSD k=5 under the same rule and model."""
    model = load(BUILTIN, device)
    windows = held_out_windows(128, samples)
    for acceptance in ("rejection", "coupled"):
        print(f"\nacceptance: {acceptance}; {samples} held-out windows of 128 tokens; standard error in brackets")
        print("| decoder | m95 | m50 | span40 | m95 / assd k=5 |\n|---|---|---|---|---|")
        base: float | None = None
        for name in sorted(VARIANTS, key=lambda name: name != PAPER):
            cells, ratio = [], ""
            for kind in ("m95", "m50", "span40"):
                share, error = _nfe_share(model, name, with_masks(windows, kind), acceptance)
                cells.append(f"{share:.3f} ({error:.3f})")
                if kind == "m95":
                    base = base or share
                    ratio = f"{share / base:.3f}"
            print(f"| {name} | {' | '.join(cells)} | {ratio} |", flush=True)


def _nfe_share(model: Loaded, name: str, requests: list[Request], acceptance: str) -> tuple[float, float]:
    settings, with_head = VARIANTS[name]
    sampling = Sampling.model_validate({"acceptance": acceptance})
    heads = model.heads if with_head else None
    decoder = build_decoder(
        Setup(
            backbone=model.backbone, info=model.info, sampling=sampling, max_rows=32, max_tokens=1 << 24, heads=heads
        ),
        settings,
    )
    outcomes = drain(decoder, requests)
    shares = np.array([outcome.nfe / len(outcome.tokens) for outcome in outcomes])
    total = sum(outcome.nfe for outcome in outcomes) / sum(len(outcome.tokens) for outcome in outcomes)
    return total, float(shares.std(ddof=1) / len(shares) ** 0.5)


def base(device: str, batches: list[int], iterations: int, steps: int) -> None:
    """An XLNet-base-shaped model with random weights, canvas 512, 95 % masked: steady tokens/s against the public loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        config = XLNetConfig(vocab_size=32000, d_model=768, n_layer=12, n_head=12, d_inner=3072, attn_type="bi")
        XLNetLMHeadModel(config).save_pretrained(folder)
        rng = np.random.default_rng(0)
        canvases = [rng.integers(10, 32000, 512).astype(np.int32) for _ in range(max(batches))]
        requests = with_masks(canvases, "m95")
        loop = PublicLoop.load(folder, k=5).decode(requests[0].canvas, max_iterations=iterations)
        loop_rate = loop.tokens / loop.seconds
        print(f"public loop, batch 1, k=5: {loop_rate:.2f} tokens/s over {iterations} iterations")
        print("| decoder | " + " | ".join(f"B={rows}" for rows in batches) + " | best / public loop |")
        print("|---" * (len(batches) + 2) + "|")
        model = load(folder, device)
        for decoder_name in ("any_subset", PAPER):
            rates = [_steady(model, decoder_name, requests[:rows], steps) for rows in batches]
            cells = " | ".join(f"{rate:.1f}" for rate in rates)
            print(f"| {decoder_name} | {cells} | {max(rates) / loop_rate:.0f}x |", flush=True)


def _steady(model: Loaded, name: str, requests: list[Request], steps: int) -> float:
    """Tokens/s over `steps` forwards of full slots, without the prefill on both sides of the comparison."""
    settings, _ = VARIANTS[name]
    decoder = build_decoder(
        Setup(
            backbone=model.backbone, info=model.info, sampling=Sampling(), max_rows=len(requests), max_tokens=1 << 24
        ),
        settings,
    )
    decoder.admit(requests)
    decoder.step()
    before, started = decoder.stats.committed, time.perf_counter()
    for _ in range(steps):
        decoder.step()
    return (decoder.stats.committed - before) / (time.perf_counter() - started)


def main() -> None:
    """Parse the command line and print one part's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "nfe", "base"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--decoders", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--acceptance", choices=["coupled", "rejection"], default="coupled")
    parser.add_argument("--iterations", type=int, default=3, help="iterations of the public loop at length 512")
    parser.add_argument("--steps", type=int, default=12, help="forwards timed at length 512")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    device = pick_device(flags.device)
    if flags.part == "speed":
        speed(device, flags.batches, flags.samples, flags.decoders, flags.acceptance)
    elif flags.part == "nfe":
        nfe(device, flags.samples)
    else:
        base(device, flags.batches, flags.iterations, flags.steps)


if __name__ == "__main__":
    main()
