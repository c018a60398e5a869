"""`s2d2` with `fused: true`: one forward per round verifies drafts, commits tokens, and drafts for the next round.

Any known proposal is a valid draft. So a round's forward holds, for a slot with n decided tokens and k drafts after them:

    main     n-1 .. n+k     the last decided token and the drafts, each seeing the tokens to its left
    copies   n .. n+k       a mask at the place of each draft and after the last: the prediction at block size 1
    ahead    n+g .. n+g+k   masks that see the first g drafts and each other, as in a drafting forward

The copies verify the drafts and predict one more token: the recovered one, or the bonus after all drafts. The main rows write the
keys and values of the accepted drafts as a causal cache needs them, so no commit is needed. The masks ahead predict the next
drafts. They assume that g drafts are accepted, as many as in the last round. If fewer are accepted, the masks ahead saw rejected
tokens, and so did the copies after the rejected draft; the next drafts then come from these copies. The first forward runs the
prompt without drafts. Models that predict the next token need no copies, since their main rows predict the same tokens.

The text is that of block size 1 (and of `s2d2` over a causal cache that verifies always): token for token under coupled
acceptance and at temperature 0, in distribution under rejection, since drafting and verification use different random numbers.

This goes beyond S2D2 (2026), which spends a separate forward on drafts.

Legend: T places from the first undecided position on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.blocks.decoder import BlockSlots, Revealed
from decoders.blocks.draws import plain_log_p
from decoders.blocks.rows import Stretch, lined_up
from decoders.blocks.settings import S2d2Settings
from decoders.blocks.state import VERIFY
from decoders.blocks.verdicts import DraftsToJudge, Judge
from decoders.draws import noise
from decoders.engine.acceptance import leading
from decoders.engine.setup import Setup
from decoders.engine.state import Group


@dataclass(frozen=True, slots=True)
class FusedWindow:
    """A round: `num_B` drafts after `decided_B` tokens, all but the last few of which are cached; canvases end at `length_B`.

    The masks ahead assume that `guess_B` drafts are accepted.
    """

    slots_B: Tensor
    decided_B: Tensor
    cached_B: Tensor
    num_B: Tensor
    guess_B: Tensor
    length_B: Tensor
    places_T: Tensor

    @property
    def is_draft(self) -> Tensor:
        """Marks the drafts, bool [B, T]."""
        return self.places_T < self.num_B.unsqueeze(1)

    @property
    def is_asked(self) -> Tensor:
        """Marks the places that the verification predicts: the drafts, and the place after the last one, bool [B, T]."""
        return (self.places_T <= self.num_B.unsqueeze(1)) & (self.positions < self.length_B.unsqueeze(1))

    @property
    def positions(self) -> Tensor:
        """The position of every place, [B, T]."""
        return self.decided_B.unsqueeze(1) + self.places_T


class FusedS2d2(BlockSlots):
    """See the module's docstring; a block's size is the number of drafts."""

    rules: S2d2Settings

    def __init__(self, setup: Setup, settings: S2d2Settings) -> None:
        super().__init__(setup, settings, bonus=1)
        state, size = self.state, self.size
        by_ratio = not self.draws.greedy and not self.draws.coupled
        self.judge = Judge(self.draws, self._logits, self._parts, by_ratio, settings.temper)
        self._num_S, self._guess_S, self._tokens_ST = state.column(), state.column(), state.column(size + 1)
        self._sure_ST = state.column(size + 1, dtype=torch.float64)
        self._hidden_STD = state.column(size + 1, self.backbone.width if by_ratio else 0, dtype=self.backbone.dtype)

    def columns(self, length: int) -> int:
        return length + 3 * (self.size + 1)

    # ---- one forward ---------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        window = self._window(group.index_B)
        self._begin(window)
        stretches = [self._main(window), self._ahead(window), self._copies(window)]
        hidden_BTD = self.counting.forward(lined_up(window.slots_B, stretches), group.slots)
        main_BTD, ahead_BTD, copies_BTD = hidden_BTD.split([one.valid_BT.shape[1] for one in stretches], 1)
        says_BTD = self._says(window, main_BTD, copies_BTD)
        tokens_BT, log_p_BT, accepted_B = self._judged(window, says_BTD)
        counts_B = torch.minimum(accepted_B + 1, window.is_asked.sum(1))
        self.state.proposed_S[window.slots_B] += window.num_B
        self.state.accepted_S[window.slots_B] += accepted_B
        drafts_BT = self._tokens_ST[window.slots_B]
        places_BT = window.places_T.expand_as(tokens_BT)
        self._reveal(group, Revealed(places_BT, tokens_BT, log_p_BT, counts_B, drafts_BT, window.num_B))
        self._propose(window, accepted_B, tokens_BT, says_BTD, ahead_BTD)
        self.state.cached_S[window.slots_B] = window.decided_B + counts_B - 1
        self.blocks.done_S[window.slots_B] = self._ended(window.slots_B, counts_B > 0)

    def _window(self, slots_B: Tensor) -> FusedWindow:
        state = self.state
        places_T = torch.arange(self.size + 1, device=state.device)
        return FusedWindow(
            slots_B=slots_B,
            decided_B=state.decided_S[slots_B],
            cached_B=state.cached_S[slots_B],
            num_B=self._num_S[slots_B],
            guess_B=torch.minimum(self._guess_S[slots_B], self._num_S[slots_B]),
            length_B=state.length_S[slots_B],
            places_T=places_T,
        )

    def _begin(self, window: FusedWindow) -> None:
        blocks, slots_B = self.blocks, window.slots_B
        blocks.nfe_SK[slots_B, blocks.phase_S[slots_B]] += 1
        blocks.phase_S[slots_B] = VERIFY
        blocks.drafts_S[slots_B] += 1
        blocks.start_S[slots_B] = window.decided_B
        blocks.end_S[slots_B] = torch.minimum(window.decided_B + self.size + 1, window.length_B)

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _main(self, window: FusedWindow) -> Stretch:
        ends_B = window.decided_B + window.num_B
        offsets_T = torch.arange(max(int((ends_B - window.cached_B).max()), 1), device=ends_B.device)
        positions_BT = window.cached_B.unsqueeze(1) + offsets_T
        slots_BT = window.slots_B.unsqueeze(1).expand_as(positions_BT)
        place_BT = positions_BT - window.decided_B.unsqueeze(1)
        drafts_BT = self._tokens_ST[slots_BT, place_BT.clamp(min=0, max=self.size)]
        last = self.state.tokens_SW.shape[1] - 1
        decided_BT = self.state.tokens_SW[slots_BT, positions_BT.clamp(max=last)]
        tokens_BT = torch.where(place_BT >= 0, drafts_BT, decided_BT)
        valid_BT = positions_BT < ends_B.unsqueeze(1)
        return Stretch(tokens_BT, positions_BT, positions_BT, positions_BT + 1, valid_BT)

    def _ahead(self, window: FusedWindow) -> Stretch:
        positions_BT = (window.decided_B + window.guess_B).unsqueeze(1) + window.places_T
        columns_BT = window.positions + 2 * (self.size + 1)
        limits_BT = (window.decided_B + window.guess_B).unsqueeze(1).expand_as(positions_BT)
        valid_BT = positions_BT < window.length_B.unsqueeze(1)
        masks_BT = torch.full_like(positions_BT, self.mask_id)
        return Stretch(masks_BT, positions_BT, columns_BT, limits_BT, valid_BT, together=True)

    def _copies(self, window: FusedWindow) -> Stretch:
        positions_BT = window.positions
        columns_BT = positions_BT + self.size + 1
        copied_BT = window.is_asked & (positions_BT < 1) if self.info.shift else window.is_asked
        masks_BT = torch.full_like(positions_BT, self.mask_id)
        return Stretch(masks_BT, positions_BT, columns_BT, positions_BT, copied_BT)

    def _says(self, window: FusedWindow, main_BTD: Tensor, copies_BTD: Tensor) -> Tensor:
        """The rows that predict the token of each place, [B, T, D]; junk at places that were not asked for."""
        if not self.info.shift:
            return copies_BTD
        rows_BT = window.positions - 1 - window.cached_B.unsqueeze(1)
        own_BTD = _rows(main_BTD, rows_BT)
        return torch.where((window.positions < 1).unsqueeze(2), copies_BTD, own_BTD)

    # ---- judging -------------------------------------------------------------------------------------------------

    def _judged(self, window: FusedWindow, says_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The verified tokens and their log-probabilities, [B, T] each, and how many drafts are accepted, [B]."""
        asked_BT, is_draft_BT = window.is_asked, window.is_draft
        slots_BT = window.slots_B.unsqueeze(1).expand_as(asked_BT)
        drafts = DraftsToJudge(
            slots_BT[asked_BT],
            window.positions[asked_BT],
            self._tokens_ST[slots_BT, window.places_T][asked_BT],
            self._sure_ST[slots_BT, window.places_T][asked_BT],
            says_BTD[asked_BT],
        )
        verdict = self.judge.judge(drafts)
        self.stats.verified += len(verdict.tokens_R)
        passed_BT = torch.zeros_like(asked_BT).masked_scatter(asked_BT, verdict.passed_R)
        accepted_B = leading(passed_BT & is_draft_BT)
        tokens_R, log_p_R = verdict.tokens_R, verdict.log_p_R
        if self.judge.by_ratio:
            last_BT = asked_BT & (window.places_T == accepted_B.unsqueeze(1))
            tokens_R, log_p_R = self._drawn_last(drafts, tokens_R, log_p_R, last_BT[asked_BT], is_draft_BT[asked_BT])
        tokens_BT = torch.zeros_like(window.positions).masked_scatter(asked_BT, tokens_R)
        return (
            tokens_BT,
            torch.zeros_like(says_BTD[..., 0], dtype=torch.float64).masked_scatter(asked_BT, log_p_R),
            accepted_B,
        )

    def _drawn_last(
        self, drafts: DraftsToJudge, tokens_R: Tensor, log_p_R: Tensor, last_R: Tensor, is_draft_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By ratio, with the token after the accepted drafts: recovered if a draft was rejected, else the bonus."""
        for chosen_R, draw in ((last_R & is_draft_R, self._recover), (last_R & ~is_draft_R, self._bonus)):
            if bool(chosen_R.any()):
                found = draw(drafts.part(chosen_R))
                tokens_R, log_p_R = (
                    old_R.masked_scatter(chosen_R, new_R)
                    for old_R, new_R in zip((tokens_R, log_p_R), found, strict=True)
                )
        return tokens_R, log_p_R

    def _recover(self, refused: DraftsToJudge) -> tuple[Tensor, Tensor]:
        places_R = refused.positions_R - self.state.decided_S[refused.slots_R]
        return self.judge.recover(refused, self._hidden_STD[refused.slots_R, places_R])

    def _bonus(self, beyond: DraftsToJudge) -> tuple[Tensor, Tensor]:
        logits_RV = self._logits(beyond.hidden_RD)
        tokens_R = self.draws.draw(self.draws.law(logits_RV), beyond.slots_R, beyond.positions_R, noise.BONUS)
        return tokens_R, plain_log_p(logits_RV, tokens_R)

    # ---- the next drafts -----------------------------------------------------------------------------------------

    def _propose(
        self, window: FusedWindow, accepted_B: Tensor, tokens_BT: Tensor, says_BTD: Tensor, ahead_BTD: Tensor
    ) -> None:
        """Take the next round's drafts from this round's predictions."""
        slots_B, size = window.slots_B, self.size
        places_BT = accepted_B.unsqueeze(1) + 1 + torch.arange(size, device=slots_B.device)
        positions_BT = window.decided_B.unsqueeze(1) + places_BT
        said_BT = (accepted_B < window.guess_B).unsqueeze(1) & (places_BT <= window.num_B.unsqueeze(1))
        ahead_BT = places_BT - window.guess_B.unsqueeze(1)
        wanted_BT = (positions_BT < window.length_B.unsqueeze(1)) & (ahead_BT <= size)
        hidden_BTD = torch.where(
            said_BT.unsqueeze(2), _rows(says_BTD, places_BT), _rows(ahead_BTD, ahead_BT - self.info.shift)
        )
        # Tokens of a coupled verification are drawn already.
        next_BT = tokens_BT.gather(1, places_BT.clamp(max=size))
        open_BT = wanted_BT if self.judge.by_ratio else wanted_BT & ~said_BT
        slots_BT = slots_B.unsqueeze(1).expand_as(open_BT)
        tokens_R, sure_R = self._draft(slots_BT[open_BT], positions_BT[open_BT], hidden_BTD[open_BT])
        self._tokens_ST[slots_B, :size] = next_BT.masked_scatter(open_BT, tokens_R)
        self._num_S[slots_B], self._guess_S[slots_B] = wanted_BT.sum(1), accepted_B
        if self.judge.by_ratio:
            sure_BT = torch.ones_like(next_BT, dtype=torch.float64)
            self._sure_ST[slots_B, :size] = sure_BT.masked_scatter(open_BT, sure_R)
            self._hidden_STD[slots_B, :size] = hidden_BTD

    def _draft(self, slots_R: Tensor, positions_R: Tensor, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Draw drafts; return their log-probabilities, too."""
        tokens, sure = [positions_R[:0]], [torch.zeros(0, dtype=torch.float64, device=positions_R.device)]
        for part in self._parts(len(hidden_RD)):
            law_RV = self.draws.law(self._logits(hidden_RD[part]))
            tokens.append(self.draws.draw(law_RV, slots_R[part], positions_R[part], noise.DRAFT))
            sure.append(law_RV.gather(-1, tokens[-1].unsqueeze(-1)).squeeze(-1).to(torch.float64).exp())
        return torch.cat(tokens), torch.cat(sure)


def _rows(hidden_BTD: Tensor, rows_BT: Tensor) -> Tensor:
    """Some rows of each slot, [B, T, D]; out of range is junk."""
    index_BT = rows_BT.clamp(min=0, max=hidden_BTD.shape[1] - 1)
    return hidden_BTD.gather(1, index_BT.unsqueeze(2).expand(-1, -1, hidden_BTD.shape[2]))
