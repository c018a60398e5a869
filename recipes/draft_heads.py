"""Trains the draft head on a frozen model, to correct stale rows towards the fresh row's distribution.

Its target is the fresh row's distribution p at temperature 1, everything before it teacher-forced; the losses are
those of head_training.py. The mask token is impossible under both distributions. The word embeddings and the tied output are the
model's own and stay as they are.

Legend: N = query rows of a batch, in decoding order within each window; D = width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.heads.markov import DraftHeads, distance_index
from recipes.corpus import MASK_ID, TokenStream
from recipes.head_training import HeadSchedule, fit_heads, head_loss
from recipes.loop import autocast
from recipes.masking import MaskSchedule, Windows, training_batch
from recipes.training import to_rows
from recipes.two_stream import Canvas, QueryRows, TwoStream

MAX_AGE = 10
# A fused pass with five drafts needs ages 1 to 5; older rows are used when a pass has few cut points.
AGE_SHARES = (0.2, 0.17, 0.15, 0.13, 0.11, 0.06, 0.05, 0.05, 0.04, 0.04)


@dataclass(frozen=True)
class HeadPlan(HeadSchedule):
    """How to train the head on `count` windows of `length` tokens a step."""

    count: int = 32
    length: int = 128
    markov_hidden: int = 384
    masks: MaskSchedule = field(default_factory=lambda: MaskSchedule(low=0.01, high=0.85, warmup=0, stale_share=0.0))


@dataclass(frozen=True)
class Rows:
    """The query rows of a batch: token, position, window and offset (rank minus prompt length), all [N]."""

    canvas: Canvas
    query: QueryRows
    token: Tensor
    position: Tensor
    window: Tensor
    offset: Tensor


def rows_of(windows: Windows, device: torch.device) -> Rows:
    """The masked positions of a batch as rows."""
    canvas, query, token = to_rows(windows, device)
    length = canvas.ids.shape[1]
    window, position = query.index // length, query.index % length
    offset = canvas.rank.flatten()[query.index] - canvas.num_prompt[window]
    return Rows(canvas, query, token, position, window, offset)


def draw_ages(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Random ages (ranks between what a row sees and its own rank), 1 to MAX_AGE."""
    return torch.from_numpy(rng.choice(np.arange(1, MAX_AGE + 1), size=shape, p=AGE_SHARES))


def stale_limit(canvas: Canvas, age: Tensor | int) -> Tensor:
    """How many ranks each position sees [B, L] when its row is `age` ranks old; the prompt is always seen."""
    return torch.maximum(canvas.rank - age, canvas.num_prompt[:, None])


def log_law(model: TwoStream, hidden: Tensor) -> Tensor:
    """Log-probabilities [N, V] in float32, the mask token impossible."""
    scores = model.logits(hidden).float()
    return scores.index_fill(-1, torch.tensor([MASK_ID], device=scores.device), -torch.inf).log_softmax(-1)


def markov_rows(rows: Rows, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [n] of the rows with unseen ranks before them, and the number of these ranks [n]."""
    own = rows.canvas.rank.flatten()[rows.query.index]
    unseen = own - limit.flatten()[rows.query.index]
    chosen = (unseen > 0).nonzero().squeeze(1)
    return chosen, unseen[chosen]


def markov_hidden(
    model: TwoStream, heads: DraftHeads, rows: Rows, stale: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """Corrected hidden states [n, D] of the stale rows, and the rows' indices [n]."""
    chosen, unseen = markov_rows(rows, limit)
    prev, before = chosen - 1, (chosen - 2).clamp_min(0)  # within the window wherever the head reads them
    embedding = model.transformer.word_embedding.weight.detach()
    corrected = heads.markov(
        stale[chosen],
        prev_RD=embedding[rows.token[prev]],
        prev_distance_R=distance_index(rows.position[chosen], rows.position[prev]),
        before_RD=embedding[rows.token[before]],
        before_distance_R=distance_index(rows.position[chosen], rows.position[before]),
        num_unseen_R=unseen,
    )
    return corrected, chosen


@torch.no_grad()
def read_frozen(model: TwoStream, rows: Rows, limits: list[Tensor], *, bfloat16: bool) -> list[Tensor]:
    """Final hidden states [N, D] in float32 for each of the limits [B, L], over one content stream."""
    with autocast(rows.token.device, enabled=bfloat16):
        context = model.context(rows.canvas)
        return [model.read(rows.canvas, context, replace(rows.query, limit=limit)).float() for limit in limits]


def step_loss(
    model: TwoStream, heads: DraftHeads, rows: Rows, rng: np.random.Generator, plan: HeadPlan, step: int
) -> Tensor:
    """Loss of one batch of stale rows."""
    by_acceptance = plan.by_acceptance(step)
    limit = stale_limit(rows.canvas, draw_ages(rng, tuple(rows.canvas.rank.shape)).to(rows.token.device))
    fresh, stale = read_frozen(model, rows, [rows.canvas.rank, limit], bfloat16=True)
    with torch.no_grad(), autocast(fresh.device):
        log_p = log_law(model, fresh)
    with autocast(fresh.device):
        corrected, chosen = markov_hidden(model, heads, rows, stale, limit)
        return head_loss(log_p[chosen], log_law(model, corrected), by_acceptance=by_acceptance)


def train_heads(
    model: TwoStream, stream: TokenStream, plan: HeadPlan, report: Callable[[int, float], None]
) -> DraftHeads:
    """Train the head; `report(step, loss)` after every step."""
    device = model.lm_loss.bias.device
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        heads = DraftHeads(width=model.shape.d_model, markov_hidden=plan.markov_hidden).to(device)

    def loss_of(step: int) -> Tensor:
        # A different seed from the model's training, so that the windows and masks differ.
        windows = training_batch(
            stream, plan.masks, seed=plan.seed + 1_000_003, step=step, count=plan.count, length=plan.length
        )
        rng = np.random.default_rng([plan.seed, step, 2])
        return step_loss(model, heads, rows_of(windows, device), rng, plan, step)

    fit_heads(heads, plan, loss_of, report)
    return heads
