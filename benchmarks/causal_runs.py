"""Parts of the causal benchmarks: models, prompts, decoders, and measured runs of a decoder over batch slots.

Knows nothing of tables or of other software.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.any_subset import drain
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.heads.published import load_speculator
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.causal.settings import (
    AutoregressiveSettings,
    HeadDrafterSettings,
    JacobiSettings,
    ModelDrafterSettings,
    MultiblockJacobiSettings,
    NgramDrafterSettings,
    SpeculativeSettings,
)
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from recipes.corpus import encode, split, standard_library

AUTOREGRESSIVE = "autoregressive"
_SMALL, _NGRAM = ModelDrafterSettings(kind="model", path="drafter"), NgramDrafterSettings(kind="ngram")
_HEAD = HeadDrafterSettings(kind="head", path="head")
SPECULATIVE: dict[str, SpeculativeSettings] = {
    **{f"speculative, model, k={k}": SpeculativeSettings(kind="speculative", k=k, drafter=_SMALL) for k in (3, 5)},
    "speculative, model, k=auto": SpeculativeSettings(kind="speculative", k="auto", drafter=_SMALL),
    **{f"speculative, n-gram, k={k}": SpeculativeSettings(kind="speculative", k=k, drafter=_NGRAM) for k in (2, 3, 5)},
    "speculative, n-gram, k=auto": SpeculativeSettings(kind="speculative", k="auto", drafter=_NGRAM),
    **{f"speculative, head, k={k}": SpeculativeSettings(kind="speculative", k=k, drafter=_HEAD) for k in (2, 3, 5)},
    "speculative, head, k=auto": SpeculativeSettings(kind="speculative", k="auto", drafter=_HEAD),
}
JACOBI: dict[str, DecoderChoice] = {
    "jacobi, n=16": JacobiSettings(kind="jacobi", block_size=16),
    "jacobi, n=16, running": JacobiSettings(kind="jacobi", block_size=16, window="running"),
    "multiblock_jacobi, n=16": MultiblockJacobiSettings(kind="multiblock_jacobi", block_size=16),
}
VARIANTS: dict[str, DecoderChoice] = {
    AUTOREGRESSIVE: AutoregressiveSettings(kind="autoregressive"),
    **SPECULATIVE,
    **JACOBI,
}


@dataclass(frozen=True, slots=True)
class Models:
    """A target, its drafter and its draft head, ready to decode."""

    target: Model
    info: ModelInfo
    drafter: Model
    drafter_info: ModelInfo
    head: Model | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The figures of every run; `texts` are new tokens by request index."""

    texts: dict[int, list[int]]
    seconds: float
    nfe: int
    nfe_draft: int
    accepted: int
    proposed: int

    @property
    def count(self) -> int:
        """New tokens."""
        return sum(len(tokens) for tokens in self.texts.values())

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.count / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Totals):
    """Totals of a causal decoder; `forward_s` are the seconds of all forwards."""

    forward_s: float

    @property
    def limit(self) -> float:
        """New tokens per second if nothing but these forwards took time."""
        return self.count / self.forward_s

    @property
    def acceptance(self) -> str:
        """Accepted over proposed drafts, empty where nothing was drafted."""
        return f"{self.accepted / self.proposed:.2f}" if self.proposed else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    batches: list[int]
    samples: int
    new_tokens: int
    repeats: int
    temperature: float
    ends: str
    stops: Stops
    decoders: list[str]

    def title(self, what: str) -> str:
        """A heading of the tables."""
        ends = {"eos": "the end token", "blank": "a blank line or the end token"}[self.ends]
        return f"\n## {what}: temperature {self.temperature:g}, up to {self.new_tokens} tokens, ended by {ends}\n"

    def enough(self, requests: list[Request], rows: int) -> list[Request]:
        """Fewer samples for fewer slots, so that small batches do not take most of the time."""
        return requests[: max(4, min(len(requests), 3 * rows))]


def load(folder: Path, device: str) -> Model:
    """Load a causal checkpoint."""
    if inspect_model(folder).kind != "causal":
        raise SystemExit(f"{folder} is no causal model")
    return load_backbone(folder, device=device)


def load_models(target: Path, drafter: Path, device: str, head: Path | None = None) -> Models:
    """Load both models, and the target's head."""
    model = load(target, device)
    own_head = None if head is None else load_speculator(head, model)
    return Models(model, inspect_model(target), load(drafter, device), inspect_model(drafter), own_head)


def ends_of(folder: Path, tokenizer: PreTrainedTokenizerFast, ends: str) -> Stops:
    """The ids that end a text."""
    own = stop_ids(folder)
    if ends == "eos":
        return Stops(ids=own)
    blank = (index for index in range(len(tokenizer)) if "\n\n" in str(tokenizer.decode([index])))
    return Stops(ids=tuple(sorted({*own, *blank})))


def held_out_prompts(tokenizer: PreTrainedTokenizerFast, plan: Plan) -> list[Request]:
    """Prompts of 32 to 96 tokens from all over the held-out files, each with room for `new_tokens` more."""
    _, files = split(standard_library())
    texts = [ids for file in files if len(ids := encode(tokenizer, file.text)) > 96]
    rng, requests = np.random.default_rng(0), []
    for index in range(plan.samples):
        ids, length = texts[index * len(texts) // plan.samples], int(rng.integers(32, 97))
        start = int(rng.integers(0, len(ids) - length))
        canvas = np.full(length + plan.new_tokens, -1, dtype=np.int32)
        canvas[:length] = ids[start : start + length]
        requests.append(Request(index, sample_key(0, str(index)), canvas))
    return requests


def measure(models: Models, settings: DecoderChoice, requests: list[Request], plan: Plan, *, rows: int) -> Measured:
    """Run one decoder over enough of the requests with `rows` slots, the longest first."""
    by_head = isinstance(getattr(settings, "drafter", None), HeadDrafterSettings)
    decoder = build_decoder(
        Setup(
            backbone=models.target,
            info=models.info,
            sampling=Sampling(temperature=plan.temperature),
            max_rows=rows,
            max_tokens=1 << 24,
            stops=plan.stops,
            drafter=models.head if by_head else models.drafter,
            drafter_info=None if by_head else models.drafter_info,
        ),
        settings,
    )
    started = time.perf_counter()
    outcomes = drain(decoder, sorted(plan.enough(requests, rows), key=lambda request: -len(request.canvas)))
    seconds = time.perf_counter() - started
    return Measured(
        texts={outcome.index: outcome.tokens.tolist() for outcome in outcomes},
        seconds=seconds,
        forward_s=decoder.stats.forward_s,
        nfe=sum(outcome.nfe for outcome in outcomes),
        nfe_draft=sum(outcome.nfe_draft for outcome in outcomes),
        accepted=sum(outcome.accepted for outcome in outcomes),
        proposed=sum(outcome.proposed for outcome in outcomes),
    )
