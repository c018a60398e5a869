"""The state of a batch: one slot a sample, ragged, refilled the moment a sample ends.

A slot's columns are the ranks of its decoding order. Occupied slots are kept dense ([0, active)), so that a forward reads
the cache in place: a freed slot is refilled by the next admission, or else the last slot moves into it. SlotDecoder is what
every decoder shares (admission, harvest, counters); a subclass says what one step does. Knows nothing of Ray, files or jobs.

Legend: S all slots, B slots of this step, W columns, T tokens of a slot, H histogram bins, V vocabulary.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from decoders.backbones.base import CountingBackbone, Model
from decoders.base import EngineStats, ModelInfo, Outcome, Request, TraceStep
from decoders.budget import DraftBudget
from decoders.sampling import log_law
from decoders.settings import Sampling
from decoders.speculation import Acceptance, Window
from decoders.state import Group, Resident, SlotState, outcome_of, untouched

_COLUMN_STEP = 64


class SlotDecoder(ABC):
    """Keeps up to `max_rows` samples in slots, within `max_tokens` cached columns; see decoders.base.Decoder.

    `max_commit` is the most tokens that one iteration can commit, `window` the number of ranks whose noise is alive at once.
    """

    def __init__(
        self,
        backbone: Model,
        info: ModelInfo,
        sampling: Sampling,
        *,
        max_rows: int,
        max_tokens: int,
        trace: bool = False,
        max_commit: int = 1,
        window: int = 1,
    ) -> None:
        if max_rows < 1 or max_tokens < 1:
            raise ValueError(f"batching: max_rows = {max_rows}, max_tokens = {max_tokens}; both must be at least 1")
        self.backbone, self.info, self.sampling = backbone, info, sampling
        # A coupled draw needs the nucleus in few rows only: there it is found when a token is drawn, not with the law.
        self.uncut_top_p = sampling.top_p if sampling.acceptance == "coupled" else None
        self._warp = sampling.model_copy(update={"top_p": None}) if self.uncut_top_p else sampling
        self.max_rows, self.max_tokens, self.tracing = max_rows, max_tokens, trace
        self.counting = CountingBackbone(backbone, max_rows)
        self.state = SlotState(max_rows, backbone.device, max_commit=max_commit)
        self.acceptance = Acceptance(
            self.state,
            coupled=sampling.acceptance == "coupled",
            greedy=sampling.temperature == 0.0,
            top_p=self.uncut_top_p,
            window=window,
            vocab_size=info.vocab_size,
        )
        self.stats = EngineStats()
        self._residents: list[Resident | None] = [None] * max_rows
        self._num_dense = 0
        self._holes: list[int] = []
        self._fresh: list[int] = []
        self._instant: list[Outcome] = []
        self.budget: DraftBudget | None = None
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=backbone.device)

    # ---- admission -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Number of samples inside: in a slot, or finished without needing one."""
        return self._num_dense - len(self._holes) + len(self._instant)

    def room(self, length: int) -> int:
        """How many samples of this canvas length fit now; at least 1 when nothing is inside, however long."""
        inside = self._num_dense - len(self._holes)
        longest = max([length, 1, *(len(r.request.canvas) for r in self._residents if r is not None)])
        budget = self.max_tokens // self._columns(longest) - inside
        return max(min(self.max_rows - inside, budget), 1 if inside == 0 else 0)

    def _columns(self, length: int) -> int:
        """How many cached columns a canvas of this length takes."""
        return length

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        """Give each request a slot; a canvas without holes is finished at once."""
        now = time.perf_counter()
        for number, request in enumerate(requests):
            queued = now if queued_at_s is None else queued_at_s[number]
            resident = Resident(request, queued, now, time.time(), [] if self.tracing else None)
            if not (request.canvas < 0).any():
                self._instant.append(untouched(resident))
                continue
            self._place(resident)

    def _place(self, resident: Resident) -> None:
        slot = self._holes.pop() if self._holes else self._num_dense
        assert slot < self.max_rows, "admit called without room"
        self._num_dense = max(self._num_dense, slot + 1)
        length = len(resident.request.canvas)
        columns = -(-length // _COLUMN_STEP) * _COLUMN_STEP
        self.state.widen(columns)
        self.backbone.allocate(self.max_rows, columns)
        self._start(slot, resident.request)
        self.counting.counters.reset(slot)
        self._residents[slot] = resident
        self._fresh.append(slot)

    def _start(self, slot: int, request: Request) -> None:
        """Put a request's canvas into its slot; a decoder with more state of its own than `SlotState` sets it here."""
        self.state.start(slot, request)

    # ---- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """One forward for the samples that have not had one yet, else for all; returns the samples that ended."""
        done, self._instant = self._instant, []
        self._close_holes()
        if self._num_dense:
            group = self._next_group()
            self._advance(group)
            self._count(group)
            done += self._harvest(group)
        return done

    @abstractmethod
    def _advance(self, group: Group) -> None:
        """Run one forward for the group and commit what it decided."""

    def _close_holes(self) -> None:
        for hole in sorted(self._holes, reverse=True):
            last = self._num_dense - 1
            if hole != last:
                self._move(last, hole)
            self._residents[last] = None
            self._num_dense = last
        self._holes.clear()

    def _move(self, source: int, target: int) -> None:
        self.state.move(source, target)
        self.backbone.move_slot(source, target)
        self.counting.counters.move(source, target)
        self._residents[target] = self._residents[source]
        self._fresh = [target if slot == source else slot for slot in self._fresh]

    def _next_group(self) -> Group:
        # Prefills go together: their many content rows would pad every other slot.
        slots, fresh = (sorted(self._fresh), True) if self._fresh else (list(range(self._num_dense)), False)
        self._fresh = []
        return Group(slots, torch.tensor(slots, dtype=torch.int64, device=self.state.device), fresh)

    def _count(self, group: Group) -> None:
        stats, counting = self.stats, self.counting
        stats.steps += 1
        stats.slot_steps += self.max_rows if not group.fresh else len(group.slots)
        stats.active_slot_steps = counting.active_slot_steps
        stats.forward_s = counting.forward_s
        stats.useful_rows, stats.computed_rows = counting.useful_rows, counting.computed_rows

    def _harvest(self, group: Group) -> list[Outcome]:
        state = self.state
        finished = (state.decided_S[group.index_B] >= state.length_S[group.index_B]).tolist()
        done = [slot for slot, is_done in zip(group.slots, finished, strict=True) if is_done]
        return [self._release(slot) for slot in done]

    def _release(self, slot: int) -> Outcome:
        resident = self._residents[slot]
        assert resident is not None, f"slot {slot} holds nothing"
        outcome = self._outcome(slot, resident)
        self._residents[slot] = None
        self._holes.append(slot)
        return outcome

    def clear(self) -> list[int]:
        """Free every slot; returns the indices of the requests that were inside."""
        dropped = [r.request.index for r in self._residents if r is not None] + [o.index for o in self._instant]
        self._residents = [None] * self.max_rows
        self._num_dense, self._holes, self._fresh, self._instant = 0, [], [], []
        return dropped

    # ---- what subclasses use -------------------------------------------------------------------------------------

    @property
    def law_dtype(self) -> torch.dtype:
        """The dtype of every law: float32, or float64 on a float64 backbone."""
        return torch.float64 if self.backbone.dtype == torch.float64 else torch.float32

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        """Return suppressed logits [R, V]."""
        return self._suppress(self.counting.logits(hidden_RD))

    def _suppress(self, logits_RV: Tensor) -> Tensor:
        """Give the mask and ids without a token probability zero, in place, before any softmax."""
        return logits_RV.index_fill_(-1, self._suppressed, -torch.inf)

    def _law(self, logits_RV: Tensor) -> Tensor:
        """Return the warped log law of suppressed logits; under coupled acceptance not yet cut to its nucleus."""
        return log_law(logits_RV, self._warp)

    def _log_p(self, logits_RV: Tensor, law_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """Return each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
        plain = self._warp.temperature == 1.0 and self._warp.top_k is None and self._warp.top_p is None
        law = law_RV if plain else torch.log_softmax(logits_RV, dim=-1)
        return law.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)

    def _judge(self, hidden_RD: Tensor, q_BKV: Tensor | None, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        """Settle a window by the hidden states of its valid rows.

        Returns how many drafts are accepted [B], the window's tokens with the one that comes after those in its place [B, A],
        and their log-probabilities, float64 [B, A].
        """
        logits_RV = self._logits(hidden_RD)
        p_RV = self._law(logits_RV)
        accepted_B, last_B = self.acceptance.judge(p_RV, q_BKV, window)
        tokens_BA = window.ending(accepted_B, last_B)
        log_p_BA = torch.zeros(tokens_BA.shape, dtype=torch.float64, device=tokens_BA.device)
        log_p_BA[window.valid_BA] = self._log_p(logits_RV, p_RV, tokens_BA[window.valid_BA])
        self.stats.verified += len(hidden_RD)
        return accepted_B, tokens_BA, log_p_BA

    def _allot(self, group: Group, most_B: Tensor) -> Tensor:
        """How many drafts each slot takes: all that it could, or as many as the budget gives it."""
        if self.budget is None:
            return most_B
        num_kv = int(self.state.decided_S[group.index_B].sum())
        return self.budget.plan(group.index_B, most_B, kv_tokens=num_kv, fresh=group.fresh, joined=group.joined)

    @contextmanager
    def _timed(self, group: Group) -> Iterator[None]:
        """Tell the budget what the enclosed forward of the target took, with all that belongs to it; prompts don't count."""
        if self.budget is None or group.fresh or group.joined:
            yield
            return
        num_rows, num_kv = self.counting.useful_rows, int(self.state.decided_S[group.index_B].sum())
        began_s = time.perf_counter()
        yield
        self.budget.timed(self.counting.useful_rows - num_rows, num_kv, time.perf_counter() - began_s)

    def _commit(self, group: Group, tokens_BT: Tensor, counts_B: Tensor, log_p_BT: Tensor) -> None:
        """Decide the next `counts_B` tokens of each slot: write them, add their log-probabilities."""
        self.state.commit(group.index_B, tokens_BT, counts_B, log_p_BT)
        self.stats.committed += int(counts_B.sum())

    def _close_iteration(
        self, group: Group, counts_B: Tensor, proposed_B: Tensor, accepted_B: Tensor, ended_B: Tensor
    ) -> None:
        """Count one draft-verify round for the slots where `ended_B` (bool) says that one ended."""
        state = self.state
        slots_B = group.index_B[ended_B]
        state.iterations_S[slots_B] += 1
        state.proposed_S[slots_B] += proposed_B[ended_B]
        state.accepted_S[slots_B] += accepted_B[ended_B]
        state.histogram_SH[slots_B, counts_B[ended_B]] += 1

    def _trace(self, group: Group, proposed: Tensor, num_proposed_B: Tensor, before_B: Tensor, ended_B: Tensor) -> None:
        """Record one round of each slot where `ended_B`; `before_B` is what was decided when it began."""
        if not self.tracing:
            return
        for row, slot in enumerate(group.slots):
            resident = self._residents[slot]
            if not bool(ended_B[row]) or resident is None or resident.trace is None:
                continue
            span = slice(int(before_B[row]), int(self.state.decided_S[slot]))
            resident.trace.append(
                TraceStep(
                    iteration=len(resident.trace),
                    nfe=self.counting.counters.nfe[slot],
                    proposed=proposed[row, : int(num_proposed_B[row])].tolist(),
                    committed=self.state.tokens_SW[slot, span].tolist(),
                    positions=self.state.order_SW[slot, span].tolist(),
                )
            )

    def _tokens_from(self, slots_B: Tensor, ranks_B: Tensor, count: int) -> Tensor:
        """The tokens that stand at `count` ranks from `ranks_B` on, [B, count]; junk beyond the canvas."""
        offsets = torch.arange(count, device=self.state.device)
        last = self.state.tokens_SW.shape[1] - 1
        return self.state.tokens_SW[slots_B].gather(1, (ranks_B.unsqueeze(1) + offsets).clamp(max=last))

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def _knows_logprob(self) -> bool:
        return True

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = outcome_of(self.state, slot, resident, self.counting.counters)
        if not self._knows_logprob():
            outcome.logprob = None
        return outcome
