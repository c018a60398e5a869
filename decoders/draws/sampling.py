"""From logits to tokens: the warp, the draws, and the residual of the rejection rule. Pure functions over rows.

p is the target's distribution, q the draft's. Distributions are log-probabilities in float32 (float64 where the logits are),
normalised after temperature, top-k and top-p; at temperature 0 a distribution is one-hot on the lowest index of the maximum, so
that both acceptance rules need no special case. Knows nothing of slots, models or where a number came from.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from draftmill.decoders.common_settings import Sampling

_NUCLEUS_FIRST: Final = 128
# How far the float32 masses of a row may be from summing to one.
_MASS_SLACK: Final = 1e-4


def log_law(logits_RV: Tensor, sampling: Sampling, *, cut: bool = True) -> Tensor:
    """Warp logits into normalised log-probabilities, [R, V]; suppressed ids must already be -inf. Order of the warps:
    temperature, top-k, top-p (nucleus), min-p, as in the usual libraries. Ties at the k-th logit are all kept; ties inside
    the nucleus are broken towards the lower index. Without `cut` top-p is left to `nucleus_draw`, and what min-p leaves is not
    normalised: the nucleus is that of the distribution before min-p."""
    if sampling.temperature == 0.0:
        return _one_hot(logits_RV)
    scaled = logits_RV if sampling.temperature == 1.0 else logits_RV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        threshold = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    law = torch.log_softmax(scaled, dim=-1)
    if sampling.min_p:
        law = _likely(law, math.log(sampling.min_p))
    top_p = sampling.top_p if cut and sampling.top_p is not None and sampling.top_p < 1.0 else None
    if top_p is not None:
        law = law.masked_fill(~_nucleus(law, top_p), -torch.inf)
    return torch.log_softmax(law, dim=-1) if top_p is not None or (cut and sampling.min_p) else law


def log_laws(
    logits_RV: Tensor,
    temperature_R1: Tensor,
    *,
    top_k: int | None = None,
    top_p_R1: Tensor | None = None,
    own_k_R1: Tensor | None = None,
    min_p_R1: Tensor | None = None,
    cut: bool = True,
) -> Tensor:
    """`log_law` with settings of each row's own, [R, V]; a `top_p` of 1 or more, a `min_p` of 0 and an `own_k` of 0 cut nothing
    off. `top_k` is that of all rows, or the largest `own_k`. Each row comes out as `log_law` gives it, to the bit: the operations
    are the same, with a column in place of a number."""
    greedy_R1 = temperature_R1 == 0.0
    scaled = logits_RV / torch.where(greedy_R1, 1.0, temperature_R1).to(logits_RV.dtype)
    if top_k is not None and (own_k_R1 is not None or top_k < scaled.shape[-1]):
        best_RK = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).values
        threshold = best_RK[..., -1:]
        if own_k_R1 is not None:
            place_R1 = own_k_R1.to(torch.int64).clamp(1, best_RK.shape[-1]) - 1
            threshold = best_RK.gather(-1, place_R1).masked_fill(own_k_R1 < 1, -torch.inf)
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    law = torch.log_softmax(scaled, dim=-1)
    if min_p_R1 is not None:
        law = _likely(law, min_p_R1.log().to(law.dtype))
    if cut:
        law = _cut_rows(law, greedy_R1, top_p_R1, min_p_R1)
    return torch.where(greedy_R1, _one_hot(logits_RV), law)


def _cut_rows(law_RV: Tensor, greedy_R1: Tensor, top_p_R1: Tensor | None, min_p_R1: Tensor | None) -> Tensor:
    """Rows cut to their nuclei, normalised where top-p or min-p cuts; the others as they are."""
    cuts_R1 = torch.zeros_like(greedy_R1)
    for column_R1 in (None if top_p_R1 is None else top_p_R1 < 1.0, None if min_p_R1 is None else min_p_R1 > 0.0):
        cuts_R1 = cuts_R1 if column_R1 is None else cuts_R1 | (column_R1 & ~greedy_R1)

    def inside(part_RV: Tensor, rows: Tensor | slice) -> Tensor:
        if top_p_R1 is not None:
            part_RV = part_RV.masked_fill(~_nucleus(part_RV, top_p_R1[rows]), -torch.inf)
        return torch.log_softmax(part_RV, dim=-1)

    if not _looks(law_RV):
        return torch.where(cuts_R1, inside(law_RV, slice(None)), law_RV)
    rows = cuts_R1.squeeze(1).nonzero().squeeze(1)
    law_RV[rows] = inside(law_RV[rows], rows)
    return law_RV


def _likely(law_RV: Tensor, log_min_p: float | Tensor) -> Tensor:
    """Without the tokens that are less likely than this share of the best one's probability; not normalised."""
    return law_RV.masked_fill(law_RV < law_RV.amax(-1, keepdim=True) + log_min_p, -torch.inf)


def _one_hot(logits_RV: Tensor) -> Tensor:
    law = torch.full_like(logits_RV, -torch.inf)
    return law.scatter_(-1, logits_RV.argmax(-1, keepdim=True), 0.0)


TopP = float | Tensor
"""A share of the probability mass: one number for all rows, or float64 [R, 1]."""


def _looks(law_RV: Tensor) -> bool:
    """Whether looking at the data costs nothing. On a device it is a wait, and all rows are treated alike."""
    return law_RV.device.type == "cpu"


def _nucleus(law_RV: Tensor, top_p: TopP) -> Tensor:
    """Mark the smallest set of most probable tokens whose mass reaches `top_p`; never empty. Most rows need few tokens: on a
    CPU the best ones are looked at first, and a row that they don't satisfy is sorted whole."""
    mass_RV = law_RV.exp()
    if not _looks(law_RV):
        return _reaching(mass_RV, mass_RV.sort(dim=-1, descending=True).values, top_p)
    best_RK = mass_RV.topk(min(_NUCLEUS_FIRST, mass_RV.shape[-1]), dim=-1).values
    kept_RV = _reaching(mass_RV, best_RK, top_p)
    if best_RK.shape[-1] < mass_RV.shape[-1]:
        wide_R = (best_RK.to(torch.float64).sum(-1, keepdim=True) < top_p).squeeze(-1)
        if bool(wide_R.any()):
            whole_RV = mass_RV[wide_R].sort(dim=-1, descending=True).values
            kept_RV[wide_R] = _reaching(mass_RV[wide_R], whole_RV, _in_rows(top_p, wide_R))
    return kept_RV


def _in_rows(top_p: TopP, rows: Tensor) -> TopP:
    return top_p[rows] if isinstance(top_p, Tensor) else top_p


def _reaching(mass_RV: Tensor, ordered_RK: Tensor, top_p: TopP) -> Tensor:
    """Mark tokens in the given order of mass until `top_p` is reached; among equals the lower index goes first."""
    before_RK = ordered_RK.to(torch.float64).cumsum(-1) - ordered_RK
    num_kept_R1 = (before_RK < top_p).sum(-1, keepdim=True)
    # A row of NaN keeps nothing; its index must stay in range.
    least_R1 = ordered_RK.gather(-1, (num_kept_R1 - 1).clamp(min=0))
    above_RV, equal_RV = mass_RV > least_R1, mass_RV == least_R1
    num_equal_R1 = num_kept_R1 - above_RV.sum(-1, keepdim=True)
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= num_equal_R1))


def coupled_draw(law_RV: Tensor, gumbel_RV: Tensor | None) -> Tensor:
    """Return argmax(log p + g) in each row; without noise (temperature 0) argmax(log p). Ties go to the lowest index."""
    return (law_RV if gumbel_RV is None else law_RV + gumbel_RV).argmax(-1)


def nucleus_draw(law_RV: Tensor, gumbel_RV: Tensor | None, top_p: TopP | None) -> Tensor:
    """Return what `coupled_draw` gives on the distribution cut to its nucleus, from a distribution that is not cut yet, [R].
    The best token of the whole distribution is the best of the nucleus wherever it lies inside, which takes one sum to see. On
    a CPU only the other rows (at most a share of 1 - top_p, on average) have their nucleus found."""
    if top_p is None or gumbel_RV is None:
        return coupled_draw(law_RV, gumbel_RV)
    if not _looks(law_RV):
        return coupled_draw(law_RV.masked_fill(~_nucleus(law_RV, top_p), -torch.inf), gumbel_RV)
    tokens_R = coupled_draw(law_RV, gumbel_RV)
    own_R1 = law_RV.gather(-1, tokens_R.unsqueeze(-1)).exp()
    # What comes before a token has at most the mass that the token leaves, up to rounding: most rows end here.
    doubtful = (own_R1 <= 1.0 - top_p + _MASS_SLACK).squeeze(-1).nonzero().squeeze(1)
    before_N1 = _mass_before(law_RV[doubtful].exp(), tokens_R[doubtful]).unsqueeze(1)
    outside = doubtful[(before_N1 >= _in_rows(top_p, doubtful)).squeeze(1)]
    if len(outside):
        part_RV = law_RV[outside]
        part_RV = part_RV.masked_fill(~_nucleus(part_RV, _in_rows(top_p, outside)), -torch.inf)
        tokens_R[outside] = coupled_draw(part_RV, gumbel_RV[outside])
    return tokens_R


def _mass_before(mass_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """The mass of the tokens that come before the given one in the order of mass (among equals, of index), float64 [R]."""
    own_R1 = mass_RV.gather(-1, tokens_R.unsqueeze(-1))
    lower_RV = torch.arange(mass_RV.shape[-1], device=mass_RV.device) < tokens_R.unsqueeze(-1)
    before_RV = (mass_RV > own_R1) | ((mass_RV == own_R1) & lower_RV)
    return torch.where(before_RV, mass_RV, 0.0).sum(-1, dtype=torch.float64)


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
