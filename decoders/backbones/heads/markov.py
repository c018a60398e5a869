"""Draft heads: small networks that repair a proposal made without seeing the latest tokens.

A query row of an any-subset model that was computed before some tokens were decided is *stale*; so is a masked-diffusion
model's row of a mask once other masks before it have become tokens. A draft head moves its hidden state towards what a fresh
row would have given, from the embeddings of the tokens it has not seen. Heads only shape the draft distribution q; the target
distribution p never depends on them, so they cannot change any output distribution.

Knows nothing of slots, caches or sampling.

Legend: R any leading shape, H = hidden width of the head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from draftmill.decoders.backbones.families.config import refused
from draftmill.decoders.backbones.heads.files import CONFIG, MAX_DISTANCE, MAX_UNSEEN, WEIGHTS, HeadKind, read_sizes
from draftmill.decoders.backbones.load import check_finite


def distance_index(position: Tensor, other: Tensor) -> Tensor:
    """Index of the clipped signed distance `position - other`, in [0, 2 * MAX_DISTANCE]."""
    return (position - other).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE


class MarkovHead(nn.Module):
    """Corrects a stale row with the one or two tokens just before it in decoding order that it has not seen. h' = h + MLP([h,
    e(prev) + distance, (e(before) + distance) where unseen, age]); the logits are the model's own tied output layer applied to
    h'."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.distance_prev = nn.Embedding(2 * MAX_DISTANCE + 1, width)
        self.distance_before = nn.Embedding(2 * MAX_DISTANCE + 1, width)
        self.age = nn.Embedding(MAX_UNSEEN + 1, width)
        self.norm = nn.LayerNorm(3 * width)
        self.up = nn.Linear(3 * width, hidden)
        self.down = nn.Linear(hidden, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        for table in (self.distance_prev, self.distance_before, self.age):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self,
        hidden_RD: Tensor,
        *,
        prev_RD: Tensor,
        prev_distance_R: Tensor,
        before_RD: Tensor,
        before_distance_R: Tensor,
        num_unseen_R: Tensor,
    ) -> Tensor:
        """Return the corrected hidden states.

        `prev_RD` embeds the token at the preceding rank, `before_RD` the one before that; `num_unseen_R` counts the
        tokens decided or drafted between the row's context and the row. It is 0 where a row only predicts for another model
        than the target. The second token enters only where two or more are unseen. Distances are indices from
        `distance_index(row position, token position)`.
        """
        prev = prev_RD + self.distance_prev(prev_distance_R)
        before = before_RD + self.distance_before(before_distance_R)
        before = torch.where((num_unseen_R >= 2).unsqueeze(-1), before, torch.zeros_like(before))
        prev = prev + self.age(num_unseen_R.clamp(max=MAX_UNSEEN))
        features = self.norm(torch.cat([hidden_RD, prev, before], dim=-1))
        return hidden_RD + self.down(nn.functional.gelu(self.up(features)))


class DraftHeads(nn.Module):
    """What ships with one model."""

    def __init__(self, *, width: int, markov_hidden: int) -> None:
        super().__init__()
        self.markov = MarkovHead(width, markov_hidden)

    def sizes(self) -> dict[str, int]:
        """The content of `draft_head.json`: the arguments of the heads' constructors."""
        return {"width": self.markov.down.out_features, "markov_hidden": self.markov.down.in_features}


def load_heads(folder: Path, kind: HeadKind = "assd") -> DraftHeads | None:
    """Load the heads in a folder; None if it has none. Raises ValueError as `read_sizes`, or where the weights do not fit."""
    sizes = read_sizes(folder, kind)
    if sizes is None:
        return None
    heads, path = DraftHeads(**sizes), folder / WEIGHTS
    weights = {name: tensor.float() for name, tensor in load_file(path).items()}
    check_finite(weights, path, "decoder.head")
    with refused(f"decoder.head: {path} does not fit {folder / CONFIG}", RuntimeError):
        heads.load_state_dict(weights, strict=True)
    return heads.eval()
