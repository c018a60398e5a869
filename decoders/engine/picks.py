"""From the hidden states of asked masks to picks: a token for each by its position's noise, and the surest of each stretch.

How sure comes from the model's own distribution, without temperature (draws/confidence.py), and only the token is drawn from the
warped one; with `warped` both are the latter's. Where steps draw anew (`fresh`), the noise is that of the position and the step,
and masks may also be drawn by the noise of steps `ahead`: what a decoder expects of them if distributions stay as they are.

More kinds that need no confidence:

    random           a uniform number of the position: an order that does not depend on the text
    analytic, euler  how far the chance of being revealed in this step (draws/absorbing.py) exceeds a uniform number of the
                     position and the step; the masks above 0 are revealed
    unordered        nothing: the decoder knows which masks it wants

On a GPU one kernel gives the token of a mask and how sure it is (decoders/kernels/notes.py); then no noise is kept.

The reduction is two stable sorts and a gather at places that the host names, so that no shape depends on the data:

    masks         a    b    c  |  d    e          two stretches, three masks and two
    sure          .2   .9   .9 |  .4   .7
    sorted        b    c    a  |  e    d          the surest first, equals by position; then by stretch
    picks         b    c       |  e               the best two, the best one

Legend: R asked masks, A stretches, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.absorbing import chance_by_scores, chance_by_total, log_scale, log_scores, total_noise
from draftmill.decoders.draws.confidence import confidence
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.fields import NoiseField
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Sent
from draftmill.decoders.engine.row_laws import RowLaws
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.transfers import marks
from draftmill.decoders.kernels.find import find_notes
from draftmill.decoders.kernels.notes_reference import Wanted

SCORED: Final = ("analytic", "euler")
UNORDERED: Final = "unordered"
# What the kernel tells of a row, where that is not named like the kind.
_WANTED: Final[dict[str, tuple[Wanted, ...]]] = {
    "random": ("order",),
    UNORDERED: (),
    **dict.fromkeys(SCORED, ("order", "scores")),
}


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks that one forward reads: slot, position, key and stretch of each.

    `own_2R` are their temperatures and top-p (Picks.own), `cuts` says whether any top-p cuts. `step_R3` are the time, the next
    time and the number of the step's draws (as a float); zeros where the model is told no time, and where steps don't draw anew.
    The draws are those of the step `ahead` of that.
    """

    own_2R: Tensor | None
    cuts: bool
    slot_R: Tensor
    position_R: Tensor
    key_R2: Tensor
    stretch_R: Tensor
    step_R3: Tensor
    ahead: int = 0

    def numbers(self) -> Tensor:
        """The numbers of the masks' draws, int64 [R]."""
        return self.step_R3[:, 2].to(torch.int64) + self.ahead

    def part(self, rows: slice | Tensor) -> Masks:
        """Some of them; a tensor of indices only on the CPU."""
        return replace(
            self,
            own_2R=None if self.own_2R is None else self.own_2R[:, rows],
            slot_R=self.slot_R[rows],
            position_R=self.position_R[rows],
            key_R2=self.key_R2[rows],
            stretch_R=self.stretch_R[rows],
            step_R3=self.step_R3[rows],
        )


class Picks:
    """Reads masks under the sampling settings of their samples; `kind` says how sure a token is."""

    def __init__(
        self,
        sampling: Sampling,
        suppressed: Sequence[int],
        *,
        kind: str,
        fresh: bool,
        warped: bool,
        num_slots: int,
        vocab_size: int,
        mask_id: int,
        device: torch.device,
        dtype: torch.dtype,
        account: Callable[[], Account],
    ) -> None:
        self._kind, self._fresh, self._warped = kind, fresh, warped
        self._mask_id, self._vocab_size, self._device, self._account = mask_id, vocab_size, device, account
        self._suppressed = torch.tensor(suppressed, dtype=torch.int64, device=device)
        self._row_bytes = vocab_size * (8 if dtype == torch.float64 else 4)
        self._laws = RowLaws(sampling, num_slots)
        self._note = find_notes(device, dtype)
        self._suppressed_V = marks(suppressed, vocab_size, device)
        self._field = NoiseField(vocab_size, num_slots, device, account, fresh=fresh)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def start(self, sample: Sample) -> None:
        """A new sample is in its slot."""
        self._laws.start(sample.slot, sample.request.settings)
        self._field.start(sample.slot)

    def release(self, slot: int) -> None:
        """A slot has become free."""
        self._laws.release(slot)

    # ---- picks ---------------------------------------------------------------------------------------------------

    @property
    def by_kernel(self) -> bool:
        """Whether one kernel draws the tokens and says how sure they are."""
        return self._note is not None

    def own(self, slot_R: Ints) -> NDArray[np.float64] | None:
        """Temperature and top-p of each mask, [2, R], where any sample has settings of its own, or the kernel wants them."""
        return self._laws.own(slot_R) if self._note is None else self._laws.each(slot_R)

    def cuts(self, slot_R: Ints) -> bool:
        """See RowLaws.cuts."""
        return self._laws.cuts(slot_R)

    def missing_noise(self, samples: Sequence[Canvas], top_B: Ints, shape: tuple[int, int]) -> Ints:
        """The noise of masks below `top_B` that is not there yet (fields.py); none where none is kept or needed."""
        if self._laws.greedy or self._note is not None:
            return np.zeros((4, 0), dtype=np.int64)
        return self._field.missing(samples, top_B, shape)

    def read(
        self,
        logits: Callable[[Tensor], Tensor],
        hidden_ND: Tensor,
        row_R: Tensor,
        masks: Masks,
        sent: Sent,
        ahead: int = 0,
    ) -> Tensor:
        """Read the masks from these rows; returns the picks as (-worth, position, token, log-probability), float64 [A, 4, P].

        The first of A = 1 + `ahead` are those of the masks' own steps, the next those of the steps after them. Of what was
        `sent`, `noise` is the missing noise, and `picks` are the places of the best masks after sorting.
        """
        self._field.fill(sent["noise"])
        read = [
            self._read(logits(hidden_ND.index_select(0, row_R[part])), masks.part(part), ahead)
            for part in self._account().parts(len(row_R), self._row_bytes)
        ]
        told_A3R = torch.cat(read, 2) if len(read) > 1 else read[0]
        return torch.stack([self._best(told_3R, masks, sent["picks"]) for told_3R in told_A3R])

    def _best(self, told_3R: Tensor, masks: Masks, place_P: Tensor) -> Tensor:
        token_R, log_p_R, sure_R = told_3R
        order_R = sure_R.sort(descending=True, stable=True).indices
        order_R = order_R[masks.stretch_R[order_R].sort(stable=True).indices]
        position_R = masks.position_R.to(torch.float64)
        return torch.stack([-sure_R, position_R, token_R, log_p_R]).index_select(1, order_R[place_P])

    def _read(self, logits_RV: Tensor, masks: Masks, ahead: int) -> Tensor:
        """(token, log-probability, how sure) of each mask in this step and so many more, float64 [A, 3, R]."""
        steps = [masks if not step else replace(masks, ahead=step) for step in range(1 + ahead)]
        if self._note is not None:
            return torch.stack([self._noted(logits_RV, step) for step in steps])
        if self._kind not in SCORED:
            return self._told(logits_RV, steps)
        sure_R = self._beyond_chance(logits_RV, masks)
        if self._device.type != "cpu":
            told_3R = self._told(logits_RV, steps)[0]
        else:
            # Where looking at the data costs nothing, only the masks that are revealed are read: those above 0, at the end all.
            wanted = ((sure_R > 0) | (masks.step_R3[:, 1] >= masks.step_R3[:, 0])).nonzero().squeeze(1)
            told_3R = torch.zeros(3, len(sure_R), dtype=torch.float64)
            told_3R[:, wanted] = self._told(logits_RV[wanted], [masks.part(wanted)])[0]
        told_3R[2] = sure_R
        return told_3R.unsqueeze(0)

    def _noted(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """As `_read`, by the kernel."""
        assert self._note is not None and masks.own_2R is not None, "there is a kernel, and it knows the settings"
        wanted = _WANTED.get(self._kind, (cast("Wanted", self._kind),))
        told_FR = self._note(
            logits_RV,
            self._laws.warp(masks.own_2R, self._suppressed_V, cuts=masks.cuts),
            masks.key_R2,
            masks.position_R,
            wanted=wanted,
            warped=self._warped,
            step_R=masks.numbers() if self._fresh else None,
            draw_R=masks.numbers() if "order" in wanted else None,
            mask_id=self._mask_id,
        )
        token_R, log_p_R, *notes = told_FR.unbind(0)
        match self._kind:
            case "analytic" | "euler":
                time_R, later_R, _ = masks.step_R3.unbind(1)
                total_R = (notes[1] - log_scale(total_noise(time_R), self._vocab_size)).exp()
                sure_R = chance_by_total(total_R, self._kind == "euler", time_R, later_R) - notes[0]
            case "entropy":
                sure_R = -notes[0]
            case "unordered":
                sure_R = torch.zeros_like(log_p_R)
            case _:
                return told_FR
        return torch.stack([token_R, log_p_R, sure_R])

    def _told(self, logits_RV: Tensor, steps: Sequence[Masks]) -> Tensor:
        """See `_read`: the same masks in some steps."""
        logits_RV, own_2R = logits_RV.index_fill_(-1, self._suppressed, -torch.inf), steps[0].own_2R
        drawn_RV = None if self._laws.greedy else self._laws.law(logits_RV, own_2R)
        law_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=1)
        weighed_RV = law_RV
        if self._warped and not self._laws.greedy:
            weighed_RV = self._laws.cut(logits_RV, own_2R, law_RV)
        told = []
        for masks in steps:
            token_R = logits_RV.argmax(1) if drawn_RV is None else self._drawn(drawn_RV, masks)
            log_p_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)
            told.append(torch.stack([token_R.to(torch.float64), log_p_R, self._confidence(weighed_RV, token_R, masks)]))
        return torch.stack(told)

    def _drawn(self, law_RV: Tensor, masks: Masks) -> Tensor:
        """The token of each mask by its position's noise, [R]; enumerations replace it."""
        gumbel_RV = self._field.rows(masks.slot_R, masks.position_R, masks.key_R2, masks.numbers())
        return self._laws.draw(law_RV, gumbel_RV, masks.own_2R)

    def _confidence(self, law_RV: Tensor, token_R: Tensor, masks: Masks) -> Tensor:
        if self._kind == "random":
            return noise.uniform_rows(masks.key_R2, masks.position_R, noise.ORDER, torch.zeros_like(masks.position_R))
        if self._kind in (UNORDERED, *SCORED):
            return torch.zeros_like(law_RV[:, 0])
        return confidence(self._kind, law_RV, token_R)

    def _beyond_chance(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """By how much each mask's chance of being revealed exceeds its uniform number, [R]."""
        chance_R = self._chance(logits_RV, masks)
        return chance_R - self._uniform(chance_R, masks)

    def _uniform(self, chance_R: Tensor, masks: Masks) -> Tensor:
        """A number in (0, 1) for each mask and step, [R]; enumerations replace it by one on either side of the chance."""
        return noise.uniform_rows(masks.key_R2, masks.position_R, noise.ORDER, masks.numbers())

    def _chance(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """The chance that each mask is revealed in this step, [R]."""
        time_R, later_R, _ = masks.step_R3.unbind(1)
        mask_R = torch.full_like(masks.position_R, self._mask_id)
        scores_RV = log_scores(logits_RV.to(torch.float64), mask_R, total_noise(time_R))
        return chance_by_scores(scores_RV, self._mask_id, self._kind == "euler", time_R, later_R)
