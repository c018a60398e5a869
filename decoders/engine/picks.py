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

The host sorts what the record says of the masks, and takes the best of each stretch:

    masks         a    b    c  |  d    e          two stretches, three masks and two
    sure          .2   .9   .9 |  .4   .7
    picks         b    c       |  e               the best two, equals by position; the best one

Legend: R asked masks, A stretches, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.absorbing import chance_by_scores, chance_by_total, log_scale, log_scores, total_noise
from draftmill.decoders.draws.confidence import confidence
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.answers import NoiseAnswers
from draftmill.decoders.engine.fields import NoiseField
from draftmill.decoders.engine.lanes import Lane, Reading
from draftmill.decoders.engine.look_packing import AskedMasks
from draftmill.decoders.engine.looks import Pick
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.packing import repeated
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
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
    """The masks that one forward reads: slot, position and key of each.

    `own_2R` are their temperatures and top-p, where any sample has its own; `cuts` says whether any top-p cuts. `time_2R` are the
    time and the next time, `draw_R` the number of the step's draws. The draws are those of the step `ahead` of that.
    """

    own_2R: Tensor | None
    cuts: bool
    slot_R: Tensor
    position_R: Tensor
    key_R2: Tensor
    draw_R: Tensor
    time_2R: Tensor
    ahead: int = 0

    def numbers(self) -> Tensor:
        """The numbers of the masks' draws, int64 [R]."""
        return self.draw_R + self.ahead

    def part(self, rows: slice | Tensor) -> Masks:
        """Some of them; a tensor of indices only on the CPU."""
        return replace(
            self,
            own_2R=None if self.own_2R is None else self.own_2R[:, rows],
            slot_R=self.slot_R[rows],
            position_R=self.position_R[rows],
            key_R2=self.key_R2[rows],
            draw_R=self.draw_R[rows],
            time_2R=self.time_2R[:, rows],
        )


class Picks(NoiseAnswers):
    """Reads masks under the sampling settings of their samples; the algorithm's canvases say how sure a token is."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, account: Callable[[], Account]) -> None:
        super().__init__(setup, algorithm, account=account)
        canvases, mask_id = algorithm.canvases, setup.info.mask_id
        assert canvases is not None and mask_id is not None, "a model with masks"
        self._kind, self._fresh, self._warped = canvases.confidence, canvases.fresh, canvases.warped
        self._mask_id = mask_id
        self._note = find_notes(setup.backbone.device, setup.backbone.dtype)
        self._suppressed_V = marks(setup.info.suppressed, self._vocab_size, self._device)
        self._field = NoiseField(self._vocab_size, self._device, fresh=self._fresh)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def start(self, sample: Sample) -> None:
        """See Answers."""
        super().start(sample)
        self._field.start(sample.slot)

    # ---- picks ---------------------------------------------------------------------------------------------------

    def looked(self, lane: Lane, asked: AskedMasks, parcel: Parcel) -> Reading[list[Pick]]:
        """Plan the picks of all samples that look at their canvases, in their order."""
        size = None if self._note is None else self._captured_size(lane, asked.num_masks)
        ahead, cuts = max(asked.ahead_B), self._rows.cuts(asked.slot_R)
        keeps = self._note is None and not self._rows.greedy
        new_2N = self._field.missing(asked.slot_R, asked.position_R, self._account().noise) if keeps else None
        new = None if new_2N is None else parcel.enclose(np.vstack([new_2N, self._places.key_S2[new_2N[0]].T]))
        own_2R = self._rows.own(asked.slot_R) if self._note is None else self._rows.each(asked.slot_R)
        own = None if own_2R is None else parcel.enclose(own_2R, size=size, fill=1)
        draw_R = asked.draw_R if self._fresh or self._kind in SCORED else np.zeros_like(asked.draw_R)
        each = asked.slot_R, asked.position_R, self._places.key_S2[asked.slot_R].T, draw_R, asked.time_R2.T
        names = [parcel.enclose(one, size=size) for one in each]

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            if new is not None and new_2N is not None:
                self._field.fill(new_2N, sent[new])
            slot_R, position_R, key_2R, draw_R, time_2R = (sent[name] for name in names)
            own_2R = None if own is None else sent[own]
            masks = Masks(own_2R, cuts, slot_R, position_R, key_2R.T, draw_R, time_2R)
            read = [
                self._read(lane.logits(hidden_RD[part]), masks.part(part), ahead)
                for part in self._parts(len(hidden_RD))
            ]
            return torch.cat(read, 2) if len(read) > 1 else read[0]

        def read(record: NDArray[np.float64]) -> Iterator[list[Pick]]:
            return _surest(record.reshape(1 + ahead, 3, -1)[:, :, : asked.num_masks], asked)

        form = None if size is None else ("looked", ahead, cuts)
        return Reading(work, read, form=form, num_rows=size)

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
            wanted = ((sure_R > 0) | (masks.time_2R[1] >= masks.time_2R[0])).nonzero().squeeze(1)
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
            self._rows.warp(masks.own_2R, self._suppressed_V, cuts=masks.cuts),
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
                time_R, later_R = masks.time_2R
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
        drawn_RV = None if self._rows.greedy else self._rows.law(logits_RV, own_2R)
        law_RV = torch.log_softmax(logits_RV.to(torch.float64), dim=1)
        weighed_RV = law_RV
        if self._warped and not self._rows.greedy:
            weighed_RV = self._rows.cut(logits_RV, own_2R, law_RV)
        told = []
        for masks in steps:
            token_R = logits_RV.argmax(1) if drawn_RV is None else self._drawn(drawn_RV, masks)
            log_p_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)
            told.append(torch.stack([token_R.to(torch.float64), log_p_R, self._confidence(weighed_RV, token_R, masks)]))
        return torch.stack(told)

    def _drawn(self, law_RV: Tensor, masks: Masks) -> Tensor:
        """The token of each mask by its position's noise, [R]; enumerations replace it."""
        gumbel_RV = self._field.rows(masks.slot_R, masks.position_R, masks.key_R2, masks.numbers())
        return self._rows.draw(law_RV, gumbel_RV, masks.own_2R)

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
        time_R, later_R = masks.time_2R
        mask_R = torch.full_like(masks.position_R, self._mask_id)
        scores_RV = log_scores(logits_RV.to(torch.float64), mask_R, total_noise(time_R))
        return chance_by_scores(scores_RV, self._mask_id, self._kind == "euler", time_R, later_R)


def _surest(told_A3R: NDArray[np.float64], asked: AskedMasks) -> Iterator[list[Pick]]:
    """The picks of each sample: those of each stretch, step after step."""
    stretch_R = np.repeat(np.arange(len(asked.size_A)), asked.size_A)
    first_A = asked.size_A.cumsum() - asked.size_A
    place_P = np.repeat(first_A, asked.best_A) + repeated(asked.best_A.cumsum() - asked.best_A, asked.best_A)
    steps = list[list[Pick]]()
    for token_R, log_p_R, sure_R in told_A3R:
        best_P = np.lexsort((-sure_R, stretch_R))[place_P]
        position_P, token_P = asked.position_R[best_P], token_R[best_P].astype(np.int64)
        steps.append(
            list(
                zip(
                    (-sure_R[best_P]).tolist(),
                    position_P.tolist(),
                    token_P.tolist(),
                    log_p_R[best_P].tolist(),
                    strict=True,
                )
            )
        )
    first = 0
    for size, ahead in zip(asked.size_B.tolist(), asked.ahead_B, strict=True):
        yield [pick for step in steps[: 1 + ahead] for pick in step[first : first + size]]
        first += size
