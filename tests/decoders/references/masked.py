"""A plain reference of `ancestral`: one canvas; the caller makes every random choice, for enumeration and comparison.

Sources: as in ancestral.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftmill.decoders.base import HOLE
from draftmill.decoders.draws.schedule import LAST_TIME, time_at
from tests.decoders.references.absorbing_rows import chance_by_scores, chance_by_time, log_scores, total_noise
from tests.decoders.references.causal import PlainMasked

Strike = Callable[[int, int, float], bool]
"""(position, step, chance) -> whether the mask is revealed in this step."""
Tell = Callable[[Tensor, int], int]
"""(log-probabilities [V], position) -> the token."""


def ancestral(
    model: PlainMasked, canvas: Sequence[int], *, steps: int, predictor: str, strike: Strike, tell: Tell
) -> tuple[list[int], int]:
    """The canvas without its holes, and in how many steps something was revealed."""
    tokens, busy = list(canvas), 0
    first = time_at(sum(t == HOLE for t in canvas) / len(canvas))
    times = [first + (LAST_TIME - first) * step / steps for step in range(steps + 1)]
    for step in range(steps + 1):
        seen = [model.mask_id if token == HOLE else token for token in tokens]
        masks = [position for position, token in enumerate(tokens) if token == HOLE]
        last = step == steps
        chances = dict.fromkeys(masks, 1.0) if last else _chances(model, seen, masks, predictor, times[step : step + 2])
        laws_LV = model.laws(seen)
        revealed = [position for position in masks if last or strike(position, step, chances[position])]
        for position in revealed:
            tokens[position] = tell(laws_LV[position], position)
        busy += bool(revealed)
    return tokens, busy


def _chances(
    model: PlainMasked, seen: list[int], masks: list[int], predictor: str, span: Sequence[float]
) -> dict[int, float]:
    time, later = (torch.tensor([one], dtype=torch.float64) for one in span)
    if predictor == "ddpm":
        return dict.fromkeys(masks, float(chance_by_time(time, later)))
    mask_1, logits_LV = torch.tensor([model.mask_id]), model.logits(seen)
    chances = {}
    for position in masks:
        scores_1V = log_scores(logits_LV[position : position + 1], mask_1, total_noise(time))
        chances[position] = float(chance_by_scores(scores_1V, model.mask_id, predictor == "euler", time, later))
    return chances
