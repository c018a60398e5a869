"""From logits to tokens and what decoders want to know of each row, in torch: what notes.py must give.

    top1      the token's probability
    margin    the largest probability less the second largest
    entropy   in nats
    squares   the sum of squared probabilities
    order     a uniform number in (0, 1) of the row's position and `draw_R`, of purpose ORDER
    scores    the logarithm of the summed exponentials of the raw logits of all ids but `mask_id`, suppressed ones too

The first four are of the model's own distribution, or, if `warped`, of the one that the token was drawn from; in rows of
temperature 0 this is the model's own.

Legend: R rows, V vocabulary, F wanted notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.confidence import confidence
from draftmill.decoders.draws.sampling import log_laws, nucleus_draw
from draftmill.decoders.kernels.choice_reference import Warp

Wanted = Literal["top1", "margin", "entropy", "squares", "order", "scores"]
WANTED: Final[tuple[Wanted, ...]] = ("top1", "margin", "entropy", "squares", "order", "scores")


def note(
    logits_RV: Tensor,
    warp: Warp,
    key_R2: Tensor,
    position_R: Tensor,
    *,
    wanted: Sequence[Wanted],
    warped: bool = False,
    step_R: Tensor | None = None,
    draw_R: Tensor | None = None,
    mask_id: int = -1,
) -> Tensor:
    """Each row's token by the noise of its key and position, its log-probability under the model itself, and the wanted notes.

    float64 [2 + F, R]. `key_R2` are the words of noise.key_words; `step_R` (int64, by default 0) numbers the noise.
    `order` needs `draw_R`, int64.
    """
    plain_RV = logits_RV.masked_fill(warp.suppressed_V, -torch.inf)
    top_p_R1 = warp.top_p_R.unsqueeze(1) if warp.cuts else None
    temperature_R1 = warp.temperature_R.unsqueeze(1)
    gumbel_RV = noise.gumbel_rows(key_R2, position_R, logits_RV.shape[1], draws_R=step_R)
    token_R = nucleus_draw(log_laws(plain_RV, temperature_R1, top_k=warp.top_k), gumbel_RV, top_p_R1)
    law_RV = torch.log_softmax(plain_RV.to(torch.float64), dim=1)
    told = [token_R.to(torch.float64), law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)]
    if warped:
        cut_RV = log_laws(plain_RV, temperature_R1, top_k=warp.top_k, top_p_R1=top_p_R1).to(torch.float64)
        law_RV = torch.where(temperature_R1 == 0.0, law_RV, cut_RV)
    for kind in wanted:
        match kind:
            case "order":
                assert draw_R is not None, "the number of the draw"
                told.append(noise.uniform_rows(key_R2, position_R, noise.ORDER, draw_R))
            case "scores":
                assert mask_id >= 0, "scores leave out the mask"
                mask = torch.full((1,), mask_id, dtype=torch.int64, device=logits_RV.device)
                told.append(logits_RV.to(torch.float64).index_fill(1, mask, -torch.inf).logsumexp(1))
            case "squares":
                told.append(law_RV.exp().square().sum(1))
            case "entropy":
                told.append(-confidence(kind, law_RV, token_R))
            case _:
                told.append(confidence(kind, law_RV, token_R))
    return torch.stack(told)
