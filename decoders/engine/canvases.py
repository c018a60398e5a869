"""The lane of a masked-diffusion model: canvases on the device, forwards over nodes of them, the picks of asked masks.

    host      spans, asked stretches, drafts, revealed tokens  ->  one buffer down
    device    the canvas takes what was revealed               ->  rows of the spans, tokens of canvas and drafts  ->  network
              the masks in the asked stretches                 ->  output layer  ->  token, how sure  ->  the best of each stretch
    host      (how sure, position, token, log-probability)     <-  one record up

All shapes are known to the host, which counts rows, masks and picks. One more number of the record checks that its masks are
those of the device.

Legend: B samples, P spans, A asked stretches, N rows, Q positions of the stretches, R masks among them, S slots, W positions of
a canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.backbones.rows import RowShape, TokenRows
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.draws.absorbing import total_noise
from draftmill.decoders.engine import look_packing as told
from draftmill.decoders.engine.algorithm import Canvases
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.lanes import Lane, following
from draftmill.decoders.engine.look_filling import filled
from draftmill.decoders.engine.look_packing import Packed, copied, pack
from draftmill.decoders.engine.looks import COLUMN, COUNT, LEAD, LO1, MORE, POSITION, Look, Pick
from draftmill.decoders.engine.memory import Account, column_multiple
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Sent
from draftmill.decoders.engine.picks import Masks, Picks
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

_STEP: Final = 64
_CANVAS, _NUMBER, _DRAFT = range(3)
# The number of a draft where there is none: no node has it.
_NONE: Final = 1 << 30


class CanvasLane(Lane):
    """See the module's docstring. With a cache the nodes of a sample share its slot; else each has a slot of its own."""

    def __init__(self, backbone: Any, info: ModelInfo, mask_id: int, picks: Picks, canvases: Canvases) -> None:
        super().__init__(backbone, info.vocab_size, is_target=True)
        self._mask_id, self._shift, self.picks = mask_id, info.shift, picks
        self._cached, self._conditioned = canvases.cached, canvases.conditioned
        # On a CPU each node has its own columns, in the order of positions: only there bits are promised.
        self._by_node = canvases.cached and self.device.type == "cpu" and not getattr(backbone, "reads_rows", False)
        self._fresh, self._slots_each = canvases.fresh, canvases.num_slots
        self._multiple, self._num_slots, self._width = column_multiple(backbone), 0, 0
        # Of each position: its token, the number of a draft there, and the draft.
        self._canvas_3SW = torch.zeros(3, 0, 0, dtype=torch.int64, device=self.device)
        # On the device, since a number of the host would have to cross.
        self._no_draft = torch.full((), _NONE, dtype=torch.int64, device=self.device)
        self.num_nodes = 0
        """Canvases of the last forward."""

    @property
    def can_capture(self) -> bool:
        """See Lane. Without a cache whole canvases run, which keep a device busy."""
        return self._cached and self.picks.by_kernel

    # ---- slots ---------------------------------------------------------------------------------------------------

    @property
    def cell_bytes(self) -> int:
        """See Lane; with what a forward over whole canvases takes, and the canvas itself."""
        return super().cell_bytes + int(getattr(self.backbone, "row_bytes", 0)) + 8 * len(self._canvas_3SW)

    def resize(self, num_slots: int, num_columns: int) -> None:
        """See Lane; `num_columns` are those of all slots of a sample together."""
        super().resize(num_slots * self._slots_each, num_columns // self._slots_each // self._multiple * self._multiple)
        self._num_slots = num_slots
        self._fit_canvases(0)

    def _fit_canvases(self, length: int) -> None:
        held_3SW, width = self._canvas_3SW, max(self._canvas_3SW.shape[2], rounded(length, _STEP))
        if held_3SW.shape[1:] == (self._num_slots, width):
            return
        both = slice(0, min(self._num_slots, held_3SW.shape[1])), slice(0, held_3SW.shape[2])
        self._canvas_3SW = held_3SW.new_zeros(3, self._num_slots, width)
        self._canvas_3SW[_NUMBER] = _NONE
        self._canvas_3SW[:, *both] = held_3SW[:, *both]

    def start(self, sample: Sample) -> None:
        """See Lane."""
        self._fit_canvases(sample.length + 1)  # the last position is no canvas's (look_filling.py)
        self._canvas_3SW[_CANVAS, sample.slot, : sample.length] = self.put(np.array(sample.tokens, dtype=np.int64))
        self.picks.start(sample)

    def release(self, slot: int) -> None:
        """See Lane."""
        self.picks.release(slot)

    # ---- one forward ---------------------------------------------------------------------------------------------

    def look(self, samples: Sequence[Canvas], slot_B: Ints) -> Iterator[list[Pick]]:
        """Run what these samples ask, and read what they want to know; the answers in their order."""
        packed = pack(
            samples,
            slot_B,
            cached=self._cached,
            by_node=self._by_node,
            shift=self._shift,
            conditioned=self._conditioned,
            fresh=self._fresh,
        )
        self._reserve(packed)
        new_4N = self.picks.missing_noise(samples, packed.top_B, (self._num_slots, self._canvas_3SW.shape[2]))
        packed.parcel.add("noise", new_4N)
        packed.parcel.maybe("own", self.picks.own(packed.slot_R))
        self.num_nodes, self._width = packed.num_nodes, packed.width
        whole = None
        if self.graphs is not None and not getattr(self.backbone, "tainted", ()):
            whole = filled(packed, self.graphs.size, (self._canvas_3SW.shape[2] - 1, self.trash))
        record = self._looked(packed) if whole is None else self._captured(whole, packed)
        assert record[-1] == packed.num_masks, "host and device disagree about how many masks a canvas has"
        record_A4P = record[:-1].reshape(1 + packed.ahead, 4, -1)[:, :, : int(packed.size_B.sum())]
        return self._answers(record_A4P, samples, packed.size_B)

    def _looked(self, packed: Packed) -> NDArray[np.float64]:
        """Run a forward operation by operation."""
        sent = packed.parcel.send(self.device)
        return self.record(self._work(sent, packed, lambda rows: self._run(rows, packed.num_rows, packed.slot_L))[1])

    def _captured(self, whole: Packed, packed: Packed) -> NDArray[np.float64]:
        """Run a forward that was filled up as a graph."""
        # No array is as long as these: the device makes rows, positions and masks.
        sizes = whole.num_rows, whole.num_positions, whole.num_masks
        form = sizes, whole.num_sights, whole.ahead, self.picks.cuts(packed.slot_R)
        up = self.replayed(
            form,
            whole.parcel,
            lambda sent: self._work(sent, whole, self.backbone.forward),
            packed.num_rows,
            packed.slot_L,
        )
        return self.arrived(up)

    def _work(self, sent: Sent, packed: Packed, forward: Callable[[TokenRows], Tensor]) -> tuple[Tensor, Tensor]:
        """What the device does: hidden states, and the record of picks and of the number of masks. Doing it twice is harmless."""
        self._write(sent)
        hidden_ND = forward(self._rows(sent, packed))
        row_R, masks, found = self._masks(sent, packed)
        record_A4P = self.picks.read(self.logits, hidden_ND, row_R, masks, sent, packed.ahead)
        self._canvas_3SW[_NUMBER, sent["drafts"][0], sent["drafts"][1]] = self._no_draft
        return hidden_ND, torch.cat([record_A4P.flatten(), found.to(torch.float64).unsqueeze(0)])

    def settle(self, samples: Sequence[Canvas]) -> None:
        """Copy the columns that samples want copied after their answers; nothing waits for it."""
        if wanting := [sample for sample in samples if sample.copies]:
            self.backbone.copy_columns(*self.put(copied(wanting, self._width)))

    def _reserve(self, packed: Packed) -> None:
        """Make room in the cache where the nodes of a forward were not counted beforehand (lengths chosen by time).

        Nodes with slots of their own leave nothing there for the next forward. So where they need more slots or columns than
        there are, the cache gets just those: the columns of longer canvases that have left would be multiplied by the nodes.
        """
        needed = packed.num_slots, rounded(packed.num_columns + (self.graphs is not None), self._multiple)
        if self._cached:
            needed = self._shape[0], needed[1]
        if needed[0] > self._shape[0] or needed[1] > self._shape[1]:
            super().resize(*needed)

    def _write(self, sent: Sent) -> None:
        """Put what was revealed and what is drafted onto the canvases."""
        slot_N, position_N, token_N = sent["news"]
        self._canvas_3SW[_CANVAS, slot_N, position_N] = token_N
        slot_E, position_E, token_E, number_E = sent["drafts"]
        self._canvas_3SW[_NUMBER, slot_E, position_E] = number_E
        self._canvas_3SW[_DRAFT, slot_E, position_E] = token_E

    def _held(self, slot_N: Tensor, position_N: Tensor, lead_N: Tensor, more_N: Tensor) -> Tensor:
        """What stands at positions of nodes: the canvas, and those of its drafts that the node has."""
        canvas_N, number_N, draft_N = self._canvas_3SW[:, slot_N, position_N]
        return torch.where((number_N < lead_N) | (number_N == more_N), draft_N, canvas_N)

    def _rows(self, sent: Sent, packed: Packed) -> TokenRows:
        """Expand the spans to rows."""
        span_FP = sent["spans"]
        row_FN = span_FP.repeat_interleave(span_FP[COUNT], dim=1, output_size=packed.num_rows)
        step_N = torch.arange(packed.num_rows, device=self.device) - row_FN[told.BEFORE]
        position_N, column_N = row_FN[POSITION] + step_N, row_FN[COLUMN] + step_N
        if packed.trash is not None:
            position_N, column_N = (
                each_N.clamp(max=most) for each_N, most in zip((position_N, column_N), packed.trash, strict=True)
            )
        held_N = self._held(row_FN[told.SLOT], position_N, row_FN[LEAD], row_FN[MORE])
        owner_N = row_FN[told.OWNER]
        sights = row_FN[LO1 : LO1 + 2 * packed.num_sights]
        return TokenRows(
            slots_B=sent["slots"],
            owner_N=owner_N,
            line_N=row_FN[told.LINE] + step_N,
            slot_N=sent["slots"][owner_N],
            token_N=torch.where(held_N == HOLE, self._mask_id, held_N),
            position_N=position_N,
            column_N=column_N,
            low_IN=sights[::2],
            high_IN=sights[1::2],
            shape=RowShape(
                num_slots=packed.num_slots,
                num_lines=packed.num_lines,
                num_columns=packed.num_columns,
                slots=following(packed.slot_L),
                num_positions=packed.width if self._by_node else None,
            ),
            sigma_B=total_noise(sent["times"][:, 0]) if self._conditioned else None,
        )

    def _masks(self, sent: Sent, packed: Packed) -> tuple[Tensor, Masks, Tensor]:
        """The rows of the asked masks, [R], what is known of them, and how many there are in truth.

        Of the Q positions of all stretches the R that hold masks, in their order: by a running sum, without looking at the data.
        """
        asked_FA, num_masks = sent["asked"], packed.num_masks
        which_Q = torch.arange(asked_FA.shape[1], device=self.device).repeat_interleave(
            asked_FA[-1], output_size=packed.num_positions
        )
        own_FQ = asked_FA[:, which_Q]
        position_Q = own_FQ[told.FIRST] + torch.arange(packed.num_positions, device=self.device) - own_FQ[told.EARLIER]
        if packed.trash is not None:
            position_Q = position_Q.clamp(max=packed.trash[0])
        held_Q = self._held(own_FQ[told.OF_SLOT], position_Q, own_FQ[told.OF_LEAD], own_FQ[told.OF_MORE])
        count_Q = (held_Q == HOLE).cumsum(0)
        place_Q = torch.where(held_Q == HOLE, count_Q - 1, num_masks).clamp(max=num_masks)
        each_Q = torch.arange(packed.num_positions, device=self.device)
        index_R = each_Q.new_zeros(num_masks + 1).scatter_(0, place_Q, each_Q)[:num_masks]
        own_FR, position_R, stretch_R = own_FQ[:, index_R], position_Q[index_R], which_Q[index_R]
        if packed.trash is not None:
            stretch_R = torch.where(
                torch.arange(num_masks, device=self.device) < count_Q[-1], stretch_R, asked_FA.shape[1]
            )
        masks = Masks(
            own_2R=sent.get("own"),
            cuts=self.picks.cuts(packed.slot_R),
            slot_R=own_FR[told.OF_SLOT],
            position_R=position_R,
            key_R2=own_FR[told.KEY : told.KEY + 2].T,
            stretch_R=stretch_R,
            step_R3=sent["steps"][which_Q[index_R]],
        )
        return own_FR[told.ROW] + (position_R - self._shift).clamp(min=0), masks, count_Q[-1]

    def _answers(
        self, record_A4P: NDArray[np.float64], samples: Sequence[Canvas], size_B: Ints
    ) -> Iterator[list[Pick]]:
        """Cut the picks into answers: those of each sample's own step, then of the steps ahead that it wants."""
        steps, first = list[list[Pick]](), 0
        for worth_P, position_P, token_P, log_p_P in record_A4P:
            ints = (position_P.astype(np.int64).tolist(), token_P.astype(np.int64).tolist())
            steps.append(list(zip(worth_P.tolist(), *ints, log_p_P.tolist(), strict=True)))
        aheads = [sample.ask.ahead for sample in samples if isinstance(sample.ask, Look)]
        for size, ahead in zip(size_B.tolist(), aheads, strict=True):
            yield [pick for step in steps[: 1 + ahead] for pick in step[first : first + size]]
            first += size


def canvas_lane(setup: Setup, canvases: Canvases, account: Callable[[], Account]) -> CanvasLane:
    """The lane of a masked-diffusion model under these settings."""
    backbone, info = setup.backbone, setup.info
    if info.mask_id is None:
        raise ValueError(f"decoder.kind: models of family {info.family!r} have no mask to start from")
    picks = Picks(
        setup.sampling,
        info.suppressed,
        kind=canvases.confidence,
        fresh=canvases.fresh,
        warped=canvases.warped,
        num_slots=setup.max_rows,
        vocab_size=info.vocab_size,
        mask_id=info.mask_id,
        device=backbone.device,
        dtype=backbone.dtype,
        account=account,
    )
    return CanvasLane(backbone, info, info.mask_id, picks, canvases)
