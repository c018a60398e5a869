"""The n-gram pool of rejection recycling: token runs rejected in a sample's Jacobi iterations, and their proposals.

Knows nothing of models or blocks. Every sample has its own pool, which lives in columns of the slot state and moves with it.

Source: pcLLM, section 3.2 (rejection recycling); Fu et al., "Break the sequential dependency of LLM inference using lookahead
decoding", 2024. Legend: P runs, G tokens of a run, C candidates, M drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoders.engine.state import SlotState


class NgramPool:
    """The last `size` different runs of each sample, the most recent first, each of at most `longest` tokens."""

    def __init__(self, state: SlotState, size: int, longest: int) -> None:
        self._runs_SPG = state.column(size, longest)
        self._lengths_SP = state.column(size)
        self._size, self._longest = size, longest

    def push(self, slots_B: Tensor, run_BG: Tensor, lengths_B: Tensor) -> None:
        """Put one run into each slot's pool, cut to `longest` tokens; one that is there already becomes the most recent.

        A run of fewer than two tokens proposes nothing and is left out.
        """
        keep_B = lengths_B >= 2
        if self._size == 0 or not bool(keep_B.any()):
            return
        slots_B, run_BG = slots_B[keep_B], self._fit(run_BG[keep_B])
        lengths_B = lengths_B[keep_B].clamp(max=self._longest)
        run_BG = run_BG * (torch.arange(self._longest, device=run_BG.device) < lengths_B.unsqueeze(1))
        runs_BPG, lengths_BP = self._runs_SPG[slots_B], self._lengths_SP[slots_B]
        same_BP = (runs_BPG == run_BG.unsqueeze(1)).all(2) & (lengths_BP == lengths_B.unsqueeze(1))
        # Runs before the run's old place (or all but the last run) move back by one.
        place_B = torch.where(same_BP.any(1), same_BP.to(torch.int8).argmax(1), self._size - 1)
        places_P = torch.arange(self._size, device=slots_B.device)
        source_BP = places_P - (places_P <= place_B.unsqueeze(1)).to(torch.int64)
        each_B1 = torch.arange(len(slots_B), device=slots_B.device).unsqueeze(1)
        # The run itself is appended, so that -1 finds it.
        runs_BPG = torch.cat([runs_BPG, run_BG.unsqueeze(1)], 1)[each_B1, source_BP]
        lengths_BP = torch.cat([lengths_BP, lengths_B.unsqueeze(1)], 1)[each_B1, source_BP]
        self._runs_SPG[slots_B], self._lengths_SP[slots_B] = runs_BPG, lengths_BP

    def _fit(self, run_BG: Tensor) -> Tensor:
        missing = self._longest - run_BG.shape[1]
        return torch.nn.functional.pad(run_BG, (0, missing)) if missing > 0 else run_BG[:, : self._longest]

    def candidates(
        self, slots_B: Tensor, last_B: Tensor, drafts_BM: Tensor, num_drafts_B: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Return up to `most` different proposals [B, C, M] for what follows the token `last_B`, and their number [B].

        A run proposes the tokens after its first occurrence of `last_B`, cut to the number of drafts or filled up with the
        current drafts. Proposals that equal the drafts themselves are left out.
        """
        proposals_BPM, free_BP = self._proposals(slots_B, last_B, drafts_BM)
        counted_BPM = (torch.arange(drafts_BM.shape[1], device=slots_B.device) < num_drafts_B.unsqueeze(1)).unsqueeze(1)
        free_BP &= ((proposals_BPM != drafts_BM.unsqueeze(1)) & counted_BPM).any(2)
        chosen, found = [], []
        for _ in range(min(most, self._size)):
            # argmax gives the first, which is the most recent.
            index_B11 = free_BP.to(torch.int8).argmax(1).view(-1, 1, 1)
            taken_BM = proposals_BPM.gather(1, index_B11.expand(-1, 1, drafts_BM.shape[1])).squeeze(1)
            chosen.append(taken_BM)
            found.append(free_BP.any(1))
            free_BP &= ((proposals_BPM != taken_BM.unsqueeze(1)) & counted_BPM).any(2)
        return torch.stack(chosen, 1), torch.stack(found, 1).sum(1)

    def _proposals(self, slots_B: Tensor, last_B: Tensor, drafts_BM: Tensor) -> tuple[Tensor, Tensor]:
        runs_BPG, lengths_BP = self._runs_SPG[slots_B], self._lengths_SP[slots_B]
        # A token at the end of a run has nothing after it.
        followed_BPG = torch.arange(self._longest, device=slots_B.device) < lengths_BP.unsqueeze(2) - 1
        hit_BPG = (runs_BPG == last_B.view(-1, 1, 1)) & followed_BPG
        first_BP = hit_BPG.to(torch.int8).argmax(2)
        places_BPM = first_BP.unsqueeze(2) + 1 + torch.arange(drafts_BM.shape[1], device=slots_B.device)
        known_BPM = places_BPM < lengths_BP.unsqueeze(2)
        following_BPM = runs_BPG.gather(2, places_BPM.clamp(max=self._longest - 1))
        return torch.where(known_BPM, following_BPM, drafts_BM.unsqueeze(1)), hit_BPG.any(2)
