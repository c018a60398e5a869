"""From the hidden states of asked masks to picks: a token for each by its position's noise, and the surest of each stretch.

How sure comes from the model's own distribution, without temperature (draws/confidence.py); only the token is drawn from the
warped one. More kinds that need no confidence:

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
from dataclasses import dataclass
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
    time and the number of the uniforms (as a float); zeros where the model is told no time.
    """

    own_2R: Tensor | None
    cuts: bool
    slot_R: Tensor
    position_R: Tensor
    key_R2: Tensor
    stretch_R: Tensor
    step_R3: Tensor

    def part(self, rows: slice | Tensor) -> Masks:
        """Some of them; a tensor of indices only on the CPU."""
        tensors = (self.slot_R, self.position_R, self.key_R2, self.stretch_R, self.step_R3)
        own_2R = None if self.own_2R is None else self.own_2R[:, rows]
        return Masks(own_2R, self.cuts, *(one[rows] for one in tensors))


class Picks:
    """Reads masks under the sampling settings of their samples; `kind` says how sure a token is."""

    def __init__(
        self,
        sampling: Sampling,
        suppressed: Sequence[int],
        *,
        kind: str,
        num_slots: int,
        vocab_size: int,
        mask_id: int,
        device: torch.device,
        dtype: torch.dtype,
        account: Callable[[], Account],
    ) -> None:
        self._kind, self._mask_id, self._vocab_size, self._device, self._account = (
            kind,
            mask_id,
            vocab_size,
            device,
            account,
        )
        self._suppressed = torch.tensor(suppressed, dtype=torch.int64, device=device)
        self._row_bytes = vocab_size * (8 if dtype == torch.float64 else 4)
        self._laws = RowLaws(sampling, num_slots)
        self._note = find_notes(device, dtype)
        self._suppressed_V = marks(suppressed, vocab_size, device)
        self._field = NoiseField(vocab_size, num_slots, device, account)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def start(self, sample: Sample) -> None:
        """A new sample is in its slot."""
        self._laws.start(sample.slot, sample.request.settings)
        self._field.start(sample.slot)

    def move(self, source: int, target: int) -> None:
        """A sample moves to another slot."""
        self._laws.move(source, target)
        self._field.move(source, target)

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
    ) -> Tensor:
        """Read the masks from these rows; returns the picks as (-worth, position, token, log-probability), float64 [4, P].

        Of what was `sent`, `noise` is the missing noise, and `picks` are the places of the best masks after sorting.
        """
        self._field.fill(sent["noise"])
        read = [
            self._read(logits(hidden_ND.index_select(0, row_R[part])), masks.part(part))
            for part in self._account().parts(len(row_R), self._row_bytes)
        ]
        token_R, log_p_R, sure_R = torch.cat(read, 1) if len(read) > 1 else read[0]
        order_R = sure_R.sort(descending=True, stable=True).indices
        order_R = order_R[masks.stretch_R[order_R].sort(stable=True).indices]
        best_P = order_R[sent["picks"]]
        position_R = masks.position_R.to(torch.float64)
        return torch.stack([-sure_R, position_R, token_R, log_p_R]).index_select(1, best_P)

    def _read(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """(token, log-probability, how sure) of each mask, float64 [3, R]."""
        if self._note is not None:
            return self._noted(logits_RV, masks)
        if self._kind not in SCORED:
            return self._told(logits_RV, masks)
        sure_R = self._beyond_chance(logits_RV, masks)
        if self._device.type != "cpu":
            told_3R = self._told(logits_RV, masks)
        else:
            # Where looking at the data costs nothing, only the masks that are revealed are read: those above 0, at the end all.
            wanted = ((sure_R > 0) | (masks.step_R3[:, 1] >= masks.step_R3[:, 0])).nonzero().squeeze(1)
            told_3R = torch.zeros(3, len(sure_R), dtype=torch.float64)
            told_3R[:, wanted] = self._told(logits_RV[wanted], masks.part(wanted))
        told_3R[2] = sure_R
        return told_3R

    def _noted(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """As `_read`, by the kernel."""
        assert self._note is not None and masks.own_2R is not None, "there is a kernel, and it knows the settings"
        wanted = _WANTED.get(self._kind, (cast("Wanted", self._kind),))
        draw_R = masks.step_R3[:, 2].to(torch.int64) if "order" in wanted else None
        told_FR = self._note(
            logits_RV,
            self._laws.warp(masks.own_2R, self._suppressed_V, cuts=masks.cuts),
            masks.key_R2,
            masks.position_R,
            wanted=wanted,
            draw_R=draw_R,
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

    def _told(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        logits_RV = logits_RV.index_fill_(-1, self._suppressed, -torch.inf)
        token_R = (
            logits_RV.argmax(1) if self._laws.greedy else self._drawn(self._laws.law(logits_RV, masks.own_2R), masks)
        )
        law_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=1)
        sure_R = self._confidence(law_RV, token_R, masks)
        return torch.stack([token_R.to(torch.float64), law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1), sure_R])

    def _drawn(self, law_RV: Tensor, masks: Masks) -> Tensor:
        """The token of each mask by its position's noise, [R]; enumerations replace it."""
        gumbel_RV = self._field.rows(masks.slot_R, masks.position_R, masks.key_R2)
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
        return noise.uniform_rows(masks.key_R2, masks.position_R, noise.ORDER, masks.step_R3[:, 2].to(torch.int64))

    def _chance(self, logits_RV: Tensor, masks: Masks) -> Tensor:
        """The chance that each mask is revealed in this step, [R]."""
        time_R, later_R, _ = masks.step_R3.unbind(1)
        mask_R = torch.full_like(masks.position_R, self._mask_id)
        scores_RV = log_scores(logits_RV.to(torch.float64), mask_R, total_noise(time_R))
        return chance_by_scores(scores_RV, self._mask_id, self._kind == "euler", time_R, later_R)
