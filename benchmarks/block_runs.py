"""Parts of the block-diffusion benchmark: models, decoders by block size, measured runs, and quality of texts.

Knows nothing of tables or of other software.

Legend: N samples, G generated positions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.any_subset import drain
from benchmarks.causal_runs import Totals
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.blocks.settings import BlockDiffusionSettings, S2d2Settings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, find_heads
from draftmill.decoders.settings import DECODERS

TAU = 0.85
"""The confidence at which the paper's SDAR configurations reveal tokens without a verification."""
ROUTERS: dict[str, dict[str, Any]] = {
    "always": {"router": {"kind": "min_span"}},
    "span >= 2": {"router": {"kind": "min_span", "span": 2}},
    "score, static c=1": {"router": {"kind": "score"}, "cost": {"kind": "static", "c": 1.0}},
    "score, dynamic c=1": {"router": {"kind": "score"}, "cost": {"kind": "dynamic", "c": 1.0}},
    "hysteresis 1, -5": {
        "router": {"kind": "hysteresis", "on": 1.0, "off": -5.0},
        "cost": {"kind": "dynamic", "c": 1.0},
    },
    "bandit": {"router": {"kind": "bandit"}},
}
"""The paper's configurations of SDAR (score, static; always) and of Fast-dLLM v2 (hysteresis), and its other routers."""
_KINDS = ("prefill", "draft", "verify", "commit")


def block_diffusion(size: int, schedule: str, **settings: Any) -> BlockDiffusionSettings:
    """DecoderChoice of `block_diffusion`."""
    return BlockDiffusionSettings.model_validate(
        {"kind": "block_diffusion", "block_size": size, "schedule": schedule, **settings}
    )


def s2d2(size: int, router: str, **settings: Any) -> S2d2Settings:
    """DecoderChoice of `s2d2` with one of ROUTERS, as the paper runs SDAR: causal caching and partly causal drafts."""
    given = {"block_size": size, "tau": TAU, "causal_cache": True, "causal_draft": True}
    return S2d2Settings.model_validate({"kind": "s2d2", **given, **ROUTERS[router], **settings})


def one_by_one(*, fused: bool) -> DecoderChoice:
    """Autoregressive decoding by the block-diffusion model: two forwards per token, or one that also caches the last token."""
    return block_diffusion(1, "static", causal_cache=True, fused=fused)


def decoders_of(size: int, taus: Sequence[float]) -> dict[str, DecoderChoice]:
    """Every decoder at one block size, by name."""
    apart = {
        **{
            f"static, {count} a step": block_diffusion(size, "static", steps=size // count)
            for count in (1, 2, 4)
            if count < size
        },
        **{f"dynamic, tau={tau:g}": block_diffusion(size, "dynamic", tau=tau) for tau in taus},
        **{f"s2d2, {router}": s2d2(size, router) for router in ROUTERS},
    }
    fused = {
        "static, 1 a step, fused": block_diffusion(size, "static", fused=True),
        **{f"dynamic, tau={tau:g}, fused": block_diffusion(size, "dynamic", tau=tau, fused=True) for tau in taus},
        **{f"s2d2, {router}, fused": s2d2(size, router, fused=True, head="none") for router in ROUTERS},
        "s2d2, always, fused, head": s2d2(size, "always", fused=True),
    }
    return {**apart, **fused, "s2d2, always, block cache": s2d2(size, "always", causal_cache=False, causal_draft=False)}


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to decode."""

    folder: Path
    backbone: Model
    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Totals):
    """Totals of one run: `kinds` are forwards by purpose, `token_rows` the rows of all of them."""

    kinds: dict[str, int]
    token_rows: int

    @property
    def per_token(self) -> list[float]:
        """Prefills, drafts, verifications and commits for each new token."""
        return [self.kinds.get(kind, 0) / self.count for kind in _KINDS]


def load(folder: Path, device: str, *, decoder: str) -> Loaded:
    """Load a checkpoint that `decoder` runs on."""
    info = inspect_model(folder)
    if DECODERS[decoder].runs_on != info.kind:
        raise SystemExit(f"{folder} is of family {info.family!r}, which decoder {decoder!r} does not support")
    return Loaded(folder, load_backbone(folder, device=device), info)


def measure(
    model: Loaded, settings: DecoderChoice, requests: list[Request], *, rows: int, temperature: float
) -> Measured:
    """Run one decoder over the requests with `rows` slots."""
    sampling = Sampling(temperature=temperature)
    decoder = build_decoder(
        Setup(
            backbone=model.backbone,
            info=model.info,
            sampling=sampling,
            max_rows=rows,
            max_tokens=1 << 24,
            heads=find_heads(settings, model.folder, model.backbone),
        ),
        settings,
    )
    started = time.perf_counter()
    outcomes = drain(decoder, requests)
    seconds = time.perf_counter() - started
    counted: Counter[str] = Counter()
    for outcome in outcomes:
        counted.update(outcome.nfe_kinds or {"draft": outcome.nfe})
    return Measured(
        texts={outcome.index: outcome.tokens.tolist() for outcome in outcomes},
        seconds=seconds,
        nfe=sum(outcome.nfe for outcome in outcomes),
        nfe_draft=0,
        accepted=sum(outcome.accepted for outcome in outcomes),
        proposed=sum(outcome.proposed for outcome in outcomes),
        kinds=dict(counted),
        token_rows=decoder.stats.useful_rows,
    )


# ---- quality of a text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quality:
    """Nats per token of a text under the block-size-1 model, and the share of its tokens that are that model's first choice."""

    nats: float
    agreement: float


@torch.no_grad()
def quality(model: Loaded, requests: Sequence[Request], texts: Mapping[int, list[int]]) -> Quality:
    """Score texts token by token, each given all that is to its left, by the distribution of block size 1 at temperature 1."""
    nats, hits, count = 0.0, 0, 0
    for request in requests:
        if request.index not in texts:
            continue
        prompt = request.canvas[request.canvas != HOLE].tolist()
        tokens_G = torch.tensor(texts[request.index], device=model.backbone.device)
        law_GV = law_of_one(model, prompt, tokens_G)
        nats -= float(law_GV.gather(1, tokens_G.unsqueeze(1)).sum())
        hits += int((law_GV.argmax(1) == tokens_G).sum())
        count += len(tokens_G)
    return Quality(nats / count, hits / count)


def law_of_one(model: Loaded, prompt: list[int], tokens_G: Tensor) -> Tensor:
    """The log-probabilities of each token at block size 1, given those before it, float64 [G, V].

    In one forward: the text runs causally; in models without a shift a mask beside each token predicts it, which sees
    the text before the token, and itself.
    """
    device, mask_id = tokens_G.device, model.info.mask_id
    assert mask_id is not None, "a block-diffusion model without a mask"
    text_L = torch.cat([torch.tensor(prompt, dtype=torch.int64, device=device), tokens_G])
    length, shift = len(text_L), model.info.shift
    places_L = torch.arange(length, device=device)
    asked_G = places_L[len(prompt) :]
    if shift:
        hidden_RD = _causally(model, text_L, places_L, places_L)[asked_G - shift]
    else:
        tokens_T = torch.cat([text_L, torch.full_like(tokens_G, mask_id)])
        hidden_RD = _causally(model, tokens_T, torch.cat([places_L, asked_G]), torch.arange(len(tokens_T)))[length:]
    logits_GV = model.backbone.logits(hidden_RD).to(torch.float64)
    suppressed = torch.tensor(model.info.suppressed, dtype=torch.int64, device=device)
    return torch.log_softmax(logits_GV.index_fill_(1, suppressed, -torch.inf), 1)


def _causally(model: Loaded, tokens_T: Tensor, positions_T: Tensor, columns_T: Tensor) -> Tensor:
    """Hidden states of rows in one slot, [T, D]; each sees the columns of the text before its position, and its own."""
    columns_T, width = columns_T.to(tokens_T.device), -(-len(tokens_T) // 64) * 64
    model.backbone.allocate(1, width)
    low_IN = torch.stack([torch.zeros_like(columns_T), columns_T])
    high_IN = torch.stack([positions_T, columns_T + 1])
    rows = token_rows([0], [len(tokens_T)], tokens_T, positions_T, columns_T, (low_IN, high_IN))
    return model.backbone.forward(rows)
