"""The plain reference of any-subset decoding: one sample, no cache, one token a forward.

Written to be compared with the paper, not to be fast: `any_subset` must give the same tokens from the same noise, and the product
of its conditionals is the law that every other decoder must have.

Source: Guo and Ermon, ASSD, the sequential sampler.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.rows import RowShape, StreamRows
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.sampling import log_law


class PlainModel:
    """An any-subset model without a cache: every call recomputes all content rows. One canvas at a time."""

    def __init__(
        self,
        backbone: Model,
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
        column_C = torch.arange(len(tokens))
        pairs = torch.tensor(list(queries), dtype=torch.int64).reshape(-1, 2)
        limit_C = (column_C + 1).clamp(min=self.num_prompt)  # the prompt sees all of itself
        line_Q, limit_Q = torch.arange(len(pairs)), pairs[:, 1]
        shape = RowShape(
            num_slots=1,
            num_lines=len(tokens),
            num_queries=len(pairs),
            num_columns=max(int(limit_C.max()) if len(tokens) else 0, int(limit_Q.max())),
            num_positions=len(self.order),
            slots=slice(0, 1),
            some_blind=bool((limit_Q == 0).any()),
        )
        rows = StreamRows(
            slots_G=torch.tensor([0]),
            owner_N=torch.zeros_like(column_C),
            line_N=column_C,
            token_N=torch.tensor(list(tokens), dtype=torch.int64),
            column_N=column_C,
            limit_N=limit_C,
            owner_Q=torch.zeros_like(line_Q),
            line_Q=line_Q,
            rank_Q=pairs[:, 0],
            limit_Q=limit_Q,
            shape=shape,
        )
        return self.backbone.forward(rows)

    def law(self, hidden_D: Tensor) -> Tensor:
        """Return the warped log-probabilities of one hidden state, [V]."""
        return self.law_of_logits(self.backbone.logits(hidden_D.unsqueeze(0)))

    def law_of_logits(self, logits_1V: Tensor) -> Tensor:
        """Suppress and warp, [V]."""
        suppressed = logits_1V.index_fill(-1, self._suppressed, -torch.inf)
        return log_law(suppressed, self.sampling)[0]
