"""`autoregressive`: one token a forward, the baseline that every lossless decoder of causal models must equal.

Legend: B slots, V vocabulary.
"""

from __future__ import annotations

import torch

from decoders.causal import CausalDecoder
from decoders.state import Group


class Autoregressive(CausalDecoder):
    """The first forward runs the prompt and gives the first token; NFE equals the number of generated tokens."""

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        decided_B, start_B = state.decided_S[slots_B], state.cached_S[slots_B]
        hidden_BTD = self._forward(group, decided_B)
        state.cached_S[slots_B] = decided_B
        logits_BV = self._logits(self._rows_at(hidden_BTD, start_B, decided_B.unsqueeze(1) - 1)[:, 0])
        law_BV = self._law(logits_BV)
        tokens_B = self.acceptance.target(law_BV, slots_B, decided_B)
        log_p_B = self._log_p(logits_BV, law_BV, tokens_B)
        one_B, none_B = torch.ones_like(decided_B), torch.zeros_like(decided_B)
        counts_B = self._commit_until_stop(group, tokens_B.unsqueeze(1), one_B, log_p_B.unsqueeze(1))
        self.stats.verified += len(group.slots)
        self._close_iteration(group, counts_B, none_B, none_B, one_B == 1)
        self._trace(group, tokens_B.unsqueeze(1), none_B, decided_B, one_B == 1)
