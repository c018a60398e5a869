"""From the logits of rows to tokens, by the settings of each row, in torch: warps, draws, and what is noted of each row.

p is the target's distribution, q the draft's. Distributions are log-probabilities in float32 (float64 where the logits are),
normalised after temperature, top-k, top-p and min-p, in this order, as in the usual libraries. Ties at the k-th logit are all
kept; ties inside the nucleus are broken towards the lower id. At temperature 0 a distribution is one-hot on the lowest id of the
maximum, so that both acceptance rules need no special case. A row has the same bits whatever the settings of other rows are.

Notes, which decoders ask of each row:

    top1      the token's probability
    margin    the largest probability less the second largest
    entropy   in nats
    squares   the sum of squared probabilities
    scores    the logarithm of the summed exponentials of the raw logits of all ids but `mask_id`, suppressed ones too

The first four are of the model's own distribution, or, if `warped`, of the one that the token was drawn from; in rows of
temperature 0 this is the model's own. On GPUs kernels/sampling.py computes the same.

Legend: R rows, V vocabulary, E tokens of a row whose logits change, F notes asked for, A draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.settings import TEMPERATURE, TOP_P, Note, Uses

_NUCLEUS_FIRST: Final = 128
# How far the float32 masses of a row may be from summing to one.
_MASS_SLACK: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Warp:
    """How the distribution of each row is changed: by its settings, and by what is known of its text.

    `settings_4R` as in settings.py, float64; `uses` says which of them matter. `suppressed` are ids that are never generated;
    `suppressed_V` marks them.

    A logit x of the token `token_ER` becomes penalty(x + before) + after, by `change_3ER` (before, factor, after): a penalty
    divides a positive number by the factor, and multiplies a negative one. A token that a row names twice has one change.
    Where a row may not draw every token, which `limited_R1` marks, `floor_RV` is -inf for those that it may not, else 0. Neither
    changes the model's own distribution, which log-probabilities are of.
    """

    settings_4R: Tensor
    uses: Uses
    suppressed: Tensor
    suppressed_V: Tensor
    token_ER: Tensor | None = None
    change_3ER: Tensor | None = None
    floor_RV: Tensor | None = None
    limited_R1: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every distribution is the model's own, but for top-p."""
        uses = self.uses
        return self.is_whole and not (uses.scales or uses.some_greedy or uses.top_k or uses.min_p)

    @property
    def is_whole(self) -> bool:
        """Whether every row draws from the model's logits as they are."""
        return self.floor_RV is None and self.token_ER is None

    @property
    def warm(self) -> Warp:
        """The same at temperature 1."""
        settings_4R = self.settings_4R.clone()
        settings_4R[TEMPERATURE] = 1.0
        return replace(
            self, settings_4R=settings_4R, uses=self.uses._replace(scales=False, some_greedy=False, all_greedy=False)
        )

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
        """The log-probabilities that rows draw by, [R, V], from suppressed logits that `shape` changed. Without `cut` top-p is
        left to `draw`, and what min-p leaves is not normalised: the nucleus is that of the distribution before min-p."""
        uses = self.uses
        if uses.all_greedy:
            return _one_hot(logits_RV)
        temperature_R1, top_p_R1, min_p_R1, top_k_R1 = self.settings_4R.unsqueeze(2)
        greedy_R1, scaled_RV = temperature_R1 == 0.0, logits_RV
        if uses.scales:
            warm_R1 = temperature_R1.masked_fill(greedy_R1, 1.0) if uses.some_greedy else temperature_R1
            scaled_RV = logits_RV / warm_R1.to(logits_RV.dtype)
        if uses.top_k:
            best_RK = scaled_RV.topk(min(uses.top_k, scaled_RV.shape[-1]), dim=-1).values
            place_R1 = top_k_R1.to(torch.int64).clamp(1, best_RK.shape[-1]) - 1
            threshold_R1 = best_RK.gather(-1, place_R1).masked_fill(top_k_R1 < 1, -torch.inf)
            scaled_RV = scaled_RV.masked_fill(scaled_RV < threshold_R1, -torch.inf)
        law_RV = torch.log_softmax(scaled_RV, dim=-1)
        if uses.min_p:
            least_R1 = law_RV.amax(-1, keepdim=True) + min_p_R1.log().to(law_RV.dtype)
            law_RV = law_RV.masked_fill(law_RV < least_R1, -torch.inf)
        if cut and (uses.top_p or uses.min_p):
            law_RV = self._cut(law_RV, top_p_R1, ((top_p_R1 < 1.0) | (min_p_R1 > 0.0)) & ~greedy_R1)
        return torch.where(greedy_R1, _one_hot(logits_RV), law_RV) if uses.some_greedy else law_RV

    def _cut(self, law_RV: Tensor, top_p_R1: Tensor, cuts_R1: Tensor) -> Tensor:
        """The rows that top-p or min-p cuts, cut to their nuclei and normalised; the others as they are."""

        def inside(part_RV: Tensor, part_R1: Tensor) -> Tensor:
            kept_RV = part_RV.masked_fill(~_nucleus(part_RV, part_R1), -torch.inf) if self.uses.top_p else part_RV
            return torch.log_softmax(kept_RV, dim=-1)

        if not _looks(law_RV):
            return torch.where(cuts_R1, inside(law_RV, top_p_R1), law_RV)
        if bool(cuts_R1.all()):
            return inside(law_RV, top_p_R1)
        rows = cuts_R1.squeeze(1).nonzero().squeeze(1)
        law_RV[rows] = inside(law_RV[rows], top_p_R1[rows])
        return law_RV

    def draw(self, uncut_RV: Tensor, gumbel_RV: Tensor) -> Tensor:
        """The token argmax(log p + noise) of each row, [R], from a distribution that is not cut to its nucleus yet. Ties go to
        the lowest id. The best token of the whole distribution is the best of the nucleus wherever it lies inside, which takes
        one sum to see. On a CPU only the other rows (at most a share of 1 - top_p, on average) have their nucleus found."""
        if not self.uses.top_p:
            return (uncut_RV + gumbel_RV).argmax(-1)
        top_p_R1 = self.settings_4R[TOP_P].unsqueeze(1)
        if not _looks(uncut_RV):
            return (uncut_RV.masked_fill(~_nucleus(uncut_RV, top_p_R1), -torch.inf) + gumbel_RV).argmax(-1)
        token_R = (uncut_RV + gumbel_RV).argmax(-1)
        own_R1 = uncut_RV.gather(-1, token_R.unsqueeze(-1)).exp()
        # What comes before a token has at most the mass that the token leaves, up to rounding: most rows end here.
        doubtful = (own_R1 <= 1.0 - top_p_R1 + _MASS_SLACK).squeeze(-1).nonzero().squeeze(1)
        before_N1 = _mass_before(uncut_RV[doubtful].exp(), token_R[doubtful]).unsqueeze(1)
        outside = doubtful[(before_N1 >= top_p_R1[doubtful]).squeeze(1)]
        if len(outside):
            part_RV = uncut_RV[outside]
            part_RV = part_RV.masked_fill(~_nucleus(part_RV, top_p_R1[outside]), -torch.inf)
            token_R[outside] = (part_RV + gumbel_RV[outside]).argmax(-1)
        return token_R


def _one_hot(logits_RV: Tensor) -> Tensor:
    law_RV = torch.full_like(logits_RV, -torch.inf)
    return law_RV.scatter_(-1, logits_RV.argmax(-1, keepdim=True), 0.0)


def _looks(law_RV: Tensor) -> bool:
    """Whether looking at the data costs nothing. On a device it is a wait, and all rows are treated alike."""
    return law_RV.device.type == "cpu"


def _nucleus(law_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """Mark the smallest set of most probable tokens whose mass reaches `top_p`; never empty. Most rows need few tokens: on a
    CPU the best ones are looked at first, and a row that they don't satisfy is sorted whole."""
    mass_RV = law_RV.exp()
    if not _looks(law_RV):
        return _reaching(mass_RV, mass_RV.sort(dim=-1, descending=True).values, top_p_R1)
    best_RK = mass_RV.topk(min(_NUCLEUS_FIRST, mass_RV.shape[-1]), dim=-1).values
    kept_RV = _reaching(mass_RV, best_RK, top_p_R1)
    if best_RK.shape[-1] < mass_RV.shape[-1]:
        wide_R = (best_RK.to(torch.float64).sum(-1, keepdim=True) < top_p_R1).squeeze(-1)
        if bool(wide_R.any()):
            whole_RV = mass_RV[wide_R].sort(dim=-1, descending=True).values
            kept_RV[wide_R] = _reaching(mass_RV[wide_R], whole_RV, top_p_R1[wide_R])
    return kept_RV


def _reaching(mass_RV: Tensor, ordered_RK: Tensor, top_p_R1: Tensor) -> Tensor:
    """Mark tokens in the given order of mass until `top_p` is reached; among equals the lower index goes first."""
    before_RK = ordered_RK.to(torch.float64).cumsum(-1) - ordered_RK
    num_kept_R1 = (before_RK < top_p_R1).sum(-1, keepdim=True)
    # A row of NaN keeps nothing; its index must stay in range.
    least_R1 = ordered_RK.gather(-1, (num_kept_R1 - 1).clamp(min=0))
    above_RV, equal_RV = mass_RV > least_R1, mass_RV == least_R1
    num_equal_R1 = num_kept_R1 - above_RV.sum(-1, keepdim=True)
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= num_equal_R1))


def _mass_before(mass_RV: Tensor, token_R: Tensor) -> Tensor:
    """The mass of the tokens that come before the given one in the order of mass (among equals, of index), float64 [R]."""
    own_R1 = mass_RV.gather(-1, token_R.unsqueeze(-1))
    lower_RV = torch.arange(mass_RV.shape[-1], device=mass_RV.device) < token_R.unsqueeze(-1)
    before_RV = (mass_RV > own_R1) | ((mass_RV == own_R1) & lower_RV)
    return torch.where(before_RV, mass_RV, 0.0).sum(-1, dtype=torch.float64)


def sample(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Note] = (),
    warped: bool = False,
    draw_R: Tensor | None = None,
    scored_R: Tensor | None = None,
    mask_id: int = -1,
    ahead: int = 0,
    gumbels: Iterable[Tensor] | None = None,
) -> Tensor:
    """Each row's token by the noise of its key and position, its log-probability under the model itself, and the wanted notes.

    float64 [1 + ahead, 2 + F, R]: of the draw `draw_R` (int64, by default 0) and of the `ahead` draws after it. `key_R2` are the
    words of noise.key_words. Where `scored_R` names a token (0 or more), the log-probability is that one's. `gumbels` are the
    noise of each draw, [R, V], where a caller keeps it; they are read only if a row draws.

    Where notes are wanted, the model's own distribution is computed in float64, but for the log-probabilities of warped rows. A
    row has the same bits whatever its neighbours' settings are. Suppressed ids are made impossible in `logits_RV` itself.
    """
    if logits_RV.dtype.itemsize < 4:
        logits_RV = logits_RV.float()
    scores_R = _log_scores(logits_RV, mask_id) if "scores" in wanted else None
    logits_RV = warp.suppress(logits_RV)
    own_RV = None if warp.is_whole else torch.log_softmax(logits_RV, dim=-1)
    logits_RV = warp.shape(logits_RV)
    uncut_RV = None if warp.uses.all_greedy else warp.law(logits_RV, cut=False)
    plain_RV, law_RV = _laws(logits_RV, uncut_RV, warp, is_noted=bool(wanted), warped=warped)
    if own_RV is not None:
        # Where a row draws from other logits, the model's own distribution is another one.
        plain_RV = torch.where(warp.shaped_R1, own_RV.to(plain_RV.dtype), plain_RV)
    if gumbels is None:
        draw_R = torch.zeros_like(position_R) if draw_R is None else draw_R
        draws = (draw_R + step for step in range(1 + ahead))
        gumbels = (noise.gumbel_rows(key_R2, position_R, logits_RV.shape[1], draws_R=each_R) for each_R in draws)
    drawn = (logits_RV.argmax(-1),) * (1 + ahead) if uncut_RV is None else (warp.draw(uncut_RV, one) for one in gumbels)
    fields = []
    for token_R in drawn:
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
    law_RV = warp.law(logits_RV, cut=True)
    if warp.uses.some_greedy:
        exact_RV = torch.log_softmax(logits_RV.to(torch.float64), -1)
        greedy_R1 = warp.settings_4R[TEMPERATURE].unsqueeze(1) == 0.0
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
    assert mask_id >= 0, "scores have no mask"
    mask = torch.full((1,), mask_id, dtype=torch.int64, device=logits_RV.device)
    return logits_RV.to(torch.float64).index_fill(1, mask, -torch.inf).logsumexp(1)


def inverse_cdf_draw(mass_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw one index a row in proportion to non-negative mass: the number of cumulative values <= u x total, [R]. Accumulates
    in float64 over ascending token ids. A row whose mass is all zero or NaN gives an in-range index."""
    cumulative = mass_RV.to(torch.float64).cumsum(-1)
    below = cumulative <= (uniform_R.to(torch.float64) * cumulative[..., -1]).unsqueeze(-1)
    # u x total can round up to the total itself: the last index with mass must still be the answer.
    last = cumulative.shape[-1] - 1 - (mass_RV > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(below.sum(-1), last)


def residual(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """Return the unnormalised positive part of p - q, or p where that has no mass (rounding), [R, V]. The rejection rule draws
    from it after rejecting a draft (ASSD, Algorithm 1; Leviathan et al., 2023)."""
    p_mass = p_RV.exp()
    positive = (p_mass - q_RV.exp()).clamp_(min=0.0)
    return torch.where(positive.sum(-1, keepdim=True) > 0, positive, p_mass)
