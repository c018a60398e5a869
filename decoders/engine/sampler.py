"""From logits of sampled rows to tokens, log-probabilities and notes; and which drafts hold.

Two acceptance rules; decoders do not see which one is used. Coupled: drafts and target read the same noise, each token is the
target's own, and a draft holds if it equals it, which the host sees. Rejection: a draft drawn from q holds with probability
min(1, p/q).

    rows of a sample     JUDGE a   JUDGE b   JUDGE c   JUDGE -           three drafts, and the row after them
    coupled              x         y         z         w                 all are drawn; a = x and b = y hold: (2, [x, y, z, w])
    rejection            holds     holds     residual                    (2, [a, b, r, ...])

Under the rejection rule a draft leaves log q(draft) and its row's hidden state in a cell. q is needed only where a chain breaks:
there it is computed again from that state, which gives the same bits. At temperature 0 both rules give the maxima; S2D2's public
code judges by the untempered distributions there, which `Algorithm.by_ratio` asks for.

Sources: Leviathan et al., 2023; Chen et al., 2023; ASSD, Algorithm 1; S2D2 (2026), Algorithm 3.

Legend: R sampled rows, V vocabulary, B samples, D drafts, S slots, C cells, F fields of a row: its token,
log-probability and notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.rows import put
from draftmill.decoders.draws import keys, noise
from draftmill.decoders.draws.sampling import Warp, inverse_cdf_draw, measure, residual, sample
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Answer, Ints, SampleFrom
from draftmill.decoders.engine.batch import Draws, Rule
from draftmill.decoders.engine.memory import MemoryPlan
from draftmill.decoders.engine.noise_cache import NoiseCache
from draftmill.decoders.engine.samples import Sample, SlotTable
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.shaping import MaskTable
from draftmill.decoders.kernels.find import find_sampling, noting

Logits = Callable[[Tensor], Tensor]
"""Hidden states [R, D] -> raw logits [R, V]."""


class Sampler:
    """Draws and judges by the samples' own numbers, for all rows of a forward at once; enumerations replace it."""

    def __init__(self, setup: Setup, algorithm: Algorithm, slots: SlotTable, plan: MemoryPlan) -> None:
        sampling, info, backbone = setup.sampling, setup.info, setup.backbone
        device, dtype = backbone.device, backbone.dtype
        self.algorithm, self.device, self._slots, self.plan = algorithm, device, slots, plan
        self._vocab_size, self._mask_id = info.vocab_size, -1 if info.mask_id is None else info.mask_id
        self._law_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._top_k = sampling.top_k or 0
        self._cuts = not (sampling.top_p is None and sampling.top_k is None) or bool(sampling.min_p)
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=device)
        self._never = frozenset(info.suppressed)
        marked = torch.zeros(info.vocab_size, dtype=torch.bool)
        marked[list(info.suppressed)] = True
        self._suppressed_V = marked.to(device)
        self.by_ratio = sampling.acceptance == "rejection" if algorithm.by_ratio is None else algorithm.by_ratio
        # S2D2's public code judges by the untempered distributions.
        self._untempered = sampling.temperature == 0.0 and bool(algorithm.by_ratio)
        # The distribution that S2D2's measure is of is then another one than that of the other notes.
        self._of_two = sampling.temperature == 0.0 and self._cuts and algorithm.measured
        has_none = self._of_two or sampling.min_p or (self.by_ratio and algorithm.notes)
        with noting() as self.found:
            self.kernel = None if has_none else find_sampling(device, dtype)
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
        """The tokens drawn at the last two ranks of each slot, and one for dead rows (batch.note_cells)."""

    def _drawn_by_torch(self, setup: Setup) -> str:
        """What of a job no kernel draws; empty if nothing."""
        if self.by_ratio:
            return "drafts are judged by the rejection rule (sampling.acceptance: rejection, or this decoder's own)"
        if setup.has_constraints or setup.sampling.min_p:
            return "this job has constraints, penalties or min_p"
        return "this job has distributions or a device without the kernel for sampling" if self.kernel is None else ""

    # ---- slots ---------------------------------------------------------------------------------------------------

    def rule(self, *, is_target: bool) -> Rule:
        return Rule(
            by_ratio=self.by_ratio,
            window=self.algorithm.window,
            banks=self.algorithm.banks,
            top_k=None if self.kernel is None else self._top_k,
            num_notes=len(self.notes) * is_target,
            ahead=self.algorithm.ahead * is_target,
            as_arrays=is_target and (self.algorithm.kind == "masked" or self.algorithm.estimates),
        )

    def start(self, sample: Sample) -> None:
        self._noise.start(sample.slot)

    def stays(self, num_slots: int) -> bool:
        return self._cells_of(num_slots) == len(self._states_CD) or not self._states_CD.shape[1]

    def _cells_of(self, num_slots: int) -> int:
        """The number of cells for `num_slots` slots; on a device cells stay while there is any slot, since graphs read them."""
        cells = num_slots * self._slot_cells + 1
        return max(cells, len(self._states_CD)) if num_slots and self.device.type != "cpu" else cells

    def resize(self, num_slots: int) -> None:
        """Make room for `num_slots` slots; if memory runs out, nothing changes."""
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
        """The cell for padding rows, which is never read."""
        return len(self._states_CD) - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes that are kept for a slot, apart from noise; twice, since both sizes exist while slots are added."""
        width = self._states_CD.shape[1]
        return 2 * self._slot_cells * (width * self._states_CD.element_size() + 8) if width else 0

    # ---- the coupled rule ----------------------------------------------------------------------------------------

    def draw_part(self, logits_RV: Tensor, draws: Draws, part: slice, *, is_target: bool) -> Tensor:
        """Draw the tokens of some rows, also those ahead; the fields of the rows, [A, F, R]."""
        warp, ahead = self._warp(draws, part), draws.rule.ahead
        options = dict[str, Any](
            key_R2=draws.key_2R[:, part].T,
            position_R=draws.place_R[part],
            wanted=self._wanted if is_target else (),
            warped=self.algorithm.warped,
            draw_R=draws.draw_R[part] if self.algorithm.fresh else None,
            scored_R=None if draws.scored_R is None else draws.scored_R[part],
            mask_id=self._mask_id,
            ahead=ahead,
        )
        if draws.by_kernel:
            assert self.kernel is not None, "a batch for a kernel"
            fields_AFR: Tensor = self.kernel(logits_RV, warp, **options)
        else:
            gumbels = None
            if self.kernel is None and self.device.type == "cpu":
                gumbels = map(partial(self._noise.rows, draws, part, self.plan.noise), range(1 + ahead))
            fields_AFR = sample(logits_RV, warp, **options, gumbels=gumbels)
        if not is_target:
            return fields_AFR
        if self._order_F is not None:
            fields_AFR = fields_AFR.index_select(1, self._order_F)
        if self._of_two:
            law_RV = warp.warm.law(warp.shape(logits_RV).to(torch.float64), cut=True)
            fields_AFR[0, -1] = measure(self.notes[-1], law_RV, fields_AFR[0, 0].to(torch.int64))
        if draws.num_tops:
            tops_FR = torch.stack(self._tops(warp.suppress(logits_RV), draws.num_tops))
            fields_AFR = torch.cat([fields_AFR, tops_FR.expand(len(fields_AFR), -1, -1)], 1)
        return fields_AFR

    @staticmethod
    def _tops(logits_RV: Tensor, count: int) -> list[Tensor]:
        """The model's own best tokens and their log-probabilities, float64 [R] each: 2 x `count` fields."""
        best = torch.log_softmax(logits_RV, -1, torch.promote_types(logits_RV.dtype, torch.float32)).topk(count, dim=-1)
        return [*best.indices.T.to(torch.float64), *best.values.T.to(torch.float64)]

    def _warp(self, draws: Draws, part: slice | Tensor) -> Warp:
        warp = Warp(draws.settings_4R[:, part], draws.uses, self._suppressed, self._suppressed_V)
        if draws.token_ER is not None and draws.change_3ER is not None:
            warp = replace(warp, token_ER=draws.token_ER[:, part], change_3ER=draws.change_3ER[:, :, part])
        if draws.allowed_R is None:
            return warp
        cell_R = draws.allowed_R[part]
        return replace(warp, floor_RV=self.masks.floor(cell_R), limited_R1=(cell_R > 0).unsqueeze(1))

    def note(self, draws: Draws, token_R: Tensor) -> None:
        """Keep the tokens of all rows where the next rows of their slots take them from the device."""
        if draws.note_R is not None:
            self.noted_C.index_copy_(0, draws.note_R, token_R)

    # ---- the rejection rule --------------------------------------------------------------------------------------

    def judge(
        self, logits: Logits, hidden_RD: Tensor, draws: Draws, parts: Sequence[slice], *, is_target: bool
    ) -> Tensor:
        """Draw drafts and keep what they were drawn from; judge the chains. The logits of a part of the rows exist at a time.
        Flat float64: the fields of the rows, [F, R], and how many drafts of each sample hold, [B]."""
        j = draws.by_rejection
        weighed = [
            self._weigh_rows(logits(hidden_RD[part]), draws, part, alone=len(parts) == 1, is_target=is_target)
            for part in parts
        ]
        fields_FR = torch.cat([fields for fields, *_ in weighed], 1)
        log_p_R = torch.cat([log_p for _, log_p, *_ in weighed])
        held = weighed[0][2:] if len(weighed) == 1 else None
        accepted_B = torch.zeros_like(j.size_B)
        if j.any_chain:
            fields_FR, accepted_B = self._judge_chains(logits, hidden_RD, draws, fields_FR, log_p_R, held)
        if j.row_D.shape[0] and self._states_CD.shape[1]:
            states_DD = hidden_RD[j.row_D]
            if self._keeps_whole:
                states_DD = self._compute_again(logits, hidden_RD, draws, j.row_D, held)[1]
            # At temperature 0 S2D2's code takes the model's own probability, which is a note.
            log_q_D = fields_FR[2, j.row_D].log() if self._untempered else log_p_R[j.row_D]
            self._keep(j.cell_R[j.row_D], states_DD, log_q_D)
        self.note(draws, fields_FR[0].to(torch.int64))
        return torch.cat([fields_FR.flatten(), accepted_B.to(torch.float64)])

    def _weigh_rows(
        self, logits_RV: Tensor, draws: Draws, part: slice, *, alone: bool, is_target: bool
    ) -> tuple[Tensor, ...]:
        """The fields of rows, [F, R]; log p of their tokens under the distributions that judge; the logits, and what is drawn
        from. Tokens are those drafted, or the drafts that a row judges. `alone`: these are all rows."""
        warp, j = self._warp(draws, part), draws.by_rejection
        logits_RV = warp.suppress(logits_RV)
        law_RV = self.law(logits_RV, warp)
        p_RV = self._judging(logits_RV, law_RV, warp)
        token_R, uniform_R = j.draft_R[part], j.uniform_R[part]
        if not alone:
            is_given_R = j.judged_R[part] > 0
            if draws.scored_R is not None:
                is_given_R = is_given_R | (draws.scored_R[part] >= 0)
            token_R = torch.where(is_given_R, token_R, self._draw_from(law_RV, uniform_R, warp))
        elif j.row_D.shape[0]:
            token_R = token_R.index_copy(0, j.row_D, self._draw_from(law_RV[j.row_D], uniform_R[j.row_D], warp))
        fields = [token_R, torch.zeros_like(uniform_R)]
        if is_target:
            fields[1] = self._log_p(logits_RV, law_RV, warp, token_R)
            laws = [law_RV] * len(self.notes)
            if self.algorithm.measured:
                laws[-1] = p_RV
            fields += [measure(name, law, token_R) for name, law in zip(self.notes, laws, strict=True)]
            fields += self._tops(logits_RV, draws.num_tops) if draws.num_tops else []
        log_p_R = p_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        return torch.stack([field.to(torch.float64) for field in fields]), log_p_R, logits_RV, law_RV

    @staticmethod
    def _draw_from(law_RV: Tensor, uniform_R: Tensor, warp: Warp) -> Tensor:
        return law_RV.argmax(-1) if warp.uses.all_greedy else inverse_cdf_draw(law_RV.exp(), uniform_R)

    def law(self, logits_RV: Tensor, warp: Warp) -> Tensor:
        """The distributions that tokens are drawn from; at temperature 0 the model's own in float64, if ratios mean something."""
        logits_RV = warp.shape(logits_RV)
        return torch.log_softmax(logits_RV.to(torch.float64), -1) if self._untempered else warp.law(logits_RV, cut=True)

    def _judging(self, logits_RV: Tensor, law_RV: Tensor, warp: Warp) -> Tensor:
        """The distributions that judge: at temperature 0 those of temperature 1 after top-k and top-p."""
        if self._untempered and self._cuts:
            return warp.warm.law(warp.shape(logits_RV).to(torch.float64), cut=True)
        return law_RV

    def _log_p(self, logits_RV: Tensor, law_RV: Tensor, warp: Warp, token_R: Tensor) -> Tensor:
        """Log-probabilities under the model itself."""
        plain_RV = law_RV if warp.is_plain and not warp.uses.top_p else torch.log_softmax(logits_RV, dim=-1)
        return plain_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)

    def _keep(self, cell_D: Tensor, states_DD: Tensor, log_q_D: Tensor) -> None:
        self._states_CD[cell_D] = states_DD.to(self._states_CD.dtype)
        self._log_q_C[cell_D] = log_q_D

    def _judge_chains(
        self,
        logits: Logits,
        hidden_RD: Tensor,
        draws: Draws,
        fields_FR: Tensor,
        log_p_R: Tensor,
        held: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The fields of rows, with the token after the drafts of each chain that hold; and how many these are, [B]. `held`
        are the logits and distributions of all rows, where they fit into memory at once."""
        j = draws.by_rejection
        owner_R, size_B, judged_R = j.owner_R, j.size_B, j.judged_R > 0
        # Without kept distributions these rows come after drafts that are not judged: they draw from p, and q is not read.
        has_q = not j.is_sure and self._states_CD.shape[1] > 0
        log_q_R = self._log_q_C[j.cell_R] if has_q else torch.zeros_like(log_p_R)
        good_R = judged_R & (j.accept_R < (self.algorithm.temper * (log_p_R - log_q_R)).exp())
        row_R, size_R = torch.arange(len(hidden_RD), device=good_R.device), size_B[owner_R]
        step_R = row_R - j.first_B[owner_R]
        stops_R = torch.where(good_R | (step_R >= size_R), size_R, step_R)
        accepted_B = size_B.scatter_reduce(0, owner_R, stops_R, "amin")
        # Where every draft holds and no row is left, or there is no chain, the token drawn here means nothing.
        last_B = (j.first_B + torch.minimum(accepted_B, (size_B - 1).clamp(min=0))).clamp(max=len(hidden_RD) - 1)
        refused_B = judged_R[last_B]
        logits_BV, law_BV, warp = self._compute_again(logits, hidden_RD, draws, last_B, held)
        p_BV = self._judging(logits_BV, law_BV, warp)
        if has_q:
            q_BV = self._states_CD[j.cell_R[last_B]]
            if not self._keeps_whole:
                assert self.drafts_by is not None, "drafts come from a model"
                q_BV = self.law(warp.suppress(self.drafts_by(q_BV)), warp)
        else:
            q_BV = torch.full_like(p_BV, -torch.inf).scatter_(1, j.draft_R[last_B].unsqueeze(1), 0.0)
        mass_BV = torch.where(refused_B.unsqueeze(1), residual(p_BV, q_BV), law_BV.exp())
        token_B = inverse_cdf_draw(mass_BV, j.uniform_R[last_B])
        if warp.uses.all_greedy:
            token_B = torch.where(refused_B, token_B, law_BV.argmax(-1))
        new_2B = torch.stack([token_B.to(torch.float64), self._log_p(logits_BV, law_BV, warp, token_B)])
        is_next_R = (row_R == last_B[owner_R]) & (accepted_B < size_B)[owner_R]
        fields_2R = torch.where(is_next_R, new_2B.index_select(1, owner_R), fields_FR[:2])
        return torch.cat([fields_2R, fields_FR[2:]]), accepted_B

    def _compute_again(
        self, logits: Logits, hidden_RD: Tensor, draws: Draws, row_B: Tensor, held: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor, Warp]:
        """Logits and distributions of some rows again: those held, else computed once more, which gives the same bits."""
        warp = self._warp(draws, row_B)
        if held is not None:
            return held[0][row_B], held[1][row_B], warp
        logits_BV = warp.suppress(logits(hidden_RD[row_B]))
        return logits_BV, self.law(logits_BV, warp), warp

    # ---- drafts that need no forward of their own ----------------------------------------------------------------

    def drafts(self, logits_RV: Tensor, hidden_RD: Tensor, draws: Draws, part: slice) -> Tensor:
        """A draft from each row's logits, [R]; the rejection rule keeps what it was drawn from."""
        if draws.judging is None:
            return self.draw_part(logits_RV, draws, part, is_target=False)[0, 0].to(torch.int64)
        warp, j = self._warp(draws, part), draws.judging
        law_RV = self.law(warp.suppress(logits_RV), warp)
        token_R = inverse_cdf_draw(law_RV.exp(), j.uniform_R[part])
        log_q_R = law_RV.gather(1, token_R.unsqueeze(1)).squeeze(1).to(torch.float64)
        self._keep(j.cell_R[part], law_RV if self._keeps_whole else hidden_RD, log_q_R)
        return token_R

    def draw_named(self, samples: Sequence[Sample], asks: Sequence[SampleFrom]) -> Iterator[Answer]:
        """Drafts from distributions that decoders name: few tokens, drawn on the host, so that no device is waited for."""
        token_BT, weight_BT = spread(asks, self._vocab_size, self._never)
        slot_B, rank_B, when_B = np.array(
            [(s.slot, ask.rank, s.decided) for s, ask in zip(samples, asks, strict=True)]
        ).T
        key_B2, order_SW = self._slots.key_S2[slot_B], self._slots.order_SW
        place_B = rank_B if order_SW is None else order_SW[slot_B, rank_B]
        settings_4B = torch.from_numpy(self._slots.settings_4S[:, slot_B])
        warp = Warp(settings_4B, self._slots.uses, self._suppressed, self._suppressed_V)
        law_BT = warp.law(weight_BT.log().to(self._law_dtype), cut=self.by_ratio)
        if self.by_ratio:
            uniform_B = torch.from_numpy(keys.uniform_rows(key_B2, place_B, keys.DRAFT, when_B))
            index_B = inverse_cdf_draw(law_BT.exp(), uniform_B)
            self._keep_named(slot_B * self._slot_cells + rank_B % self.algorithm.window, token_BT, law_BT, index_B)
        else:
            index_B = warp.draw(law_BT, noise.gumbel_at(torch.from_numpy(key_B2), torch.from_numpy(place_B), token_BT))
        tokens = token_BT.gather(1, index_B.unsqueeze(1)).squeeze(1).tolist()
        return (Answer(0, [token], [0.0]) for token in tokens)

    def _keep_named(self, cell_B: Ints, token_BT: Tensor, law_BT: Tensor, index_B: Tensor) -> None:
        """Send distributions of few tokens to where drafts are judged, as one array."""
        log_q_B1, num_tokens = law_BT.gather(1, index_B.unsqueeze(1)), token_BT.shape[1]
        numbers_BX = torch.cat([law_BT, log_q_B1], 1).to(torch.float64).view(torch.int64)
        sent = put(torch.cat([torch.from_numpy(cell_B).unsqueeze(1), token_BT, numbers_BX], 1).numpy(), self.device)
        named_BT, numbers_BX = sent[:, 1 : 1 + num_tokens], sent[:, 1 + num_tokens :].view(torch.float64)
        law_BV = self._states_CD.new_full((len(cell_B), self._vocab_size), -torch.inf)
        # Padding tokens have no mass: where two columns name one token, the greater counts.
        law_BV.scatter_reduce_(1, named_BT, numbers_BX[:, :-1].to(law_BV.dtype), "amax")
        self._keep(sent[:, 0], law_BV, numbers_BX[:, -1])


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
