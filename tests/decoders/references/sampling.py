"""From the logits of rows to distributions by the settings of a job, as plainly as it can be written; draws by noise; warps."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.sampling import Warp
from draftmill.decoders.draws.settings import Uses

Numbers = float | Sequence[float]


def log_law(logits_RV: Tensor, sampling: Sampling, *, cut: bool = True) -> Tensor:
    """Warp logits into log-probabilities, [R, V]: temperature, top-k, top-p and min-p; suppressed ids are -inf before.

    Without `cut` top-p does nothing, and what min-p leaves is not normalised.
    """
    if sampling.temperature == 0.0:
        return torch.full_like(logits_RV, -torch.inf).scatter_(-1, logits_RV.argmax(-1, keepdim=True), 0.0)
    scaled_RV = logits_RV if sampling.temperature == 1.0 else logits_RV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled_RV.shape[-1]:
        least_R1 = scaled_RV.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled_RV = scaled_RV.masked_fill(scaled_RV < least_R1, -torch.inf)
    law_RV = torch.log_softmax(scaled_RV, dim=-1)
    if sampling.min_p:
        least_R1 = law_RV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        law_RV = law_RV.masked_fill(law_RV < least_R1, -torch.inf)
    if not cut:
        return law_RV
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered_RV, place_RV = law_RV.exp().sort(dim=-1, descending=True, stable=True)
        before_RV = ordered_RV.double().cumsum(-1) - ordered_RV
        outside_RV = torch.zeros_like(law_RV, dtype=torch.bool).scatter(-1, place_RV, before_RV >= sampling.top_p)
        law_RV = law_RV.masked_fill(outside_RV, -torch.inf)
    elif not sampling.min_p:
        return law_RV
    return torch.log_softmax(law_RV, dim=-1)


def coupled_draw(law_RV: Tensor, gumbel_RV: Tensor | None) -> Tensor:
    """argmax(log p + g) in each row, [R]; without noise (temperature 0) argmax(log p). Ties go to the lowest id."""
    return (law_RV if gumbel_RV is None else law_RV + gumbel_RV).argmax(-1)


def warp_of(
    num_rows: int,
    vocab_size: int,
    *,
    temperature: Numbers = 1.0,
    top_p: Numbers = 1.0,
    min_p: Numbers = 0.0,
    top_k: Numbers = 0,
    suppressed: Sequence[int] = (),
) -> Warp:
    """The production's warp of rows with these settings; several numbers are those of the rows, in turn."""
    columns = [np.resize(np.array(one, dtype=np.float64), num_rows) for one in (temperature, top_p, min_p, top_k)]
    columns[1] = np.where(columns[1] < 1.0, columns[1], np.inf)
    settings_4R, ids = np.stack(columns), torch.tensor(suppressed, dtype=torch.int64)
    marks_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return Warp(torch.from_numpy(settings_4R), Uses.of(settings_4R), ids, marks_V)
