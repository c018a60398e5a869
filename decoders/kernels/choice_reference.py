"""From logits to tokens, in torch: what choice.py must give. The draws and warps are those of decoders/draws.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.sampling import log_laws, nucleus_draw


@dataclass(frozen=True, slots=True)
class Warp:
    """How each row's distribution is changed: by temperature (0 takes the maximum) and `top_p` (1 or more cuts nothing), float64.

    `top_k` is the job's. `cuts` says whether any row has a `top_p` below 1. `suppressed_V` marks ids that are never generated.
    """

    temperature_R: Tensor
    top_p_R: Tensor
    cuts: bool
    top_k: int | None
    suppressed_V: Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """Each row's token (int64), a log-probability under the model itself (float64), and whether the token equals the draft."""

    token_R: Tensor
    log_p_R: Tensor
    accepted_R: Tensor


def choose(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    draft_R: Tensor | None = None,
    scored_R: Tensor | None = None,
) -> Chosen:
    """Draw each row's token by the noise of its key and position: the coupled rule, by which a draft holds if it equals it.

    `key_R2` are the words of noise.key_words. A `draft_R` of -1 is no draft. Where `scored_R` names a token (0 or more), the
    log-probability is that one's; elsewhere it is that of the token drawn.
    """
    logits_RV = logits_RV.masked_fill(warp.suppressed_V, -torch.inf)
    gumbel_RV = noise.gumbel_rows(key_R2, position_R, logits_RV.shape[1])
    law_RV = log_laws(logits_RV, warp.temperature_R.unsqueeze(1), top_k=warp.top_k)
    token_R = nucleus_draw(law_RV, gumbel_RV, warp.top_p_R.unsqueeze(1) if warp.cuts else None)
    named_R = token_R if scored_R is None else torch.where(scored_R < 0, token_R, scored_R)
    accepted_R = torch.zeros_like(token_R, dtype=torch.bool) if draft_R is None else token_R == draft_R
    return Chosen(token_R, _log_p(logits_RV, named_R), accepted_R)


def weigh(logits_RV: Tensor, warp: Warp, draft_R: Tensor, log_q_R: Tensor) -> tuple[Tensor, Tensor]:
    """Judge drafts: log p(draft) - log q(draft) in the warped distributions, and log p under the model itself, float64 [R] each.

    The rejection rule keeps a draft with probability min(1, p/q) (Leviathan et al., 2023). Where the warp leaves a draft no mass,
    the first is -inf.
    """
    logits_RV = logits_RV.masked_fill(warp.suppressed_V, -torch.inf)
    top_p_R1 = warp.top_p_R.unsqueeze(1) if warp.cuts else None
    law_RV = log_laws(logits_RV, warp.temperature_R.unsqueeze(1), top_k=warp.top_k, top_p_R1=top_p_R1)
    log_p_R = law_RV.gather(1, draft_R.unsqueeze(1)).squeeze(1).to(torch.float64)
    return log_p_R - log_q_R, _log_p(logits_RV, draft_R)


def _log_p(logits_RV: Tensor, token_R: Tensor) -> Tensor:
    log_p_R = torch.log_softmax(logits_RV, dim=-1).gather(1, token_R.unsqueeze(1)).squeeze(1)
    return log_p_R.to(torch.float64)
