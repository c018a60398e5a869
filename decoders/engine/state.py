"""The tensors of a batch, one row per slot, and the group of slots that one step decodes.

    rank      0 .. prompt-1 | prompt .. decided-1 | decided .. length-1
    holds     the prompt    | generated           | drafts and junk
    cached    |<------ cached columns hold the content of the token that stands there ----->|

Knows nothing of models, acceptance or the order in which samples come and go (slots.py).

The shape letters of all files; a file's own legend has only what it uses in addition, or in another sense:

    S  all slots                                       B  the slots, or samples, of this step
    T  rows or tokens of a slot                        R, N  flat rows: those of all slots one after another
    C  content rows of a slot                          Q  query rows of a slot
    W  columns of a slot, positions of a canvas        L, P  positions of one canvas
    K  most drafts of a slot                           V  vocabulary
    D  width of the model                              H  heads, d  width of a head

Here: H histogram bins.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoders.backbones.base import SlotCounters
from decoders.base import Outcome, Request, TraceStep
from decoders.draws.noise import key_words
from decoders.engine.memory import Account
from decoders.engine.orders import decoding_order


@dataclass(frozen=True, slots=True)
class Group:
    """The slots of one step: on the host, on the device, and whether this is their first forward.

    `joined` says that it is the first forward of some of them, whose prompts go with the others' rows.
    """

    slots: list[int]
    index_B: Tensor
    fresh: bool
    joined: bool = False

    def part(self, keep_B: Tensor) -> Group:
        """The slots where `keep_B` (bool)."""
        index_B = self.index_B[keep_B]
        return Group(index_B.tolist(), index_B, self.fresh, self.joined)


class Wide:
    """A tensor of a SlotState with a row for each slot in use, or for the first of them; what it holds moves with its sample.

    `data` becomes another tensor when slots are added, so never keep a reference. `is_noise`: the state's `noise_bytes` bound it.
    """

    def __init__(self, data: Tensor, *, is_noise: bool) -> None:
        self.data, self.is_noise = data, is_noise

    @property
    def slot_bytes(self) -> int:
        """What a row takes."""
        return math.prod(self.data.shape[1:]) * self.data.element_size()

    def with_rows(self, num_rows: int) -> Tensor:
        """The data with `num_rows` rows; new ones are zero."""
        if num_rows == self.data.shape[0]:
            return self.data
        data = self.data.new_zeros(num_rows, *self.data.shape[1:])
        both = min(num_rows, self.data.shape[0])
        data[:both] = self.data[:both]
        return data


class SlotState:
    """Struct of arrays, one row a slot; every tensor registered here moves with its sample.

    `noise_bytes` bounds all kept noise.
    """

    def __init__(self, num_slots: int, device: torch.device, *, max_commit: int) -> None:
        self.num_slots, self.device = num_slots, device
        self.num_used = 0
        """Slots for which wide tensors have rows."""
        self.noise_bytes = Account.unmeasured(device).noise
        self._columns: list[Tensor] = []
        self._wide: list[Wide] = []
        self.tokens_SW = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.order_SW = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)
        self.key_S2 = self.column(2)
        self.prompt_S, self.length_S = self.column(), self.column()
        self.decided_S, self.cached_S = self.column(), self.column()
        self.iterations_S, self.proposed_S, self.accepted_S = self.column(), self.column(), self.column()
        self.lookups_S = self.column()
        self.histogram_SH = self.column(max_commit + 1)
        self.logprob_S = self.column(dtype=torch.float64)
        # The log-probability of each committed token, by rank; kept from the first request on that asks for it.
        self.log_p_SW = torch.zeros(num_slots, 0, device=device)
        self._keeps_log_p = False

    def column(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Register and return a zeroed tensor [S, *shape]."""
        tensor = torch.zeros(self.num_slots, *shape, dtype=dtype, device=self.device)
        self._columns.append(tensor)
        return tensor

    def wide(self, *shape: int, dtype: torch.dtype, is_noise: bool = False) -> Wide:
        """Register and return a tensor of many numbers a slot, [slots in use, *shape]; of noise fewer, within `noise_bytes`."""
        wide = Wide(torch.zeros(0, *shape, dtype=dtype, device=self.device), is_noise=is_noise)
        wide.data = wide.with_rows(self._rows_of(wide, self.num_used))
        self._wide.append(wide)
        return wide

    @property
    def wide_bytes(self) -> int:
        """Bytes of the wide tensors per slot in use, without noise."""
        return sum(wide.slot_bytes for wide in self._wide if not wide.is_noise)

    def use(self, num_slots: int) -> None:
        """Give the wide tensors rows for this many slots; if memory runs out, nothing changes."""
        new = [wide.with_rows(self._rows_of(wide, num_slots)) for wide in self._wide]
        for wide, data in zip(self._wide, new, strict=True):
            wide.data = data
        self.num_used = num_slots

    def _rows_of(self, wide: Wide, num_slots: int) -> int:
        return min(num_slots, self.noise_bytes // max(1, wide.slot_bytes)) if wide.is_noise else num_slots

    def widen(self, num_columns: int) -> None:
        """Make room for canvases of `num_columns` tokens; if memory runs out, nothing changes."""
        have = self.tokens_SW.shape[1]
        if num_columns > have:
            extra = torch.zeros(self.num_slots, num_columns - have, dtype=torch.int64, device=self.device)
            tokens, order = torch.cat([self.tokens_SW, extra], 1), torch.cat([self.order_SW, extra], 1)
            self.tokens_SW, self.order_SW = tokens, order
        missing = self.tokens_SW.shape[1] - self.log_p_SW.shape[1]
        if self._keeps_log_p and missing > 0:
            self.log_p_SW = torch.cat([self.log_p_SW, self.log_p_SW.new_zeros(self.num_slots, missing)], 1)

    def start(self, slot: int, request: Request) -> Tensor:
        """Put a request into a slot and return its order; junk of the slot's last sample stays in unreachable columns."""
        order, num_prompt = decoding_order(request.canvas, request.hole_order)
        order_L = torch.from_numpy(order).to(self.device)
        length = len(order)
        for tensor in self._columns:
            tensor[slot] = 0
        self.order_SW[slot, :length] = order_L
        prompt = request.canvas[order[:num_prompt]].astype(np.int64)
        self.tokens_SW[slot, :num_prompt] = torch.from_numpy(prompt).to(self.device)
        self.prompt_S[slot] = self.decided_S[slot] = num_prompt
        self.length_S[slot] = length
        self.key_S2[slot] = key_words([request.key], self.device)[0]
        if request.settings.token_logprobs and not self._keeps_log_p:
            self._keeps_log_p = True
            self.widen(0)
        return order_L

    def commit(self, slots_B: Tensor, tokens_BT: Tensor, counts_B: Tensor, log_p_BT: Tensor) -> None:
        """Decide the next `counts_B` tokens of each slot: write them, add their log-probabilities."""
        offsets_T = torch.arange(tokens_BT.shape[1], device=self.device)
        keep_BT = offsets_T < counts_B.unsqueeze(1)
        ranks_BT = self.decided_S[slots_B].unsqueeze(1) + offsets_T
        which_B = slots_B.unsqueeze(1).expand_as(keep_BT)
        self.tokens_SW[which_B[keep_BT], ranks_BT[keep_BT]] = tokens_BT[keep_BT]
        if self._keeps_log_p:
            self.log_p_SW[which_B[keep_BT], ranks_BT[keep_BT]] = log_p_BT[keep_BT].to(torch.float32)
        self.logprob_S[slots_B] += torch.where(keep_BT, log_p_BT, torch.zeros_like(log_p_BT)).sum(1)
        self.decided_S[slots_B] += counts_B

    def move(self, source: int, target: int) -> None:
        """Move a sample from one slot to another."""
        for tensor in (self.tokens_SW, self.order_SW, self.log_p_SW, *self._columns):
            tensor[target] = tensor[source]
        for wide in self._wide:
            if source < len(wide.data):
                wide.data[target] = wide.data[source]


@dataclass(slots=True)
class Resident:
    """The host's side of a slot: its request and its times (perf_counter seconds)."""

    request: Request
    queued_s: float
    admitted_s: float
    started_at_s: float
    trace: list[TraceStep] | None


def trimmed(histogram: list[int]) -> list[int]:
    """Drop the empty bins at the end, in place."""
    while histogram and histogram[-1] == 0:
        histogram.pop()
    return histogram


def untouched(resident: Resident) -> Outcome:
    """The outcome of a canvas without holes: nothing to do, nothing counted."""
    wait_s = resident.admitted_s - resident.queued_s
    return Outcome(
        index=resident.request.index,
        tokens=np.zeros(0, dtype=np.int32),
        finish="filled",
        logprob=0.0,
        nfe=0,
        nfe_draft=0,
        iterations=0,
        proposed=0,
        accepted=0,
        accept_hist=[],
        wait_s=wait_s,
        prefill_s=0.0,
        decode_s=0.0,
        total_s=wait_s,
        device_s=0.0,
        batch_rows=0.0,
        pad_fraction=0.0,
        started_at_s=resident.started_at_s,
        trace=resident.trace,
    )


def outcome_of(state: SlotState, slot: int, resident: Resident, counters: SlotCounters) -> Outcome:
    """The outcome of the sample in `slot`, with the fields that every decoder fills."""
    now = time.perf_counter()
    prompt, length = int(state.prompt_S[slot]), int(state.length_S[slot])
    logprob = float(state.logprob_S[slot])
    wait_s, prefill_s = resident.admitted_s - resident.queued_s, counters.first_forward_s[slot]
    decode_s = now - resident.admitted_s - prefill_s
    broken = not np.isfinite(logprob)
    canvas_order = state.order_SW[slot, prompt:length].argsort()
    tokens = state.tokens_SW[slot, prompt:length][canvas_order].to("cpu", torch.int32).numpy()
    scores = None
    if resident.request.settings.token_logprobs and not broken:
        scores = state.log_p_SW[slot, prompt:length][canvas_order].to("cpu").numpy()
    return Outcome(
        index=resident.request.index,
        tokens=tokens[:0] if broken else tokens,
        finish="filled",
        logprob=None if broken else logprob,
        nfe=counters.nfe[slot],
        nfe_draft=int(state.lookups_S[slot]),
        iterations=int(state.iterations_S[slot]),
        proposed=int(state.proposed_S[slot]),
        accepted=int(state.accepted_S[slot]),
        accept_hist=trimmed(state.histogram_SH[slot].tolist()),
        wait_s=wait_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        total_s=wait_s + prefill_s + decode_s,
        device_s=counters.device_s[slot],
        batch_rows=counters.active_rows[slot] / counters.nfe[slot],
        pad_fraction=1.0 - counters.used_rows[slot] / counters.computed_rows[slot],
        started_at_s=resident.started_at_s,
        error_kind="nan_logits" if broken else None,
        error="the model gave logits that are not finite" if broken else None,
        trace=resident.trace,
        token_logprobs=scores,
    )
