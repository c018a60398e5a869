"""How a verification accepts drafted tokens: by the target's own tokens, or by the ratio p/q.

p is the distribution of the verification, q that of the draft. Coupled, and at temperature 0: a draft passes if it equals the
token drawn from p with the position's noise; that token is committed. By ratio: a draft passes with probability
min(1, (p/q)^temper); the replacement of a rejected one is drawn from the positive part of p - q, or from p if that has no mass.
The caller checks that all drafts to the left have passed. Knows nothing of phases and of models.

Source: S2D2 (2026), Algorithm 3; Leviathan et al., 2023. Legend: R drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.blocks.draws import Draws, plain_log_p
from decoders.draws import noise
from decoders.draws.sampling import residual

ToLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DraftsToJudge:
    """Drafts to verify: their places, their probabilities under the draft, and the verification's row for each."""

    slots_R: Tensor
    positions_R: Tensor
    tokens_R: Tensor
    sure_R: Tensor
    hidden_RD: Tensor

    def part(self, keep: slice | Tensor) -> DraftsToJudge:
        """Some of them."""
        return DraftsToJudge(*(getattr(self, name)[keep] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class SpanVerdict:
    """Which drafts pass; the token to commit if all to the left passed, and its log-probability under the model itself, [R] each.

    By ratio, the token that replaces a failed draft is not drawn yet.
    """

    passed_R: Tensor
    tokens_R: Tensor
    log_p_R: Tensor


@dataclass(frozen=True, slots=True)
class Judge:
    """One rule for all drafts of a decoder; `logits` gives suppressed logits, `chunks` cuts rows into parts that fit memory."""

    draws: Draws
    logits: ToLogits
    chunks: Callable[[int], Iterator[slice]]
    by_ratio: bool
    temper: float

    def judge(self, drafts: DraftsToJudge) -> SpanVerdict:
        """Judge every draft as if all drafts to its left had passed."""
        rule = self._by_ratio if self.by_ratio else self._by_token
        parts = [rule(drafts.part(part)) for part in self.chunks(len(drafts.tokens_R))]
        passed, tokens, log_p = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("passed_R", "tokens_R", "log_p_R")
        )
        return SpanVerdict(passed, tokens, log_p)

    def _by_token(self, drafts: DraftsToJudge) -> SpanVerdict:
        logits_RV = self.logits(drafts.hidden_RD)
        law_RV = self.draws.law(logits_RV)
        tokens_R = self.draws.draw(law_RV, drafts.slots_R, drafts.positions_R, noise.BONUS)
        return SpanVerdict(tokens_R == drafts.tokens_R, tokens_R, plain_log_p(logits_RV, tokens_R))

    def _by_ratio(self, drafts: DraftsToJudge) -> SpanVerdict:
        logits_RV = self.logits(drafts.hidden_RD)
        p_RV = self._law(logits_RV)
        log_p_R = p_RV.gather(-1, drafts.tokens_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        ratio_R = (self.temper * (log_p_R - drafts.sure_R.log())).exp()
        passed_R = self.draws.accepting(drafts.slots_R, drafts.positions_R) < ratio_R
        return SpanVerdict(passed_R, drafts.tokens_R, plain_log_p(logits_RV, drafts.tokens_R))

    def recover(self, refused: DraftsToJudge, q_hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Draw replacements for rejected drafts, drafted in the rows `q_hidden_RD`; returns tokens and log-probabilities."""
        logits_RV = self.logits(refused.hidden_RD)
        mass_RV = residual(self._law(logits_RV), self.draws.law(self.logits(q_hidden_RD)))
        tokens_R = self.draws.recover(mass_RV, refused.slots_R, refused.positions_R)
        return tokens_R, plain_log_p(logits_RV, tokens_R)

    def _law(self, logits_RV: Tensor) -> Tensor:
        return self.draws.warm_law(logits_RV, self.draws.law(logits_RV))
