"""The plain reference of any-subset decoding: one sample, no cache, one token a forward.

Written to be compared with the paper, not to be fast: `any_subset` must give the same tokens from the same noise, and the product
of its conditionals is the law that every other decoder must have.

Source: Guo and Ermon, ASSD, the sequential sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decoders.backbones.base import Backbone, Rows
from decoders.backbones.visibility import content_limits
from decoders.common_settings import Sampling
from decoders.draws.sampling import log_law
from decoders.references.choosers import Rule


class PlainModel:
    """An any-subset model without a cache: every call recomputes all content rows. One canvas at a time."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        order: Sequence[int],
        num_prompt: int,
        sampling: Sampling,
        suppressed: Sequence[int] = (),
    ) -> None:
        self.backbone, self.order, self.num_prompt, self.sampling = backbone, list(order), num_prompt, sampling
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.int64)
        backbone.allocate(1, len(self.order))
        backbone.set_order(0, torch.tensor(self.order))

    def hidden(self, tokens: Sequence[int], queries: Sequence[tuple[int, int]]) -> Tensor:
        """Return the hidden states [Q, D] of (rank, limit) queries, given the tokens at ranks 0, 1, .. ."""
        columns = torch.arange(len(tokens)).unsqueeze(0)
        pairs = torch.tensor(list(queries), dtype=torch.int64).reshape(-1, 2)
        limits = content_limits(columns, torch.tensor([self.num_prompt]))
        rows = Rows(
            slots_B=torch.tensor([0]),
            content_tokens_BC=torch.tensor([list(tokens)], dtype=torch.int64),
            content_columns_BC=columns,
            content_limits_BC=limits,
            content_valid_BC=torch.ones_like(columns, dtype=torch.bool),
            query_columns_BQ=pairs[None, :, 0],
            query_limits_BQ=pairs[None, :, 1],
            query_valid_BQ=torch.ones(1, len(pairs), dtype=torch.bool),
            num_columns=max(int(limits.max()) if len(tokens) else 0, int(pairs[:, 1].max())),
            num_positions=len(self.order),
        )
        return self.backbone.forward(rows)[0]

    def law(self, hidden_D: Tensor) -> Tensor:
        """Return the warped log-probabilities of one hidden state, [V]."""
        return self.law_of_logits(self.backbone.logits(hidden_D.unsqueeze(0)))

    def law_of_logits(self, logits_1V: Tensor) -> Tensor:
        """Suppress and warp, [V]."""
        suppressed = logits_1V.index_fill(-1, self._suppressed, -torch.inf)
        return log_law(suppressed, self.sampling)[0]


@dataclass(slots=True)
class Trail:
    """One sample in progress: its tokens by rank, and its counters."""

    tokens: list[int]
    nfe: int = 0
    lookups: int = 0
    proposed: int = 0
    accepted: int = 0
    committed: list[int] = field(default_factory=list)

    def close(self, *, drafts: int, accepted: int, committed: int) -> None:
        """End one iteration."""
        self.proposed += drafts
        self.accepted += accepted
        self.committed.append(committed)


def sequential(model: PlainModel, prompt: Sequence[int], rule: Rule) -> Trail:
    """One token a forward, in order."""
    trail = Trail(list(prompt))
    while (n := len(trail.tokens)) < len(model.order):
        p_V = model.law(model.hidden(trail.tokens, [(n, n)])[0])
        trail.nfe += 1
        trail.tokens.append(rule.direct(p_V, model.order[n], n))
        trail.close(drafts=0, accepted=0, committed=1)
    return trail
