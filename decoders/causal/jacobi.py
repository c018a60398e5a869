"""`jacobi`: every forward refines a block of drafts and commits those that equal the target's own tokens.

The drafts stand in the slot's undecided columns. A forward runs the last decided token and the drafts after it under plain
causal visibility, so every row predicts the target's next token. Drafts that equal the prediction of the row before them, from
the first one on, are accepted, and so is the prediction after them. The predictions of the other rows are the next drafts.

    column      .. D-1 | D   D+1  D+2  D+3          D tokens decided, four drafts
    tokens      .. the | cat sat  mat  .
    target says    cat | sat on   .    ""           for the column after: two drafts were right
    next        .. the   cat sat  on | .    ""      three tokens committed, the drafts after them replaced

Every forward commits at least one token, so there are never more forwards than in `autoregressive`. A token is
argmax(log p + g) with the noise g of its position: the fixed point is the sequential text at any temperature.

Source: Hu et al., "Fast and accurate causal parallel decoding using Jacobi forcing" (pcLLM), section 2 and figure 4 (running
window); Santilli et al., 2023. Legend: Q columns from D on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.base import Request
from decoders.causal.decoder import CausalDecoder
from decoders.causal.jacobi_size import MOST_AUTO, JacobiSizes
from decoders.causal.settings import JacobiSettings
from decoders.draws import noise
from decoders.engine.acceptance import leading
from decoders.engine.setup import Setup
from decoders.engine.state import Group


@dataclass(frozen=True, slots=True)
class TargetTokens:
    """The target's tokens in the rows of one forward; only the requested rows are filled.

    `tokens_BT` is the token after each row, `log_p_BT` its log-probability under the model itself.
    """

    tokens_BT: Tensor
    log_p_BT: Tensor


class JacobiDecoder(CausalDecoder):
    """Shared by the Jacobi decoders: the first drafts, reading a forward, ending an iteration."""

    def _start(self, slot: int, request: Request) -> None:
        """Fill every hole with a random token of the prompt, so that every window has drafts."""
        super()._start(slot, request)
        state = self.state
        prompt, length = int(state.prompt_S[slot]), int(state.length_S[slot])
        holes = state.order_SW[slot, prompt:length]
        keys = state.key_S2[slot].expand(len(holes), 2)
        uniforms = noise.uniform_rows(keys, holes, noise.JACOBI, torch.zeros_like(holes))
        state.tokens_SW[slot, prompt:length] = state.tokens_SW[slot, (uniforms * prompt).long()]

    def _ask(self, group: Group, hidden_BTD: Tensor, ranks_BT: Tensor, asked_BT: Tensor) -> TargetTokens:
        """Draw the target's token at `ranks_BT` from each row where `asked_BT`."""
        slots_BT = group.index_B.unsqueeze(1).expand_as(ranks_BT)
        tokens_BT = torch.zeros_like(ranks_BT)
        log_p_BT = torch.zeros(ranks_BT.shape, dtype=torch.float64, device=ranks_BT.device)
        tokens_R, log_p_R = self._say(hidden_BTD[asked_BT], slots_BT[asked_BT], ranks_BT[asked_BT])
        tokens_BT[asked_BT], log_p_BT[asked_BT] = tokens_R, log_p_R
        self.stats.verified += len(tokens_R)
        return TargetTokens(tokens_BT, log_p_BT)

    def _log_p_at(self, said: TargetTokens, rows_BQ: Tensor, keep_BQ: Tensor) -> Tensor:
        """The log-probabilities of the target's tokens in these rows (indices along T), where `keep_BQ`; 0 elsewhere, [B, Q]."""
        return said.log_p_BT.gather(1, rows_BQ).masked_fill(~keep_BQ, 0.0)

    def _put(self, slots_B: Tensor, ranks_B: Tensor, tokens_BQ: Tensor, keep_BQ: Tensor) -> None:
        """Write the tokens where `keep_BQ` into the columns from `ranks_B` on, as drafts."""
        columns_BQ = ranks_B.unsqueeze(1) + torch.arange(tokens_BQ.shape[1], device=ranks_B.device)
        slots_BQ = slots_B.unsqueeze(1).expand_as(columns_BQ)
        self.state.tokens_SW[slots_BQ[keep_BQ], columns_BQ[keep_BQ]] = tokens_BQ[keep_BQ]

    def _finish(
        self, group: Group, line_BQ: Tensor, *, accepted_B: Tensor, log_p_BQ: Tensor, drafts_BQ: Tensor, fed_B: Tensor
    ) -> None:
        """Commit the accepted tokens of the line and the one after them; count and trace the iteration.

        `drafts_BQ` are the `fed_B` drafts in the columns from D on. A stop drops what comes after it, from
        the count of proposed drafts too; the trace shows all drafts that were fed.
        """
        decided_B = self.state.decided_S[group.index_B]
        counts_B = self._commit_until_stop(group, line_BQ, accepted_B + 1, log_p_BQ)
        stopped_B = self._finish_S[group.index_B] != 0
        proposed_B = torch.where(stopped_B, torch.minimum(fed_B, counts_B), fed_B)
        every_B = torch.ones_like(stopped_B)
        self._close_iteration(group, counts_B, proposed_B, torch.minimum(accepted_B, counts_B), every_B)
        self._trace(group, drafts_BQ, fed_B, decided_B, every_B)


class Jacobi(JacobiDecoder):
    """`window: fixed` finishes a block of n tokens before the next begins; `running` always keeps n drafts ahead.

    The token after a fully accepted block is the next block's first. If a block ends with the token after the accepted drafts,
    the next block's n drafts run in the same forward that finds its first token, so no forward is spent on that token alone.
    Drafts never extend beyond the canvas, and the last position is never fed, since nothing comes after it. `block_size: auto`
    changes n from step to step (jacobi_size.py), and so where blocks end.

    With tracing, the TraceStep of an iteration holds, as `proposed`, the drafts as they were fed: the first at
    positions[0], the others after it, up to the end of the block (or window, or the position before the canvas's last).
    With `window: fixed` block i is [P + i n, P + (i + 1) n) for a prompt of P tokens. Its state in an iteration is what the
    steps before have committed of it, then `proposed`; the block's first step shows the initial state, and the outcome's
    tokens the fixed point. A canvas of whole blocks and one token more shows every state in full.
    """

    def __init__(self, setup: Setup, settings: JacobiSettings) -> None:
        self.running = settings.window == "running"
        self.sizes = JacobiSizes() if settings.block_size == "auto" else None
        self.block_size = 0 if settings.block_size == "auto" else settings.block_size
        most = MOST_AUTO if settings.block_size == "auto" else settings.block_size
        super().__init__(setup, window=most + 1, max_commit=most + 1)

    def _advance(self, group: Group) -> None:
        # The time of a step with prompts says little about later steps.
        if self.sizes is None or group.fresh or group.joined:
            self._refine(group)
        else:
            self._refine_at_best(group, self.sizes)

    def _refine_at_best(self, group: Group, sizes: JacobiSizes) -> None:
        num_slots, num_kv = len(group.slots), int(self.state.decided_S[group.index_B].sum())
        self.block_size = sizes.choose(num_slots, num_kv)
        num_rows, num_tokens, began_s = self.counting.useful_rows, self.stats.committed, time.perf_counter()
        self._refine(group)
        seconds = time.perf_counter() - began_s
        num_rows, num_tokens = self.counting.useful_rows - num_rows, self.stats.committed - num_tokens
        sizes.observe(num_slots, num_rows, num_kv, tokens=num_tokens, seconds=seconds)

    def _refine(self, group: Group) -> None:
        if not self.block_size:
            self._advance_by_one(group)
            return
        state, slots_B = self.state, group.index_B
        decided_B, start_B = state.decided_S[slots_B], state.cached_S[slots_B]
        end_B = self._end(slots_B)
        hidden_BTD = self._forward(group, end_B)
        ranks_BT = start_B.unsqueeze(1) + torch.arange(hidden_BTD.shape[1], device=state.device) + 1
        asked_BT = (ranks_BT >= decided_B.unsqueeze(1)) & (ranks_BT <= end_B.unsqueeze(1))
        said = self._ask(group, hidden_BTD, ranks_BT, asked_BT)
        fed_B = end_B - decided_B
        offsets_Q = torch.arange(int(fed_B.max()) + 1, device=state.device)
        rows_BQ = ((decided_B - 1 - start_B).unsqueeze(1) + offsets_Q).clamp(max=ranks_BT.shape[1] - 1)
        line_BQ, drafts_BQ = said.tokens_BT.gather(1, rows_BQ), self._tokens_from(slots_B, decided_B, len(offsets_Q))
        accepted_B = leading((line_BQ == drafts_BQ) & (offsets_Q < fed_B.unsqueeze(1)))
        self._put(slots_B, decided_B, line_BQ, offsets_Q <= fed_B.unsqueeze(1))
        log_p_BQ = self._log_p_at(said, rows_BQ, offsets_Q <= accepted_B.unsqueeze(1))
        self._finish(group, line_BQ, accepted_B=accepted_B, log_p_BQ=log_p_BQ, drafts_BQ=drafts_BQ, fed_B=fed_B)
        state.cached_S[slots_B] = decided_B + accepted_B

    def _end(self, slots_B: Tensor) -> Tensor:
        """The column after each slot's last draft."""
        state, n = self.state, self.block_size
        decided_B, prompt_B = state.decided_S[slots_B], state.prompt_S[slots_B]
        if self.running or not n:
            end_B = decided_B + n
        else:
            end_B = prompt_B + ((decided_B - prompt_B) // n + 1) * n
        return torch.minimum(end_B, state.length_S[slots_B] - 1)
