"""Trains the draft heads on a frozen model, to correct stale rows towards the fresh row's distribution.

Target of both heads is the fresh row's distribution p at temperature 1, everything before it teacher-forced; the losses are
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

from draftmill.decoders.backbones.heads import DraftHeads, distance_index
from recipes.corpus import MASK_ID, TokenStream
from recipes.head_training import HeadSchedule, fit_heads, head_loss
from recipes.loop import autocast
from recipes.masking import MaskSchedule, Windows, training_batch
from recipes.training import to_rows
from recipes.two_stream import Canvas, QueryRows, TwoStream

CHAIN_STEPS = 5
MAX_AGE = 10
# A fused pass with five drafts needs ages 1 to 5; older rows are used when a pass has few cut points.
AGE_SHARES = (0.2, 0.17, 0.15, 0.13, 0.11, 0.06, 0.05, 0.05, 0.04, 0.04)


@dataclass(frozen=True)
class HeadPlan(HeadSchedule):
    """How to train the heads on `count` windows of `length` tokens a step."""

    count: int = 32
    length: int = 128
    chain_rows_share: float = 0.35
    markov_hidden: int = 384
    chain_hidden: int = 256
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

    def neighbour(self, step: int) -> tuple[Tensor, Tensor]:
        """Token id at position + step (-1 or 1) and whether a row may use it: on the canvas, and of an earlier rank."""
        length = self.canvas.ids.shape[1]
        there = self.position + step
        inside = (there >= 0) & (there < length)
        flat = self.window * length + there.clamp(0, length - 1)
        earlier = self.canvas.rank.flatten()[flat] < self.canvas.rank.flatten()[self.query.index]
        return self.canvas.ids.flatten()[flat], inside & earlier


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


def chain_hidden(
    model: TwoStream, heads: DraftHeads, rows: Rows, fresh: Tensor, starts: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """For t = 1, 2, ...: the rows t ranks after the starts [n] and the chain's states there [n, D].

    The chain starts from the fresh state of a row and then follows the true tokens. Chains end with their window.
    """
    assert heads.chain is not None, "no chain head to train"
    embedding = model.transformer.word_embedding.weight.detach()
    (left, has_left), (right, has_right) = rows.neighbour(-1), rows.neighbour(1)
    state, current = fresh[starts], starts
    reached = []
    for _ in range(CHAIN_STEPS):
        following = (current + 1).clamp_max(len(rows.window) - 1)
        alive = (rows.window[following] == rows.window[current]) & (following > current)
        state, prev, current = state[alive], current[alive], following[alive]
        state = heads.chain(
            state,
            prev_RD=embedding[rows.token[prev]],
            distance_R=distance_index(rows.position[current], rows.position[prev]),
            left_RD=embedding[left[current]],
            has_left_R=has_left[current],
            right_RD=embedding[right[current]],
            has_right_R=has_right[current],
        )
        reached.append((current, state))
    return reached


@torch.no_grad()
def read_frozen(model: TwoStream, rows: Rows, limits: list[Tensor], *, bfloat16: bool) -> list[Tensor]:
    """Final hidden states [N, D] in float32 for each of the limits [B, L], over one content stream."""
    with autocast(rows.token.device, enabled=bfloat16):
        context = model.context(rows.canvas)
        return [model.read(rows.canvas, context, replace(rows.query, limit=limit)).float() for limit in limits]


def step_loss(
    model: TwoStream, heads: DraftHeads, rows: Rows, rng: np.random.Generator, plan: HeadPlan, step: int
) -> Tensor:
    """Loss of one batch: the Markov head's plus the chain head's mean over its steps."""
    by_acceptance = plan.by_acceptance(step)
    limit = stale_limit(rows.canvas, draw_ages(rng, tuple(rows.canvas.rank.shape)).to(rows.token.device))
    fresh, stale = read_frozen(model, rows, [rows.canvas.rank, limit], bfloat16=True)
    with torch.no_grad(), autocast(fresh.device):
        log_p = log_law(model, fresh)
    with autocast(fresh.device):
        starts = torch.from_numpy(np.flatnonzero(rng.random(len(fresh)) < plan.chain_rows_share)).to(fresh.device)
        corrected, chosen = markov_hidden(model, heads, rows, stale, limit)
        loss = head_loss(log_p[chosen], log_law(model, corrected), by_acceptance=by_acceptance)
        for reached, state in chain_hidden(model, heads, rows, fresh, starts):
            if len(reached):
                chain = head_loss(log_p[reached], log_law(model, state), by_acceptance=by_acceptance)
                loss = loss + chain / CHAIN_STEPS
    return loss


def train_heads(
    model: TwoStream, stream: TokenStream, plan: HeadPlan, report: Callable[[int, float], None]
) -> DraftHeads:
    """Train both heads at once, from the same passes of the frozen model; `report(step, loss)` after every step."""
    device = model.lm_loss.bias.device
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        heads = DraftHeads(
            width=model.shape.d_model, markov_hidden=plan.markov_hidden, chain_hidden=plan.chain_hidden
        ).to(device)

    def loss_of(step: int) -> Tensor:
        # A different seed from the model's training, so that the windows and masks differ.
        windows = training_batch(
            stream, plan.masks, seed=plan.seed + 1_000_003, step=step, count=plan.count, length=plan.length
        )
        rng = np.random.default_rng([plan.seed, step, 2])
        return step_loss(model, heads, rows_of(windows, device), rng, plan, step)

    fit_heads(heads, plan, loss_of, report)
    return heads
