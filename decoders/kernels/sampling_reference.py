"""From logits to tokens and what decoders want to know of each row, in torch: what sampling.py must give, and what runs on CPUs.

    top1      the token's probability
    margin    the largest probability less the second largest
    entropy   in nats
    squares   the sum of squared probabilities
    scores    the logarithm of the summed exponentials of the raw logits of all ids but `mask_id`, suppressed ones too

The first four are of the model's own distribution, or, if `warped`, of the one that the token was drawn from; in rows of
temperature 0 this is the model's own. The draws and warps are those of decoders/draws.

Legend: R rows, V vocabulary, F wanted notes, A draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.sampling import log_law, log_laws, nucleus_draw

Wanted = Literal["top1", "margin", "entropy", "squares", "scores"]
WANTED: Final[tuple[Wanted, ...]] = ("top1", "margin", "entropy", "squares", "scores")


@dataclass(frozen=True, slots=True)
class Warp:
    """How each row's distribution is changed: by the job's settings, or by settings of its own, and by what it knows of its text.

    `job` are the job's settings. `own_4R` are temperature (0 takes the maximum), top-p (1 or more cuts nothing), min-p and top-k
    (0: they cut nothing) of each row, float64; None where all rows have the job's. Kernels need the first two. A row has the same
    bits either way. `cuts` says whether any row has a top-p below 1, `has_min_p` whether any has a min-p, `most_k` is the largest
    top-k, where rows have other ones than the job, else 0. `suppressed` are ids that are never generated; `suppressed_V` marks
    them.

    A logit x of the token `token_ER` becomes penalty(x + before) + after, by `change_3ER` (before, factor, after): a penalty
    divides what is positive by the factor, and multiplies what is negative. A token that a row names twice has one change.
    Where a row may not draw every token, which `limited_R1` marks, `floor_RV` is -inf for those that it may not, else 0. Both are
    no matter of the model's own distribution.
    """

    job: Sampling
    own_4R: Tensor | None
    cuts: bool
    suppressed: Tensor
    suppressed_V: Tensor
    has_min_p: bool = False
    most_k: int = 0
    token_ER: Tensor | None = None
    change_3ER: Tensor | None = None
    floor_RV: Tensor | None = None
    limited_R1: Tensor | None = None

    @property
    def greedy(self) -> bool:
        """Whether every row takes the maximum."""
        return self.own_4R is None and self.job.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether every distribution is the model's own, but for top-p."""
        usual = self.job.temperature == 1.0 and self.job.top_k is None and not self.job.min_p
        return self.is_whole and self.own_4R is None and usual

    @property
    def is_whole(self) -> bool:
        """Whether every row draws from the model's logits as they are."""
        return self.floor_RV is None and self.token_ER is None

    @property
    def fits_kernels(self) -> bool:
        """Whether kernels know all that is asked for."""
        return self.is_whole and not self.has_min_p and not self.most_k

    @property
    def for_kernels(self) -> Warp:
        """The same for the rows that kernels know."""
        return Warp(self.job, self.own_4R, self.cuts, self.suppressed, self.suppressed_V)

    @property
    def unknown_R(self) -> Tensor:  # noqa: N802 - a tensor is named with its axes
        """Which rows kernels do not know, [R]."""
        assert self.own_4R is not None, "kernels get each row's settings"
        unknown_R = (self.own_4R[2] > 0) | (self.own_4R[3] != (self.job.top_k or 0))
        return unknown_R if self.is_whole else unknown_R | self.shaped_R1.squeeze(1)

    @property
    def shaped_R1(self) -> Tensor:  # noqa: N802 - a tensor is named with its axes
        """Which rows draw from other logits than the model's, [R, 1]."""
        if self.change_3ER is None:
            assert self.limited_R1 is not None, "a warp of rows with constraints or penalties"
            return self.limited_R1
        before_ER, factor_ER, after_ER = self.change_3ER
        changed_R1 = ((before_ER != 0) | (factor_ER != 1) | (after_ER != 0)).any(0).unsqueeze(1)
        return changed_R1 if self.limited_R1 is None else changed_R1 | self.limited_R1

    def shape(self, logits_RV: Tensor) -> Tensor:
        """The logits that rows draw from."""
        if self.token_ER is not None and self.change_3ER is not None:
            token_RE, change_3RE = self.token_ER.T, self.change_3ER.transpose(1, 2).to(logits_RV.dtype)
            logit_RE = logits_RV.gather(1, token_RE) + change_3RE[0]
            logit_RE = torch.where(logit_RE < 0, logit_RE * change_3RE[1], logit_RE / change_3RE[1]) + change_3RE[2]
            logits_RV = logits_RV.scatter(1, token_RE, logit_RE)
        return logits_RV if self.floor_RV is None else logits_RV + self.floor_RV

    def suppress(self, logits_RV: Tensor) -> Tensor:
        """Make ids that are never generated impossible, in place."""
        return logits_RV.index_fill_(-1, self.suppressed, -torch.inf) if len(self.suppressed) else logits_RV

    def law(self, logits_RV: Tensor, *, cut: bool) -> Tensor:
        """The log-probabilities of suppressed logits, [R, V], of what rows may draw; `cut` to their nuclei or not (`log_law`)."""
        return self.law_of(self.shape(logits_RV), cut=cut)

    def law_of(self, logits_RV: Tensor, *, cut: bool) -> Tensor:
        """The same of logits that were shaped."""
        if self.own_4R is None:
            return log_law(logits_RV, self.job, cut=cut)
        temperature_R1, top_p_R1, min_p_R1, own_k_R1 = self.own_4R.unsqueeze(2)
        return log_laws(
            logits_RV,
            temperature_R1,
            top_k=self.most_k or self.job.top_k,
            top_p_R1=top_p_R1 if self.cuts else None,
            own_k_R1=own_k_R1 if self.most_k else None,
            min_p_R1=min_p_R1 if self.has_min_p else None,
            cut=cut,
        )

    def draw(self, uncut_RV: Tensor, gumbel_RV: Tensor) -> Tensor:
        """The token of each row by its noise, [R], from a distribution that is not cut to its nucleus yet."""
        if self.own_4R is None:
            return nucleus_draw(uncut_RV, gumbel_RV, self.job.top_p if self.cuts else None)
        return nucleus_draw(uncut_RV, gumbel_RV, self.own_4R[1].unsqueeze(1) if self.cuts else None)


def sample(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Wanted] = (),
    warped: bool = False,
    draw_R: Tensor | None = None,
    scored_R: Tensor | None = None,
    mask_id: int = -1,
    ahead: int = 0,
    gumbel: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """Each row's token by the noise of its key and position, its log-probability under the model itself, and the wanted notes.

    float64 [1 + ahead, 2 + F, R]: of the draw `draw_R` (int64, by default 0), and of so many after it. `key_R2` are the words of
    noise.key_words. Where `scored_R` names a token (0 or more), the log-probability is that one's. `gumbel` gives the noise of
    the draw so many ahead, [R, V], where a caller keeps it; kernels compute their own.

    Where notes are wanted, the model's own distribution is computed in float64, but for the log-probabilities of warped rows. A
    row has the same bits whatever its neighbours' settings are. Suppressed ids are made impossible in `logits_RV` itself.
    """
    scores_R = _log_scores(logits_RV, mask_id) if "scores" in wanted else None
    logits_RV = warp.suppress(logits_RV)
    own_RV = None if warp.is_whole else torch.log_softmax(logits_RV, dim=-1)
    logits_RV = warp.shape(logits_RV)
    uncut_RV = None if warp.greedy else warp.law_of(logits_RV, cut=False)
    plain_RV, law_RV = _laws(logits_RV, uncut_RV, warp, is_noted=bool(wanted), warped=warped)
    if own_RV is not None:
        # Where a row draws from other logits, the model's own distribution is another one.
        plain_RV = torch.where(warp.shaped_R1, own_RV.to(plain_RV.dtype), plain_RV)
    draw_R = torch.zeros_like(position_R) if draw_R is None else draw_R
    fields = []
    for step in range(1 + ahead):
        if uncut_RV is None:
            token_R = logits_RV.argmax(-1)
        elif gumbel is not None:
            token_R = warp.draw(uncut_RV, gumbel(step))
        else:
            noise_RV = noise.gumbel_rows(key_R2, position_R, logits_RV.shape[1], draws_R=draw_R + step)
            token_R = warp.draw(uncut_RV, noise_RV)
        named_R = token_R if scored_R is None else torch.where(scored_R < 0, token_R, scored_R)
        notes = [scores_R if name == "scores" else measure(name, law_RV, token_R) for name in wanted]
        log_p_R = plain_RV.gather(-1, named_R.unsqueeze(-1)).squeeze(-1)
        fields.append(torch.stack([field.to(torch.float64) for field in (token_R, log_p_R, *notes)]))  # type: ignore[union-attr]
    return torch.stack(fields)


def _laws(
    logits_RV: Tensor, uncut_RV: Tensor | None, warp: Warp, *, is_noted: bool, warped: bool
) -> tuple[Tensor, Tensor]:
    """The model's own log-probabilities, and those that the notes are of, [R, V] each. Tokens are drawn from `uncut_RV`, but for
    top-p; None: all are the maxima."""
    of_warped = warped and uncut_RV is not None
    if is_noted and not of_warped:
        plain_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=-1)
    elif uncut_RV is not None and warp.is_plain:
        plain_RV = uncut_RV
    else:
        plain_RV = torch.log_softmax(logits_RV, dim=-1)
    if not (is_noted and of_warped):
        return plain_RV, plain_RV
    law_RV = warp.law_of(logits_RV, cut=True)
    if warp.own_4R is not None:
        exact_RV, greedy_R1 = torch.log_softmax(logits_RV.to(torch.float64), -1), warp.own_4R[0].unsqueeze(1) == 0.0
        law_RV, plain_RV = (torch.where(greedy_R1, exact_RV, each_RV) for each_RV in (law_RV, plain_RV))
    return plain_RV, law_RV


def measure(name: str, law_RV: Tensor, token_R: Tensor) -> Tensor:
    """One note of each row, float64 [R], from log-probabilities and the token drawn. Sources: Nie et al., "Large language
    diffusion models" (LLaDA, 2025); Ye et al., "Dream 7B" (2025)."""
    match name:
        case "top1":
            return law_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1).to(torch.float64).exp()
        case "margin":
            best_R2 = law_RV.topk(2, dim=-1).values.to(torch.float64).exp()
            return best_R2[:, 0] - best_R2[:, 1]
        case "squares":
            return law_RV.to(torch.float64).exp().square().sum(-1)
        case "entropy":
            law_RV = law_RV.to(torch.float64)
            mass_RV = law_RV.exp()
            return -torch.where(mass_RV > 0, mass_RV * law_RV, mass_RV).sum(-1)
    raise AssertionError(f"no note is named {name!r}")


def _log_scores(logits_RV: Tensor, mask_id: int) -> Tensor:
    assert mask_id >= 0, "scores leave out the mask"
    mask = torch.full((1,), mask_id, dtype=torch.int64, device=logits_RV.device)
    return logits_RV.to(torch.float64).index_fill(1, mask, -torch.inf).logsumexp(1)
