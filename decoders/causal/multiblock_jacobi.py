"""`multiblock_jacobi`: Jacobi decoding of several blocks at once, with candidates from rejected drafts.

The undecided columns are cut into blocks of n. The first one not finished is *real-active*: only its tokens are committed. Up
to K - 1 *pseudo-active* blocks after it are refined on top of its drafts; tokens that no longer change are accepted
provisionally, held fixed, and verified again when the block is promoted. The newest block having ceil(r n) accepted tokens,
the next one opens. Candidates for the rest of the real-active block, from the sample's n-gram pool, are verified in the same
forward: at the same positions, in separate columns after the chain, with the decided prefix shared through visibility.

    columns     .. D-1 | D .. e-1      e .. e+n-1 ..  end-1 | end .. end+m-1  end+m ..
    hold        decided| real-active   pseudo-active        | candidate 1     candidate 2
    positions   the column itself                           | D .. e-1        D .. e-1
    sees        all columns up to itself                    | columns < D, and its own candidate up to itself

The chain of blocks is one run of drafts, so acceptance continues into the promoted block within the same forward that finished
the block before it. If a candidate wins, its tokens are committed. Their keys and values are in its columns, so the next forward
runs those tokens again in their own columns; this costs rows, not forwards.

Details that the paper leaves open: a pseudo-active block's first token is compared with the prediction of the last row before
the block; a new block starts with that row's token and then context tokens, not with a shifted copy of the real-active drafts.

Source: pcLLM, Algorithm 1 and section 3.2. Legend: Q columns from D on, C candidates,
M drafts of the real-active block, N = n, K blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.backbones.base import TokenRows
from decoders.base import Request
from decoders.causal.jacobi import JacobiDecoder, TargetTokens
from decoders.causal.ngram_pool import NgramPool
from decoders.causal.settings import MultiblockJacobiSettings
from decoders.engine.acceptance import leading
from decoders.engine.setup import Setup
from decoders.engine.state import Group


@dataclass(frozen=True, slots=True)
class _Window:
    """What one forward runs for each slot: columns [start, end) and `num_candidates_B` candidates of `num_drafts_B` tokens."""

    start_B: Tensor
    decided_B: Tensor
    end_B: Tensor
    num_own_B: Tensor
    """Number of rows in their own columns."""
    num_drafts_B: Tensor
    """Drafts of the real-active block."""
    drafts_BQ: Tensor
    """The tokens in the columns from `decided_B` on."""
    candidates_BCM: Tensor
    num_candidates_B: Tensor


@dataclass(frozen=True, slots=True)
class _Line:
    """The tokens from D on under one proposal, the rows that predict them, and how many drafts are accepted."""

    tokens_BQ: Tensor
    rows_BQ: Tensor
    accepted_B: Tensor


class MultiblockJacobi(JacobiDecoder):
    """K blocks, spawn ratio r, `verify_size` proposals for the real-active block (its drafts are one) and a pool of n-grams.

    `proposed` counts the drafts of the chain, not those of the candidates. A TraceStep shows the chain as `jacobi` shows its
    block: the drafts of the real-active block, then those of the pseudo-active blocks (accepted tokens and drafts alike).
    """

    # Look-ups in a new sample's empty pool would be counted.
    joins_prompts = False

    def __init__(self, setup: Setup, settings: MultiblockJacobiSettings) -> None:
        self.block_size, self.blocks = settings.block_size, settings.blocks
        self.spawn_at = math.ceil(settings.spawn_ratio * settings.block_size)
        longest = self.block_size * self.blocks
        super().__init__(setup, window=longest + 1, max_commit=longest + 1)
        self.most_candidates = settings.verify_size - 1 if settings.pool_size else 0
        self._pool = NgramPool(self.state, settings.pool_size, longest)
        # Blocks opened so far, and the provisionally accepted tokens of block b at [b % K].
        self._opened_S = self.state.column()
        self._held_SK = self.state.column(self.blocks)

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        self._opened_S[slot] = 1

    def columns(self, length: int) -> int:
        # Candidates come after the chain.
        return length + self.most_candidates * self.block_size

    def _advance(self, group: Group) -> None:
        state, slots_B = self.state, group.index_B
        window = self._window(group)
        said = self._run(group, window)
        chain = self._chain(window, said)
        best = self._best(window, said, chain)
        active_B, held_BQ = self._active(slots_B), self._held(slots_B, window)
        fed_B = window.end_B - window.decided_B
        self._put(slots_B, window.decided_B, best.tokens_BQ, self._up_to(fed_B, best) & ~held_BQ)
        log_p_BQ = self._log_p_at(said, best.rows_BQ, self._up_to(best.accepted_B, best))
        drafts_BQ = window.drafts_BQ
        self._finish(
            group, best.tokens_BQ, accepted_B=best.accepted_B, log_p_BQ=log_p_BQ, drafts_BQ=drafts_BQ, fed_B=fed_B
        )
        # Beyond the chain's accepted drafts its columns hold the states of other tokens.
        state.cached_S[slots_B] = window.decided_B + chain.accepted_B
        self._recycle(slots_B, window, active_B)
        self._hold(slots_B, window, chain)
        self._open(slots_B)

    # ---- the forward ---------------------------------------------------------------------------------------------

    def _window(self, group: Group) -> _Window:
        state, slots_B, n = self.state, group.index_B, self.block_size
        decided_B, prompt_B = state.decided_S[slots_B], state.prompt_S[slots_B]
        last_B = state.length_S[slots_B] - 1
        end_B = torch.minimum(prompt_B + self._opened_S[slots_B] * n, last_B)
        active_end_B = torch.minimum(prompt_B + (self._active(slots_B) + 1) * n, last_B)
        drafts_BQ = self._tokens_from(slots_B, decided_B, int((end_B - decided_B).max()) + 1)
        num_drafts_B = active_end_B - decided_B
        candidates_BCM = torch.zeros(len(slots_B), 0, 0, dtype=torch.int64, device=state.device)
        num_candidates_B = torch.zeros_like(decided_B)
        # A new sample's pool is empty.
        if self.most_candidates and not group.fresh:
            before_B = self._tokens_from(slots_B, decided_B - 1, 1)[:, 0]
            active_BM = drafts_BQ[:, : int(num_drafts_B.max())]
            candidates_BCM, num_candidates_B = self._pool.candidates(
                slots_B, before_B, active_BM, num_drafts_B, self.most_candidates
            )
            state.lookups_S[slots_B] += 1
        start_B = state.cached_S[slots_B]
        return _Window(
            start_B=start_B,
            decided_B=decided_B,
            end_B=end_B,
            num_own_B=end_B - start_B,
            num_drafts_B=num_drafts_B,
            drafts_BQ=drafts_BQ,
            candidates_BCM=candidates_BCM,
            num_candidates_B=num_candidates_B,
        )

    def _active(self, slots_B: Tensor) -> Tensor:
        """The number of each slot's real-active block."""
        return (self.state.decided_S[slots_B] - self.state.prompt_S[slots_B]) // self.block_size

    def _run(self, group: Group, window: _Window) -> TargetTokens:
        """One forward over the chain and the candidates, whose columns follow the chain's without a gap."""
        state, slots_B = self.state, group.index_B
        start_B1, decided_B1 = window.start_B.unsqueeze(1), window.decided_B.unsqueeze(1)
        num_rows_B = window.num_own_B + window.num_candidates_B * window.num_drafts_B
        offsets_T = torch.arange(int(num_rows_B.max()), device=state.device)
        valid_BT = offsets_T < num_rows_B.unsqueeze(1)
        columns_BT = torch.where(valid_BT, start_B1 + offsets_T, 0)
        side_BT = offsets_T - window.num_own_B.unsqueeze(1)
        beside_BT = (side_BT >= 0) & valid_BT
        lengths_B1 = window.num_drafts_B.clamp(min=1).unsqueeze(1)
        step_BT = torch.where(beside_BT, side_BT % lengths_B1, 0)
        positions_BT = torch.where(beside_BT, decided_B1 + step_BT, columns_BT)
        # One lookup serves both kinds of rows: the candidates' tokens are appended to the slot's.
        known_BX = torch.cat([state.tokens_SW[slots_B], window.candidates_BCM.flatten(1)], 1)
        place_BT = side_BT // lengths_B1 * window.candidates_BCM.shape[2] + step_BT + state.tokens_SW.shape[1]
        columns_W = torch.arange(int((window.start_B + num_rows_B).max()), device=state.device)
        own_BTW = (columns_W >= (columns_BT - step_BT).unsqueeze(2)) & (columns_W <= columns_BT.unsqueeze(2))
        rows = TokenRows(
            slots_B=slots_B,
            tokens_BT=known_BX.gather(1, torch.where(beside_BT, place_BT, columns_BT)),
            positions_BT=positions_BT,
            columns_BT=columns_BT,
            valid_BT=valid_BT,
            visible_BTW=own_BTW | (columns_W < torch.where(beside_BT, decided_B1, columns_BT).unsqueeze(2)),
        )
        hidden_BTD = self.counting.forward(rows, group.slots)
        asked_BT = valid_BT & (positions_BT >= decided_B1 - 1)
        return self._ask(group, hidden_BTD, positions_BT + 1, asked_BT)

    # ---- its predictions -----------------------------------------------------------------------------------------

    def _up_to(self, last_B: Tensor, line: _Line) -> Tensor:
        """Mark the columns D .. D + last, [B, Q]."""
        return torch.arange(line.rows_BQ.shape[1], device=last_B.device) <= last_B.unsqueeze(1)

    def _chain(self, window: _Window, said: TargetTokens) -> _Line:
        """The predictions of the rows in their own columns for the columns from D on."""
        fed_B1 = (window.end_B - window.decided_B).unsqueeze(1)
        offsets_Q = torch.arange(window.drafts_BQ.shape[1], device=fed_B1.device)
        rows_BQ = (window.decided_B - 1 - window.start_B).unsqueeze(1) + torch.minimum(offsets_Q, fed_B1)
        tokens_BQ = said.tokens_BT.gather(1, rows_BQ)
        return _Line(tokens_BQ, rows_BQ, leading((tokens_BQ == window.drafts_BQ) & (offsets_Q < fed_B1)))

    def _best(self, window: _Window, said: TargetTokens, chain: _Line) -> _Line:
        """The line of the proposal with the most accepted tokens: the chain's own drafts, or the first of the best candidates.

        After the real-active block the line follows the chain.
        """
        num, length = window.candidates_BCM.shape[1:]
        if not num:
            return chain
        drafts_B11 = window.num_drafts_B.view(-1, 1, 1)
        numbers_C1 = torch.arange(num, device=drafts_B11.device).unsqueeze(1)
        steps_M = torch.arange(length, device=drafts_B11.device)
        # The row of a candidate's draft predicts the next one; the last decided token's row predicts the first.
        behind_BCM = window.num_own_B.view(-1, 1, 1) + numbers_C1 * drafts_B11 + steps_M - 1
        rows_BCM = torch.where(steps_M == 0, chain.rows_BQ[:, :1].unsqueeze(1), behind_BCM)
        rows_BCM = rows_BCM.clamp(max=said.tokens_BT.shape[1] - 1)
        tokens_BCM = said.tokens_BT.gather(1, rows_BCM.flatten(1)).view_as(rows_BCM)
        right_BCM = (tokens_BCM == window.candidates_BCM) & (steps_M < drafts_B11)
        accepted_BC = leading(right_BCM.flatten(0, 1)).view(-1, num)
        accepted_BC = torch.where(window.num_candidates_B.unsqueeze(1) > numbers_C1.T, accepted_BC, -1)
        # argmax gives the first maximum, so the chain wins ties.
        accepted_B, best_B = torch.cat([chain.accepted_B.unsqueeze(1), accepted_BC], 1).max(1)
        offsets_Q = torch.arange(chain.rows_BQ.shape[1], device=drafts_B11.device)
        other_BQ = (best_B > 0).unsqueeze(1) & (offsets_Q > 0) & (offsets_Q <= window.num_drafts_B.unsqueeze(1))
        first_B = window.num_own_B + (best_B - 1) * window.num_drafts_B - 1
        rows_BQ = torch.where(other_BQ, first_B.unsqueeze(1) + offsets_Q, chain.rows_BQ)
        return _Line(said.tokens_BT.gather(1, rows_BQ), rows_BQ, accepted_B)

    # ---- the blocks ----------------------------------------------------------------------------------------------

    def _recycle(self, slots_B: Tensor, window: _Window, active_B: Tensor) -> None:
        """Push the text of the block that was real-active: its committed tokens and the rejected ones after them.

        The rejected tail is the next iterate, so each time both are one run; the pool keeps the latest runs.
        """
        if self.most_candidates:
            first_B = self.state.prompt_S[slots_B] + active_B * self.block_size
            lengths_B = window.end_B + 1 - first_B
            self._pool.push(slots_B, self._tokens_from(slots_B, first_B, int(lengths_B.max())), lengths_B)

    def _held(self, slots_B: Tensor, window: _Window) -> Tensor:
        """Mark the provisionally accepted tokens of the pseudo-active blocks, [B, Q]: they wait for their promotion."""
        generated_B = window.decided_B - self.state.prompt_S[slots_B]
        places_BQ = generated_B.unsqueeze(1) + torch.arange(window.drafts_BQ.shape[1], device=slots_B.device)
        blocks_BQ = places_BQ // self.block_size
        pseudo_BQ = (blocks_BQ > self._active(slots_B).unsqueeze(1)) & (
            blocks_BQ < self._opened_S[slots_B].unsqueeze(1)
        )
        return pseudo_BQ & (places_BQ % self.block_size < self._held_SK[slots_B].gather(1, blocks_BQ % self.blocks))

    def _hold(self, slots_B: Tensor, window: _Window, chain: _Line) -> None:
        """In every pseudo-active block, accept provisionally the drafts that equal the predictions of the chain's rows."""
        state, n = self.state, self.block_size
        blocks_BK = (self._active(slots_B) + 1).unsqueeze(1) + torch.arange(self.blocks - 1, device=slots_B.device)
        pseudo_BK = blocks_BK < self._opened_S[slots_B].unsqueeze(1)
        if not bool(pseudo_BK.any()):
            return
        steps_N = torch.arange(n, device=slots_B.device)
        first_BK = state.prompt_S[slots_B].unsqueeze(1) + blocks_BK * n - window.decided_B.unsqueeze(1)
        places_BKN = first_BK.unsqueeze(2) + steps_N
        same_BQ = (chain.tokens_BQ == window.drafts_BQ) & self._up_to(window.end_B - window.decided_B, chain)
        places = places_BKN.flatten(1).clamp(max=same_BQ.shape[1] - 1)
        same_BKN = same_BQ.gather(1, places).view_as(places_BKN) & (places_BKN < same_BQ.shape[1])
        held_BK = self._held_SK[slots_B].gather(1, blocks_BK % self.blocks)
        count_BK = leading((same_BKN | (steps_N < held_BK.unsqueeze(2))).flatten(0, 1)).view_as(held_BK)
        which_BK = slots_B.unsqueeze(1).expand_as(pseudo_BK)
        self._held_SK[which_BK[pseudo_BK], (blocks_BK % self.blocks)[pseudo_BK]] = count_BK[pseudo_BK]

    def _open(self, slots_B: Tensor) -> None:
        """Open the next block where the newest has enough accepted tokens; the real-active one is always open."""
        state, active_B = self.state, self._active(slots_B)
        opened_B = torch.maximum(self._opened_S[slots_B], active_B + 1)
        newest_B = opened_B - 1
        committed_B = state.decided_S[slots_B] - state.prompt_S[slots_B] - active_B * self.block_size
        held_B = self._held_SK[slots_B].gather(1, (newest_B % self.blocks).unsqueeze(1)).squeeze(1)
        accepted_B = torch.where(newest_B == active_B, committed_B, held_B)
        spawn_B = (accepted_B >= self.spawn_at) & (opened_B - active_B < self.blocks)
        self._held_SK[slots_B[spawn_B], (opened_B % self.blocks)[spawn_B]] = 0
        self._opened_S[slots_B] = opened_B + spawn_B.to(torch.int64)
