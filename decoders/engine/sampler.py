"""From hidden states of sampled rows to one record: tokens, log-probabilities, notes; and which drafts hold.

Two acceptance rules, of which decoders know nothing. Coupled: drafts and target read the same noise, each token is the target's
own, and a draft holds if it equals it, which the host sees. Rejection: a draft drawn from q holds with probability min(1, p/q).

    rows of a sample     JUDGE a   JUDGE b   JUDGE c   JUDGE -           three drafts, and the row after them
    coupled              x         y         z         w                 all are drawn; a = x and b = y hold: (2, [x, y, z, w])
    rejection            holds     holds     residual                    (2, [a, b, r, ...])

Under the rejection rule a draft leaves log q(draft) and its row's hidden state in a cell. q is needed only where a chain breaks:
there it is computed again from that state, which gives the same bits. At temperature 0 both rules give the maxima; S2D2's public
code judges by the untempered distributions there, which `Algorithm.by_ratio` asks for.

On a CPU the noise that several forwards read is computed once (`NoiseCache`): it costs as much as a small model's forward. A
position keeps its noise until its token is decided: drafts are drawn by it, then the target's own token. Elsewhere kernels make
noise as they draw.

    cell      0   1   2   3   4   5        six cells a slot: rank r is kept in cell r % 6, until another rank needs the cell
    rank      6   7   2   3   4   5

Sources: Leviathan et al., 2023; Chen et al., 2023; ASSD, Algorithm 1; S2D2 (2026), Algorithm 3.

Legend: R sampled rows, V vocabulary, B samples, D drafts, S slots, C cells, F fields of a row: its token,
log-probability and notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.draws import keys, noise
from draftmill.decoders.draws.sampling import inverse_cdf_draw, log_law, residual
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Answer, Ints, SampleFrom
from draftmill.decoders.engine.batch import Batch, Rule
from draftmill.decoders.engine.memory import MemoryPlan
from draftmill.decoders.engine.samples import Sample, SlotTable
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.shaping import MaskTable
from draftmill.decoders.kernels.find import find_sampling
from draftmill.decoders.kernels.sampling_reference import Warp, measure, sample

_LEAST_ROWS: Final = 64
_AT_ONCE: Final = 1 << 16
"""How many noise values to compute at once: for a few values the overhead dominates."""
_MOST_AHEAD: Final = 15
_COLUMN_STEP: Final = 64

Logits = Callable[[Tensor], Tensor]
"""Hidden states [R, D] -> raw logits [R, V]."""


# ---- noise -----------------------------------------------------------------------------------------------------------


class NoiseCache:
    """Keeps `window` ranks of each slot and, where the vocabulary is small, some after them. Without a window whole canvases
    are kept. With `fresh` each draw has noise of its own, and nothing is kept. The host knows what each cell holds."""

    def __init__(self, slots: SlotTable, vocab_size: int, window: int | None, *, fresh: bool) -> None:
        self._slots, self._vocab_size, self._fresh = slots, vocab_size, fresh
        self._ahead = 0 if window is None else min(_MOST_AHEAD, _AT_ONCE // vocab_size)
        self._window, self._num_cells = window, 0 if window is None else window + self._ahead
        self._held_SC: Ints = np.full((0, self._num_cells), -1)  # the rank that each cell holds; -1: none
        self._noise_CV = torch.zeros(0, vocab_size)

    def resize(self, num_slots: int, most_bytes: int) -> None:
        """Keep noise for so many slots, as far as it fits; what is kept stays. A cell is allocated when a row first needs one."""
        most = most_bytes // max(1, 4 * self._num_cells * self._vocab_size) if self._num_cells else num_slots
        held_SC, count = self._held_SC, min(num_slots, most)
        self._held_SC = np.full((count, self._num_cells), -1)
        if len(self._noise_CV):
            both = min(count, len(held_SC))
            self._held_SC[:both] = held_SC[:both]
            self._allocate(both * self._num_cells)

    def _allocate(self, num_kept: int) -> None:
        kept_CV = self._noise_CV[:num_kept]
        self._noise_CV = torch.zeros(self._held_SC.size, self._vocab_size)
        self._noise_CV[: len(kept_CV)] = kept_CV

    def start(self, slot: int) -> None:
        """A new sample: nothing of its noise is kept."""
        self._held_SC[slot : slot + 1] = -1

    def rows(self, b: Batch, part: slice, most_bytes: int, ahead: int) -> Tensor:
        """The noise of some sampled rows, of the draw so many ahead, [R, V]."""
        slot_R, rank_R = b.slot_R[part], b.rank_R[part]
        if self._fresh or b.once:
            return self._compute(slot_R, rank_R, b.host_draw_R[part] + ahead if self._fresh else np.zeros_like(rank_R))
        if self._window is None:
            self._fit_canvases(int(rank_R.max(initial=0)) + 1, most_bytes)
        near_R = slot_R < len(self._held_SC) if self._num_cells else np.zeros(len(slot_R), dtype=np.bool_)
        if near_R.all():
            return self._read(slot_R, rank_R)
        noise_RV = torch.empty(len(slot_R), self._vocab_size)
        noise_RV[near_R] = self._read(slot_R[near_R], rank_R[near_R])
        noise_RV[~near_R] = self._compute(slot_R[~near_R], rank_R[~near_R], np.zeros(int((~near_R).sum()), np.int64))
        return noise_RV

    def _fit_canvases(self, length: int, most_bytes: int) -> None:
        if length <= self._num_cells:
            return
        count = len(self._held_SC)
        self._num_cells = rounded(length, _COLUMN_STEP)
        if count * self._num_cells * self._vocab_size * 4 > most_bytes:
            self._num_cells = 0
        self._held_SC = np.full((count, self._num_cells), -1)
        self._noise_CV = torch.zeros(0, self._vocab_size)

    def _read(self, slot_R: Ints, rank_R: Ints) -> Tensor:
        if len(self._noise_CV) < self._held_SC.size:
            self._allocate(0)
        missing_R = self._held_SC[slot_R, rank_R % self._num_cells] != rank_R
        if missing_R.any():
            self._fill(slot_R[missing_R], rank_R[missing_R])
        noise_RV = self._noise_CV.index_select(0, torch.from_numpy(slot_R * self._num_cells + rank_R % self._num_cells))
        lost_R = self._held_SC[slot_R, rank_R % self._num_cells] != rank_R
        if lost_R.any():  # ranks of one forward that share a cell: rows of a probe, or a window that is too small
            none_L = np.zeros(int(lost_R.sum()), np.int64)
            noise_RV[torch.from_numpy(lost_R)] = self._compute(slot_R[lost_R], rank_R[lost_R], none_L)
        return noise_RV

    def _fill(self, slot_N: Ints, rank_N: Ints) -> None:
        """Compute what is missing; where this is cheap also the ranks after the last one of each slot."""
        more = min(self._ahead, _AT_ONCE // (len(slot_N) * self._vocab_size) - 1)
        if more > 0:
            most_S = np.full(len(self._held_SC), -1)
            np.maximum.at(most_S, slot_N, rank_N)
            slots = np.flatnonzero(most_S >= 0)
            further_N = (most_S[slots, None] + np.arange(1, more + 1)).reshape(-1)
            others_N = np.repeat(slots, more)
            inside_N = further_N < self._slots.length_S[others_N]
            slot_N, rank_N = np.append(slot_N, others_N[inside_N]), np.append(rank_N, further_N[inside_N])
        cell_N, first_N = np.unique(slot_N * self._num_cells + rank_N % self._num_cells, return_index=True)
        slot_N, rank_N = slot_N[first_N], rank_N[first_N]
        self._noise_CV[torch.from_numpy(cell_N)] = self._gumbel(slot_N, rank_N, np.zeros_like(rank_N))
        self._held_SC[slot_N, rank_N % self._num_cells] = rank_N

    def _compute(self, slot_R: Ints, rank_R: Ints, draw_R: Ints) -> Tensor:
        """Noise that is not kept: that of each different (slot, rank, draw) is computed once."""
        width, most = int(rank_R.max(initial=0)) + 1, int(draw_R.max(initial=0)) + 1
        number_R = (slot_R * width + rank_R) * most + draw_R
        _, first_N, which_R = np.unique(number_R, return_index=True, return_inverse=True)
        noise_NV = self._gumbel(slot_R[first_N], rank_R[first_N], draw_R[first_N])
        return noise_NV if len(first_N) == 1 == len(which_R) else noise_NV[torch.from_numpy(which_R.reshape(-1))]

    def _gumbel(self, slot_N: Ints, rank_N: Ints, draw_N: Ints) -> Tensor:
        order_SW = self._slots.order_SW
        place_N = rank_N if order_SW is None else order_SW[slot_N, rank_N]
        keys_N2 = torch.from_numpy(self._slots.key_S2[slot_N])
        return noise.gumbel_rows(keys_N2, torch.from_numpy(place_N), self._vocab_size, draws_R=torch.from_numpy(draw_N))


# ---- tokens ----------------------------------------------------------------------------------------------------------


class Sampler:
    """Draws and judges by the samples' own numbers, for all rows of a forward at once; enumerations replace it."""

    def __init__(self, setup: Setup, algorithm: Algorithm, slots: SlotTable, plan: MemoryPlan) -> None:
        sampling, info, backbone = setup.sampling, setup.info, setup.backbone
        device, dtype = backbone.device, backbone.dtype
        self.algorithm, self.device, self._slots, self.plan = algorithm, device, slots, plan
        self._vocab_size, self._mask_id = info.vocab_size, -1 if info.mask_id is None else info.mask_id
        self._law_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._job = sampling
        # What S2D2's routers and public code read at temperature 0.
        self._warm = sampling.model_copy(update={"temperature": 1.0})
        self._greedy = sampling.temperature == 0.0
        self._cuts = not (sampling.top_p is None and sampling.top_k is None) or bool(sampling.min_p)
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=device)
        self._never = frozenset(info.suppressed)
        marked = torch.zeros(info.vocab_size, dtype=torch.bool)
        marked[list(info.suppressed)] = True
        self._suppressed_V = marked.to(device)
        self.by_ratio = sampling.acceptance == "rejection" if algorithm.by_ratio is None else algorithm.by_ratio
        # The distribution that S2D2's measure is of is then another one than that of the other notes.
        self._of_two = self._greedy and self._cuts and algorithm.measured
        self.kernel = None if self._of_two or (self.by_ratio and algorithm.notes) else find_sampling(device, dtype)
        if backbone.exact and device.type != "cpu" and (why := self._drawn_by_torch(setup)):
            raise ValueError(
                f"model.exact: true, but {why}, which torch's operations draw on a GPU, and their sums over the vocabulary "
                "depend on the number of rows; decode on a CPU in float32 (model.device: cpu), or leave it out"
            )
        self.notes = algorithm.notes
        self._wanted = tuple(dict.fromkeys(self.notes))
        order = [0, 1, *(2 + self._wanted.index(name) for name in self.notes)]
        self._order_F = None if self._wanted == self.notes else torch.tensor(order, device=device)
        window = None if algorithm.kind == "masked" else algorithm.window
        self._noise = NoiseCache(slots, info.vocab_size, window, fresh=algorithm.fresh)
        # Of each cell the hidden state (where a decoder names distributions: these) of a draft, and log q(draft).
        self._states_CD = torch.zeros(1, 0, device=device)
        self._log_q_C = torch.zeros(1, dtype=torch.float64, device=device)
        self.masks = MaskTable(info.vocab_size, info.mask_id, device)
        # Whether cells keep whole distributions: a draft's constraint is another one than that of the row that judges it.
        self._keeps_whole = algorithm.names_laws or setup.has_constraints
        self.drafts_by: Logits | None = None
        """The output layer of the model whose drafts are judged: q is computed again by it."""
        if self.by_ratio and algorithm.keeps_laws:
            drafter = setup.drafter or backbone
            width, kept = (info.vocab_size, self._law_dtype) if self._keeps_whole else (drafter.width, drafter.dtype)
            self._states_CD = torch.zeros(1, width, dtype=kept, device=device)
        self.noted_C = torch.zeros(2 * setup.max_rows + 1, dtype=torch.int64, device=device)
        """The tokens drafted at the last two ranks of each slot, and one for dead rows (batch.note_cells)."""

    def _drawn_by_torch(self, setup: Setup) -> str:
        """What of a job no kernel draws; empty if nothing."""
        if self.by_ratio:
            return "drafts are judged by the rejection rule (sampling.acceptance: rejection, or this decoder's own)"
        if setup.has_constraints or setup.sampling.min_p:
            return "this job has constraints, penalties or min_p"
        return (
            "" if self.kernel is not None else "this job has distributions or a device without the kernel for sampling"
        )

    # ---- slots ---------------------------------------------------------------------------------------------------

    def rule(self, *, is_target: bool) -> Rule:
        """How the rows of a model are drawn."""
        return Rule(
            by_ratio=self.by_ratio,
            window=self.algorithm.window,
            banks=self.algorithm.banks,
            sends_settings=self.kernel is not None,
            num_notes=len(self.notes) * is_target,
            ahead=self.algorithm.ahead * is_target,
            as_arrays=is_target and (self.algorithm.kind == "masked" or self.algorithm.estimates),
        )

    def start(self, sample: Sample) -> None:
        """A new sample has its slot."""
        self._noise.start(sample.slot)

    def stays(self, num_slots: int) -> bool:
        """Whether a resize to this leaves its memory where it is."""
        return self._cells_of(num_slots) == len(self._states_CD) or not self._states_CD.shape[1]

    def _cells_of(self, num_slots: int) -> int:
        """How many cells there are with so many slots; on a device they stay while there are any slots: graphs read them."""
        cells = num_slots * self._slot_cells + 1
        return max(cells, len(self._states_CD)) if num_slots and self.device.type != "cpu" else cells

    def resize(self, num_slots: int) -> None:
        """Make room for so many slots; if memory runs out, nothing changes."""
        cells = self._cells_of(num_slots)
        if cells != len(self._states_CD) and self._states_CD.shape[1]:
            states_CD = self._states_CD.new_zeros(cells, self._states_CD.shape[1])
            log_q_C = self._log_q_C.new_zeros(cells)
            both = min(cells, len(self._states_CD)) - 1
            states_CD[:both], log_q_C[:both] = self._states_CD[:both], self._log_q_C[:both]
            self._states_CD, self._log_q_C = states_CD, log_q_C
        self._noise.resize(num_slots, self.plan.noise)

    @property
    def _slot_cells(self) -> int:
        return self.algorithm.window * self.algorithm.banks

    @property
    def dead_cell(self) -> int:
        """The cell that nobody reads."""
        return len(self._states_CD) - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes that are kept for a slot, apart from noise; twice, since both sizes exist while slots are added."""
        width = self._states_CD.shape[1]
        return 2 * self._slot_cells * (width * self._states_CD.element_size() + 8) if width else 0

    def parts(self, num_rows: int) -> list[slice]:
        """Cuts rows into parts whose logits are held at once; one part where there are no rows. No part is made smaller than a
        product's least rows, which it would be padded to."""
        step = max(_LEAST_ROWS, self.plan.logits // (self._vocab_size * self._law_dtype.itemsize))
        return [slice(first, first + step) for first in range(0, max(num_rows, 1), step)]

    # ---- one record ----------------------------------------------------------------------------------------------

    def record(self, logits: Logits, hidden_RD: Tensor, b: Batch, *, is_target: bool) -> Tensor:
        """The fields of all sampled rows, flat float64: [A, F, R], then under the rejection rule the drafts that hold, [B]."""
        if b.by_ratio:
            return self._by_ratio(logits, hidden_RD, b, is_target=is_target)
        fields = [
            self.draw_part(logits(hidden_RD[part]), b, part, is_target=is_target) for part in self.parts(len(hidden_RD))
        ]
        fields_AFR = fields[0] if len(fields) == 1 else torch.cat(fields, 2)
        self._note(b, fields_AFR[0, 0].to(torch.int64), slice(None))
        return fields_AFR.flatten()

    def draw_part(self, logits_RV: Tensor, b: Batch, part: slice, *, is_target: bool) -> Tensor:
        """Draw the tokens of some rows by the coupled rule, also those ahead; the fields of the rows, [A, F, R]."""
        gumbel = None
        if self.kernel is None and self.device.type == "cpu":
            gumbel = partial(self._noise.rows, b, part, self.plan.noise)
        warp = self._warp(b, part)
        options = dict[str, Any](
            key_R2=b.key_2R[:, part].T,
            position_R=b.place_R[part],
            wanted=self._wanted if is_target else (),
            warped=self.algorithm.warped,
            draw_R=b.draw_R[part] if self.algorithm.fresh else None,
            scored_R=None if b.scored_R is None else b.scored_R[part],
            mask_id=self._mask_id,
            ahead=self.algorithm.ahead if is_target else 0,
            gumbel=gumbel,
        )
        fields_AFR = (self.kernel or sample)(logits_RV, warp.for_kernels if self.kernel else warp, **options)
        if self.kernel and not warp.fits_kernels:
            # Row by row: what draws a row, and so its bits, depends on no other row.
            fields_AFR = torch.where(warp.unknown_R, sample(logits_RV, warp, **options), fields_AFR)
        if not is_target:
            return fields_AFR
        if self._order_F is not None:
            fields_AFR = fields_AFR.index_select(1, self._order_F)
        if self._of_two:
            law_RV = log_law(warp.shape(logits_RV).to(torch.float64), self._warm)
            fields_AFR[0, -1] = measure(self.notes[-1], law_RV, fields_AFR[0, 0].to(torch.int64))
        if b.num_tops:
            tops_FR = torch.stack(self._tops(warp.suppress(logits_RV), b.num_tops))
            fields_AFR = torch.cat([fields_AFR, tops_FR.expand(len(fields_AFR), -1, -1)], 1)
        return fields_AFR

    @staticmethod
    def _tops(logits_RV: Tensor, count: int) -> list[Tensor]:
        """The model's own best tokens and their log-probabilities, float64 [R] each: 2 x `count` fields."""
        best = torch.log_softmax(logits_RV, dim=-1).topk(count, dim=-1)
        return [*best.indices.T.to(torch.float64), *best.values.T.to(torch.float64)]

    def _warp(self, b: Batch, part: slice | Tensor) -> Warp:
        warp = Warp(
            self._job,
            None if b.own_4R is None else b.own_4R[:, part],
            b.cuts,
            self._suppressed,
            self._suppressed_V,
            has_min_p=b.has_min_p,
            most_k=b.most_k,
            token_ER=None if b.token_ER is None else b.token_ER[:, part],
            change_3ER=None if b.change_3ER is None else b.change_3ER[:, :, part],
        )
        if b.allowed_R is None:
            return warp
        cell_R = b.allowed_R[part]
        return replace(warp, floor_RV=self.masks.floor(cell_R), limited_R1=(cell_R > 0).unsqueeze(1))

    def _note(self, b: Batch, token_R: Tensor, part: slice | Tensor) -> None:
        """Keep tokens where the next rows of their slots take them from the device."""
        if b.note_R is not None:
            self.noted_C.index_copy_(0, b.note_R[part], token_R)

    # ---- the rejection rule --------------------------------------------------------------------------------------

    def _by_ratio(self, logits: Logits, hidden_RD: Tensor, b: Batch, *, is_target: bool) -> Tensor:
        """Draw drafts and keep what they were drawn from; judge the chains."""
        parts = self.parts(len(hidden_RD))
        weighed = [
            self._weigh_rows(logits(hidden_RD[part]), b, part, alone=len(parts) == 1, is_target=is_target)
            for part in parts
        ]
        fields_FR = torch.cat([fields for fields, *_ in weighed], 1)
        log_p_R = torch.cat([log_p for _, log_p, *_ in weighed])
        held = weighed[0][2:] if len(weighed) == 1 else None
        accepted_B = torch.zeros_like(b.size_B)
        if b.any_chain:
            fields_FR, accepted_B = self._judge_chains(logits, hidden_RD, b, fields_FR, log_p_R, held)
        if b.row_D.shape[0] and self._states_CD.shape[1]:
            states_DD = hidden_RD[b.row_D]
            if self._keeps_whole:
                states_DD = self._compute_again(logits, hidden_RD, b, b.row_D, held)[1]
            # At temperature 0 S2D2's code takes the model's own probability, which is a note.
            log_q_D = fields_FR[2, b.row_D].log() if self._greedy and self.algorithm.by_ratio else log_p_R[b.row_D]
            self._keep(b.cell_R[b.row_D], states_DD, log_q_D)
        self._note(b, fields_FR[0].to(torch.int64), slice(None))
        return torch.cat([fields_FR.flatten(), accepted_B.to(torch.float64)])

    def _weigh_rows(
        self, logits_RV: Tensor, b: Batch, part: slice, *, alone: bool, is_target: bool
    ) -> tuple[Tensor, ...]:
        """The fields of rows, [F, R]; log p of their tokens under the distributions that judge; the logits, and what is drawn
        from. Tokens are those drafted, or the drafts that a row judges. `alone`: these are all rows."""
        warp = self._warp(b, part)
        logits_RV = warp.suppress(logits_RV)
        law_RV = self.law(logits_RV, warp)
        p_RV = self._judging(logits_RV, law_RV, warp)
        token_R, uniform_R = b.draft_R[part], b.uniform_R[part]
        if not alone:
            is_given_R = b.judged_R[part] > 0
            if b.scored_R is not None:
                is_given_R = is_given_R | (b.scored_R[part] >= 0)
            token_R = torch.where(is_given_R, token_R, self._draw_from(law_RV, uniform_R))
        elif b.row_D.shape[0]:
            token_R = token_R.index_copy(0, b.row_D, self._draw_from(law_RV[b.row_D], uniform_R[b.row_D]))
        fields = [token_R, torch.zeros_like(uniform_R)]
        if is_target:
            fields[1] = self._log_p(logits_RV, law_RV, warp, token_R)
            laws = [law_RV] * len(self.notes)
            if self.algorithm.measured:
                laws[-1] = p_RV
            fields += [measure(name, law, token_R) for name, law in zip(self.notes, laws, strict=True)]
            fields += self._tops(logits_RV, b.num_tops) if b.num_tops else []
        log_p_R = p_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return torch.stack([field.to(torch.float64) for field in fields]), log_p_R, logits_RV, law_RV

    def _draw_from(self, law_RV: Tensor, uniform_R: Tensor) -> Tensor:
        return law_RV.argmax(-1) if self._greedy else inverse_cdf_draw(law_RV.exp(), uniform_R)

    def law(self, logits_RV: Tensor, warp: Warp) -> Tensor:
        """The distributions that tokens are drawn from; at temperature 0 the model's own in float64, if ratios mean something."""
        if self._greedy and self.algorithm.by_ratio:
            return torch.log_softmax(warp.shape(logits_RV).to(torch.float64), dim=-1)
        return warp.law(logits_RV, cut=True)

    def _judging(self, logits_RV: Tensor, law_RV: Tensor, warp: Warp) -> Tensor:
        """The distributions that judge: at temperature 0 those of temperature 1 after top-k and top-p."""
        if self._greedy and self.algorithm.by_ratio and self._cuts:
            return log_law(warp.shape(logits_RV).to(torch.float64), self._warm)
        return law_RV

    def _log_p(self, logits_RV: Tensor, law_RV: Tensor, warp: Warp, token_R: Tensor) -> Tensor:
        """Log-probabilities under the model itself."""
        plain = warp.is_plain and self._job.top_p is None and not self._greedy
        plain_RV = law_RV if plain else torch.log_softmax(logits_RV, dim=-1)
        return plain_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)

    def _keep(self, cell_D: Tensor, states_DD: Tensor, log_q_D: Tensor) -> None:
        self._states_CD[cell_D] = states_DD.to(self._states_CD.dtype)
        self._log_q_C[cell_D] = log_q_D

    def _judge_chains(
        self,
        logits: Logits,
        hidden_RD: Tensor,
        b: Batch,
        fields_FR: Tensor,
        log_p_R: Tensor,
        held: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The fields of rows, with the token after the drafts of each chain that hold; and how many these are, [B]. `held`
        are the logits and distributions of all rows, where they fit into memory at once."""
        owner_R, size_B, judged_R = b.owner_R, b.size_B, b.judged_R > 0
        # Where no distribution is kept, rows follow drafts that nobody judges: their token is drawn here, and q is not read.
        has_q = not b.is_sure and self._states_CD.shape[1] > 0
        log_q_R = self._log_q_C[b.cell_R] if has_q else torch.zeros_like(log_p_R)
        good_R = judged_R & (b.accept_R < (self.algorithm.temper * (log_p_R - log_q_R)).exp())
        row_R, size_R = torch.arange(len(hidden_RD), device=good_R.device), size_B[owner_R]
        step_R = row_R - b.first_B[owner_R]
        stops_R = torch.where(good_R | (step_R >= size_R), size_R, step_R)
        accepted_B = size_B.scatter_reduce(0, owner_R, stops_R, "amin")
        # Where every draft holds and no row is left, or there is no chain, the token drawn here means nothing.
        last_B = (b.first_B + torch.minimum(accepted_B, (size_B - 1).clamp(min=0))).clamp(max=len(hidden_RD) - 1)
        refused_B = judged_R[last_B]
        logits_BV, law_BV, warp = self._compute_again(logits, hidden_RD, b, last_B, held)
        p_BV = self._judging(logits_BV, law_BV, warp)
        if has_q:
            q_BV = self._states_CD[b.cell_R[last_B]]
            if not self._keeps_whole:
                assert self.drafts_by is not None, "drafts come from a model"
                q_BV = self.law(warp.suppress(self.drafts_by(q_BV)), warp)
        else:
            q_BV = torch.full_like(p_BV, -torch.inf).scatter_(1, b.draft_R[last_B].unsqueeze(1), 0.0)
        mass_BV = torch.where(refused_B.unsqueeze(1), residual(p_BV, q_BV), law_BV.exp())
        token_B = inverse_cdf_draw(mass_BV, b.uniform_R[last_B])
        if self._greedy:
            token_B = torch.where(refused_B, token_B, law_BV.argmax(-1))
        new_2B = torch.stack([token_B.to(torch.float64), self._log_p(logits_BV, law_BV, warp, token_B)])
        is_next_R = (row_R == last_B[owner_R]) & (accepted_B < size_B)[owner_R]
        fields_2R = torch.where(is_next_R, new_2B.index_select(1, owner_R), fields_FR[:2])
        return torch.cat([fields_2R, fields_FR[2:]]), accepted_B

    def _compute_again(
        self, logits: Logits, hidden_RD: Tensor, b: Batch, row_B: Tensor, held: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor, Warp]:
        """Logits and distributions of some rows again: those held, else computed once more, which gives the same bits."""
        warp = self._warp(b, row_B)
        if held is not None:
            return held[0][row_B], held[1][row_B], warp
        logits_BV = warp.suppress(logits(hidden_RD[row_B]))
        return logits_BV, self.law(logits_BV, warp), warp

    # ---- drafts that need no forward of their own ----------------------------------------------------------------

    def drafts(self, logits_RV: Tensor, hidden_RD: Tensor, b: Batch, part: slice) -> Tensor:
        """A draft from each row's logits, [R]; the rejection rule keeps what it was drawn from."""
        if not b.by_ratio:
            return self.draw_part(logits_RV, b, part, is_target=False)[0, 0].to(torch.int64)
        warp = self._warp(b, part)
        law_RV = self.law(warp.suppress(logits_RV), warp)
        token_R = inverse_cdf_draw(law_RV.exp(), b.uniform_R[part])
        log_q_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        self._keep(b.cell_R[part], law_RV if self._keeps_whole else hidden_RD, log_q_R)
        return token_R

    def draw_named(self, samples: Sequence[Sample], asks: Sequence[SampleFrom]) -> Iterator[Answer]:
        """Drafts from distributions that decoders name: few tokens, drawn on the host, so that no device is waited for."""
        token_BT, weight_BT = spread(asks, self._vocab_size, self._never)
        slot_B, rank_B, when_B = np.array(
            [(s.slot, ask.rank, s.decided) for s, ask in zip(samples, asks, strict=True)]
        ).T
        key_B2, order_SW = self._slots.key_S2[slot_B], self._slots.order_SW
        place_B = rank_B if order_SW is None else order_SW[slot_B, rank_B]
        warp = self._warp_named(slot_B)
        law_BT = warp.law(weight_BT.log().to(self._law_dtype), cut=self.by_ratio)
        if self.by_ratio:
            uniform_B = torch.from_numpy(keys.uniform_rows(key_B2, place_B, keys.DRAFT, when_B))
            index_B = inverse_cdf_draw(law_BT.exp(), uniform_B)
            self._keep_named(slot_B * self._slot_cells + rank_B % self.algorithm.window, token_BT, law_BT, index_B)
        else:
            index_B = warp.draw(law_BT, noise.gumbel_at(torch.from_numpy(key_B2), torch.from_numpy(place_B), token_BT))
        tokens = token_BT.gather(1, index_B.unsqueeze(1)).squeeze(1).tolist()
        return (Answer(0, [token], [0.0]) for token in tokens)

    def _warp_named(self, slot_B: Ints) -> Warp:
        """The warp of distributions that decoders name, by the settings of slots."""
        slots, own_4B, has_min_p, most_k = self._slots, None, False, 0
        if slots.own:
            own = [column_S[slot_B] for column_S in (slots.temperature_S, slots.top_p_S, slots.min_p_S, slots.top_k_S)]
            own_4B, has_min_p, most_k = torch.from_numpy(np.stack(own)), bool(own[2].any()), slots.most_k(own[3])
        cuts = bool((slots.top_p_S[slot_B] < 1.0).any())
        never, marked = self._suppressed, self._suppressed_V
        return Warp(self._job, own_4B, cuts, never, marked, has_min_p=has_min_p, most_k=most_k)

    def _keep_named(self, cell_B: Ints, token_BT: Tensor, law_BT: Tensor, index_B: Tensor) -> None:
        """Send distributions of few tokens to where drafts are judged."""
        log_q_B = law_BT.gather(1, index_B.unsqueeze(1)).to(torch.float64)
        sent = Batch(
            row_R=cell_B, head_5R=token_BT.numpy().T, own_4R=torch.cat([law_BT.to(torch.float64), log_q_B], 1).numpy().T
        ).to(self.device)
        law_BV = self._states_CD.new_full((len(cell_B), self._vocab_size), -torch.inf)
        # Places that fill a row up hold no mass: where two name one token, the greater counts.
        law_BV.scatter_reduce_(1, sent.head_5R.T, sent.own_4R[:-1].T.to(law_BV.dtype), "amax")
        self._keep(sent.row_R, law_BV, sent.own_4R[-1])


def spread(asks: Sequence[SampleFrom], vocab_size: int, never: frozenset[int]) -> tuple[Tensor, Tensor]:
    """Tokens in ascending order, int64 [B, T], and their weights, float64, 0 where a row has fewer; without those in `never`.
    Where an ask names no others, all of them are alike."""
    rows = list[tuple[list[int], list[float]]]()
    for ask in asks:
        weight_of = {token: weight for token, weight in zip(ask.tokens, ask.weights, strict=True) if token not in never}
        if not weight_of:
            weight_of = dict.fromkeys((token for token in range(vocab_size) if token not in never), 1)
        tokens = sorted(weight_of)
        rows.append((tokens, [float(weight_of[token]) for token in tokens]))
    most = max(len(tokens) for tokens, _ in rows)
    token_BT = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens, _ in rows], dtype=torch.int64)
    weight_BT = torch.tensor([weights + [0.0] * (most - len(weights)) for _, weights in rows], dtype=torch.float64)
    return token_BT, weight_BT
