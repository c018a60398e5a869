"""SlotDecoder, the base of all decoders: admits samples to slots, runs steps, returns outcomes.

A slot's columns are the ranks of its decoding order. Occupied slots are kept dense ([0, active)), so that a forward reads
the cache in place: a freed slot is refilled by the next admission, or else the last slot moves into it. SlotDecoder does
admission, outcomes and counters; a subclass defines one step. Knows nothing of Ray, files or jobs.

Legend: H histogram bins.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from decoders.backbones.base import CountingBackbone
from decoders.backbones.cache import rounded
from decoders.base import EngineStats, Outcome, Request, StopText, TraceStep
from decoders.engine.acceptance import Acceptance, Window, pick
from decoders.engine.budget import DraftBudget
from decoders.engine.memory import Account, column_multiple, give
from decoders.engine.setup import Setup
from decoders.engine.state import Group, Resident, SlotState, outcome_of, untouched
from decoders.engine.warps import Warps

_COLUMN_STEP = 64
# The initial slots of a cache, as far as allowed: adding them one by one would copy the cache each time.
_FEWEST_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Weighed:
    """The log-probabilities of given tokens, in the sampled distributions and under the model itself, float64 [R] each.

    `held` are the logits and distributions of all rows, where they fit into memory at once.
    """

    sampled_R: Tensor
    plain_R: Tensor
    held: tuple[Tensor, Tensor] | None


Canvas = tuple[bytes, bytes]
"""A canvas and its order of decoding, as a key."""


def _canvas_of(request: Request) -> Canvas:
    order = b"" if request.hole_order is None else request.hole_order.tobytes()
    return request.canvas.tobytes(), order


class SlotDecoder(ABC):
    """Keeps up to `max_rows` samples in slots, within `max_tokens` cached columns; see decoders.base.Decoder.

    The cache has no more slots than samples were inside at one time (and a few ahead), of no more columns than they need: slots
    times allocated columns stay within `max_tokens`, and within the memory given to `fit`. A single sample is
    always admitted, whatever `max_tokens`; `admit` raises MemoryError for one that does not fit into memory.

    `max_commit` is the most tokens that one iteration can commit, `window` the number of ranks whose noise is alive at once.
    """

    def __init__(self, setup: Setup, *, max_commit: int = 1, window: int = 1) -> None:
        backbone, info, sampling, max_rows, max_tokens = (
            setup.backbone,
            setup.info,
            setup.sampling,
            setup.max_rows,
            setup.max_tokens,
        )
        if max_rows < 1 or max_tokens < 1:
            raise ValueError(f"batching: max_rows = {max_rows}, max_tokens = {max_tokens}; both must be at least 1")
        self.backbone, self.info, self.sampling = backbone, info, sampling
        self.max_rows, self.max_tokens, self.tracing = max_rows, max_tokens, setup.trace
        self.counting = CountingBackbone(backbone, max_rows)
        self.state = SlotState(max_rows, backbone.device, max_commit=max_commit)
        self.warps = Warps(self.state, sampling)
        coupled = sampling.acceptance == "coupled"
        self.acceptance = Acceptance(self.state, self.warps, coupled=coupled, window=window, vocab_size=info.vocab_size)
        self.stats = EngineStats()
        self._residents: list[Resident | None] = [None] * max_rows
        self._num_dense = 0
        self._holes: list[int] = []
        self._fresh: list[int] = []
        self._instant: list[Outcome] = []
        self.budget: DraftBudget | None = None
        self.account = Account.unmeasured(backbone.device)
        self._multiple = column_multiple(backbone)
        # Slots and columns of the cache, and how many slots there could be.
        self._shape, self._num_lanes = (0, 0), max_rows
        self._suppressed = torch.tensor(info.suppressed, dtype=torch.int64, device=backbone.device)

    # ---- admission -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Number of samples inside: in a slot, or finished without needing one."""
        return self._num_dense - len(self._holes) + len(self._instant)

    def room(self, length: int) -> int:
        """How many samples of this canvas length fit now; at least 1 when nothing is inside, however long."""
        inside = self._num_dense - len(self._holes)
        most = self._most_rows(self._columns_at(self._longest_with(length)))
        return max(most - inside, 1 if inside == 0 else 0)

    def fit(self, free_bytes: int) -> None:
        """Limit the batch to `free_bytes` of device memory, measured after all models were loaded."""
        row_bytes = int(getattr(self.backbone, "row_bytes", 0))
        self.account = Account.of(self.backbone.device, free_bytes, row_bytes=row_bytes)
        self.state.noise_bytes = self.account.noise

    def most_rows(self, length: int) -> int:
        """How many samples of this canvas length can run at once; 0 if not even one fits into memory."""
        columns = self._columns_at(length)
        return max(self._most_rows(columns), int(self._fits(1, columns)))

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes of a sample with this many columns in its slot of the cache (in each slot, if it has several)."""
        cells = self._slots_each * num_columns * int(getattr(self.backbone, "cell_bytes", 0))
        # Wide tensors exist twice while slots are added; tokens and order are int64.
        return cells + 2 * self.state.wide_bytes + 16 * num_columns

    @property
    def _slots_each(self) -> int:
        """How many slots of the cache a sample has."""
        return 1

    def columns(self, length: int) -> int:
        """How many cached columns a canvas of this length takes, those of all of its slots together."""
        return length

    def _columns_at(self, length: int) -> int:
        """How many columns each slot of the cache has if the longest canvas has this length."""
        return rounded(-(-self.columns(length) // self._slots_each), self._multiple)

    def _longest_with(self, length: int) -> int:
        return max([length, 1, *(len(r.request.canvas) for r in self._residents if r is not None)])

    def _most_rows(self, num_columns: int) -> int:
        """How many samples fit with this many columns per slot."""
        most = min(self.max_rows, self.max_tokens // (self._slots_each * num_columns))
        if self.account.slots is not None:
            most = min(most, max(self.account.slots, 0) // max(1, self.slot_bytes(num_columns)))
        return most

    def _most_columns(self, num_slots: int) -> int:
        """How many columns each slot may have if the cache has this many slots."""
        most = self.max_tokens // num_slots
        if self.account.slots is not None:
            each, one = self.account.slots // num_slots, self.slot_bytes(1)
            most = min(most, max(each, 0) // max(1, one))
        return most

    def _fits(self, num_rows: int, num_columns: int) -> bool:
        return self.account.slots is None or num_rows * self.slot_bytes(num_columns) <= self.account.slots

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        """Give each request a slot; a canvas without holes is finished at once."""
        now = time.perf_counter()
        queued = [now] * len(requests) if queued_at_s is None else queued_at_s
        residents = [
            Resident(request, queued_s, now, time.time(), [] if self.tracing else None)
            for request, queued_s in zip(requests, queued, strict=True)
        ]
        waiting = [resident for resident in residents if self._needs_slot(resident.request)]
        if waiting:
            self._make_room(len(waiting), max(len(resident.request.canvas) for resident in waiting))
        for resident in residents:
            if self._needs_slot(resident.request):
                self._place(resident)
            else:
                self._instant.append(untouched(resident))

    def _needs_slot(self, request: Request) -> bool:
        return bool((request.canvas < 0).any())

    def _make_room(self, count: int, length: int) -> None:
        """Make slots in the cache for `count` more samples of this length; more than requested, as far as they fit.

        Columns that are no longer needed are freed when slots need their memory.
        """
        least, needed = self._columns_at(self._longest_with(length)), self._num_dense - len(self._holes) + count
        if not self._fits(needed, least):
            asked, free = needed * self.slot_bytes(least), max(self.account.slots or 0, 0)
            raise MemoryError(
                f"a canvas of {length} tokens does not fit into memory: its batch of {needed} would take {asked:,} bytes, "
                f"and {free:,} are there for all"
            )
        slots, columns = self._shape[0] // self._slots_each, max(self._shape[1], rounded(least, _COLUMN_STEP))
        if self._most_rows(columns) < max(needed, min(slots, self._most_rows(least))):
            columns = least
        most = max(self._most_rows(columns), needed)
        self._num_lanes = most
        if slots < needed:
            slots = max(needed, _FEWEST_SLOTS, slots * 3 // 2)
        shape = (min(slots, most) * self._slots_each, columns)
        if shape == self._shape:
            return
        if shape[0] < self._shape[0]:
            self._close_holes()
        self._allocate(*shape)

    def _allocate(self, num_slots: int, num_columns: int) -> None:
        """Resize everything that is kept per slot to this many slots and columns."""
        had, self._shape = self._shape, (0, 0)  # until the resize has succeeded
        self.state.use(min(num_slots // self._slots_each, self.max_rows))
        give(self.backbone, num_slots, num_columns, had)
        self._shape = (num_slots, num_columns)

    def _allocate_at_least(self, num_slots: int, num_columns: int) -> None:
        """Make sure that the cache has at least this many slots and columns; for needs that change from step to step."""
        shape = max(num_slots, self._shape[0]), rounded(max(num_columns, self._shape[1]), self._multiple)
        if shape != self._shape:
            self._allocate(*shape)

    def _place(self, resident: Resident) -> None:
        slot = self._holes.pop() if self._holes else self._num_dense
        assert slot < self.max_rows, "admit called without room"
        self._num_dense = max(self._num_dense, slot + 1)
        self.state.widen(rounded(len(resident.request.canvas), _COLUMN_STEP))
        self._start(slot, resident.request)
        self.warps.start(slot, resident.request.settings)
        self.counting.counters.reset(slot)
        self._residents[slot] = resident
        self._fresh.append(slot)

    def _start(self, slot: int, request: Request) -> None:
        """Put a request's canvas into its slot; a decoder with more state of its own than `SlotState` sets it here."""
        self.state.start(slot, request)

    # ---- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """Run one forward for the samples that had none yet, else for all; return the samples that ended."""
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
        """Run one forward for the group and commit the tokens that it decides."""

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
        self.warps.move(source, target)
        self.backbone.move_slot(source, target)
        self.counting.counters.move(source, target)
        self._residents[target] = self._residents[source]
        self._fresh = [target if slot == source else slot for slot in self._fresh]

    def _next_group(self) -> Group:
        # Prefills go together: their many content rows would pad every other slot.
        slots, fresh = (self._next_prompts(), True) if self._fresh else (list(range(self._num_dense)), False)
        return Group(slots, torch.tensor(slots, dtype=torch.int64, device=self.state.device), fresh)

    def _next_prompts(self) -> list[int]:
        """Take the new slots whose prompts fit into the memory of one forward; the others wait for the next."""
        waiting = self._share_prompts()
        slots = [slot for slot in sorted(self._fresh) if slot not in waiting]
        most, num_rows, count = self.account.prompt_rows, 0, 0
        for slot in slots:
            resident = self._residents[slot]
            num_rows += 0 if resident is None else len(resident.request.canvas)
            if most is not None and count and num_rows > most:
                break
            count += 1
        self._fresh = slots[count:] + sorted(waiting)
        return slots[:count]

    def _share_prompts(self) -> set[int]:
        """Copy computed prompts into the new slots with the same canvas; returns the slots whose prompt is about to be computed.

        The samples of a row (`sampling.n`) have one canvas, so its prompt is computed once: the first of them runs it, the
        others wait for that forward and run only what the prompt's columns do not hold.
        """
        fresh, computed, first, waiting = set(self._fresh), dict[Canvas, int](), set[Canvas](), set[int]()
        for slot, resident in enumerate(self._residents[: self._num_dense]):
            if resident is not None and slot not in fresh:
                computed[_canvas_of(resident.request)] = slot
        for slot in sorted(fresh):
            if not self._num_shared(slot):
                continue
            resident = self._residents[slot]
            assert resident is not None, f"slot {slot} holds nothing"
            canvas = _canvas_of(resident.request)
            if canvas in computed:
                self._copy_prompt(computed[canvas], slot)
            elif canvas in first:
                waiting.add(slot)
            else:
                first.add(canvas)
        return waiting

    def _copy_prompt(self, source: int, target: int) -> None:
        self.backbone.move_slot(source, target)
        self.state.cached_S[target] = self._num_shared(target)

    def _num_shared(self, slot: int) -> int:
        """How many leading columns of the slot's prompt another slot with the same canvas can give; 0 if it is not shared."""
        return 0

    def _count(self, group: Group) -> None:
        stats, counting = self.stats, self.counting
        stats.steps += 1
        stats.slot_steps += self._num_lanes if not group.fresh else len(group.slots)
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
        self.warps.release(slot)
        self._residents[slot] = None
        self._holes.append(slot)
        return outcome

    def clear(self) -> list[int]:
        """Free every slot, and the cache's memory; returns the indices of the requests that were inside."""
        dropped = [r.request.index for r in self._residents if r is not None] + [o.index for o in self._instant]
        self._residents = [None] * self.max_rows
        self._num_dense, self._holes, self._fresh, self._instant = 0, [], [], []
        # After a failure half way the size is unknown: any size above zero makes `_allocate` free the memory.
        self._shape = (max(self._shape[0], 1), max(self._shape[1], 1))
        self._allocate(0, 0)
        self.warps.clear()
        return dropped

    # ---- what subclasses use -------------------------------------------------------------------------------------

    @property
    def law_dtype(self) -> torch.dtype:
        """The dtype of every distribution: float32, or float64 on a float64 backbone."""
        return torch.float64 if self.backbone.dtype == torch.float64 else torch.float32

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        """Return suppressed logits [R, V]."""
        return self._suppress(self.counting.logits(hidden_RD))

    def _suppress(self, logits_RV: Tensor) -> Tensor:
        """Give the mask and ids without a token probability zero, in place, before any softmax."""
        return logits_RV.index_fill_(-1, self._suppressed, -torch.inf)

    def _law(self, logits_RV: Tensor, slots_R: Tensor) -> Tensor:
        """Return the warped log-probabilities of suppressed logits; under coupled acceptance not yet cut to its nucleus."""
        return self.warps.law(logits_RV, slots_R)

    def _log_p(self, logits_RV: Tensor, law_RV: Tensor, tokens_R: Tensor) -> Tensor:
        """Return each token's log-probability under the model itself (temperature 1, no truncation), float64 [R]."""
        law = law_RV if self.warps.plain else torch.log_softmax(logits_RV, dim=-1)
        return law.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1).to(torch.float64)

    def _parts(self, num_rows: int) -> Iterator[slice]:
        """Cut rows into parts whose logits fit into memory."""
        return self.account.parts(num_rows, self.info.vocab_size * self.law_dtype.itemsize)

    def _say(self, hidden_RD: Tensor, slots_R: Tensor, ranks_R: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the target's own token at each rank; returns the tokens and their log-probabilities (float64), [R] each."""
        said = []
        for part in self._parts(len(hidden_RD)):
            logits_RV = self._logits(hidden_RD[part])
            law_RV = self._law(logits_RV, slots_R[part])
            tokens_R = self.acceptance.target(law_RV, slots_R[part], ranks_R[part])
            said.append((tokens_R, self._log_p(logits_RV, law_RV, tokens_R)))
        tokens, log_p = zip(*said, strict=True)
        return torch.cat(tokens), torch.cat(log_p)

    def _judge(self, hidden_RD: Tensor, q_BKV: Tensor | None, window: Window) -> tuple[Tensor, Tensor, Tensor]:
        """Verify a window of drafts with the hidden states of its valid rows.

        Returns how many drafts are accepted [B], the window's tokens with the one that comes after those in its place [B, A],
        and their log-probabilities, float64 [B, A].
        """
        self.stats.verified += len(hidden_RD)
        valid_BA = window.valid_BA
        log_p_BA = torch.zeros(valid_BA.shape, dtype=torch.float64, device=valid_BA.device)
        if self.acceptance.coupled:
            tokens_BA = torch.zeros_like(window.drafts_BA)
            # Each token that counts is the target's own.
            tokens_BA[valid_BA], log_p_BA[valid_BA] = self._say(
                hidden_RD, window.slots()[valid_BA], window.ranks_BA[valid_BA]
            )
            accepted_B, last_B = self.acceptance.compare(tokens_BA, window)
            return accepted_B, window.ending(accepted_B, last_B), log_p_BA
        slots_R = window.slots()[valid_BA]
        weighed = self._weigh(hidden_RD, window.drafts_BA[valid_BA], slots_R)
        sampled_BA = torch.zeros_like(log_p_BA)
        sampled_BA[valid_BA], log_p_BA[valid_BA] = weighed.sampled_R, weighed.plain_R
        accepted_B = self.acceptance.weigh(sampled_BA, q_BKV, window)
        row_BA = valid_BA.flatten().cumsum(0).view_as(valid_BA) - 1
        index_B, last = pick(row_BA, accepted_B), []
        for part in self._parts(len(index_B)):
            logits_RV, law_RV = self._again(hidden_RD, weighed, index_B[part], slots_R)
            last_R = self.acceptance.replace(law_RV, q_BKV, window, accepted_B, part)
            last.append((last_R, self._log_p(logits_RV, law_RV, last_R)))
        last_B, last_log_p_B = (torch.cat(parts) for parts in zip(*last, strict=True))
        put = torch.arange(log_p_BA.shape[1], device=log_p_BA.device) == accepted_B.unsqueeze(1)
        log_p_BA = torch.where(put, last_log_p_B.unsqueeze(1), log_p_BA)
        return accepted_B, window.ending(accepted_B, last_B), log_p_BA

    def _weigh(self, hidden_RD: Tensor, tokens_R: Tensor, slots_R: Tensor) -> Weighed:
        """Return how probable each token is in its row."""
        found, held = [], None
        for part in self._parts(len(hidden_RD)):
            logits_RV = self._logits(hidden_RD[part])
            law_RV, tokens = self._law(logits_RV, slots_R[part]), tokens_R[part]
            sampled_R = law_RV.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).to(torch.float64)
            found.append((sampled_R, self._log_p(logits_RV, law_RV, tokens)))
            held = (logits_RV, law_RV) if len(law_RV) == len(hidden_RD) else None
        sampled, plain = zip(*found, strict=True)
        return Weighed(torch.cat(sampled), torch.cat(plain), held)

    def _again(self, hidden_RD: Tensor, weighed: Weighed, index_N: Tensor, slots_R: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and distributions of some rows again: the held ones, else recomputed, which gives the same bits."""
        if weighed.held is not None:
            return weighed.held[0][index_N], weighed.held[1][index_N]
        logits_NV = self._logits(hidden_RD[index_N])
        return logits_NV, self._law(logits_NV, slots_R[index_N])

    def _allot(self, group: Group, most_B: Tensor) -> Tensor:
        """How many drafts each slot takes: the maximum, or as many as the budget allows."""
        if self.budget is None:
            return most_B
        num_kv = int(self.state.decided_S[group.index_B].sum())
        return self.budget.plan(group.index_B, most_B, kv_tokens=num_kv, fresh=group.fresh, joined=group.joined)

    @contextmanager
    def _timed(self, group: Group) -> Iterator[None]:
        """Report the seconds of the enclosed target forward to the budget; forwards with prompts don't count."""
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
        """Count one draft-verify round for the slots where `ended_B` (bool)."""
        state = self.state
        slots_B = group.index_B[ended_B]
        state.iterations_S[slots_B] += 1
        state.proposed_S[slots_B] += proposed_B[ended_B]
        state.accepted_S[slots_B] += accepted_B[ended_B]
        state.histogram_SH[slots_B, counts_B[ended_B]] += 1

    def _trace(self, group: Group, proposed: Tensor, num_proposed_B: Tensor, before_B: Tensor, ended_B: Tensor) -> None:
        """Trace one round of each slot where `ended_B`; `before_B` tokens were decided when it began."""
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

    def _stop_text(self, slot: int, common: StopText | None) -> StopText | None:
        """The stop text of the slot: its request's own, else the job's."""
        resident = self._residents[slot]
        own = None if resident is None else resident.request.settings.stop_text
        return common if own is None else own

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def _knows_logprob(self) -> bool:
        return True

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = outcome_of(self.state, slot, resident, self.counting.counters)
        if not self._knows_logprob():
            outcome.logprob = None
        return outcome
