"""Runs one model of an engine: a batch down, network, output layer and draws, a record up. And times what it runs.

    start     send the batch and run it, without waiting; where it can be captured, as one graph (cuda_graphs.py)
    wait      the record of a forward, on the host; others may be started before

A record is flat float64: the fields of the sampled rows (sampler.py), then the sum of the hidden states of each row, which is
NaN or infinite if any of these is. Legend: see batch.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.backbones.rows import Host, Rows, TokenRows
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import FAR, NO_DRAFT
from draftmill.decoders.engine.batch import Batch, Draws, Layout
from draftmill.decoders.engine.cuda_graphs import Work, find_graphs
from draftmill.decoders.engine.memory import Shape
from draftmill.decoders.engine.sampler import Logits, Sampler
from draftmill.decoders.engine.setup import Setup

_LEAST_ROWS: Final = 64
_T = TypeVar("_T")


class Clock:
    """Times calls one by one: on a GPU by the device's own events, which are read when something else has waited for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps = list[Any]()
        self._is_paused = False

    def measure(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call and time a function; calls inside of it are timed with it."""
        if self._is_paused:
            return function(*arguments)
        began, self._is_paused = self._now(), True
        try:
            return function(*arguments)
        finally:
            self._laps.append((began, self._now()))
            self._is_paused = False

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def cut(self) -> list[Any]:
        """The calls since this was last asked."""
        laps, self._laps = self._laps, []
        return laps


def seconds_of(laps: Sequence[tuple[Any, Any]]) -> list[float]:
    """The seconds of each call; an answer must have come since: then nothing waits."""
    for _, ended in laps:
        if not isinstance(ended, float):
            ended.synchronize()
    return [ended - began if isinstance(ended, float) else began.elapsed_time(ended) / 1000.0 for began, ended in laps]


class HostCopy:
    """Numbers on their way from the device to the host; other work may be started on the device before they are read."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            # The memory may be a captured forward's, which the next one fills again.
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def numbers(self) -> NDArray[np.float64]:
        """What has come; waits for it, and for nothing that was started later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


class Started(NamedTuple):
    """A forward whose record can be read, if it sampled anything. `computed` rows were run, with padding; `laps` are its
    times."""

    batch: Batch[Host]
    copy: HostCopy | None
    laps: list[Any]
    computed: int

    def wait(self) -> NDArray[np.float64] | None:
        """The record; None if nothing was sampled."""
        return None if self.copy is None else self.copy.numbers()

    @property
    def seconds(self) -> list[float]:
        """Of network, output layer and so on; the record must have been read."""
        return seconds_of(self.laps)


class ModelRunner:
    """A model of an engine, the target or the one that drafts, and the sampler of its rows. Logits have the target's vocabulary.
    Where a model runs whole canvases or windows each time, their rows are memory of their own."""

    def __init__(
        self, setup: Setup, algorithm: Algorithm, sampler: Sampler, *, is_target: bool, hides_host: bool
    ) -> None:
        backbone, windows = (setup.backbone, None) if is_target else (setup.drafter, algorithm.windows)
        assert backbone is not None, "a drafting model"
        assert windows is None or setup.drafter_info is not None, "a drafting model with a mask"
        self.backbone, self.device, self.is_target = backbone, backbone.device, is_target
        self._sampler, self.rule, self._vocab_size = sampler, sampler.rule(is_target=is_target), setup.info.vocab_size
        self._info, self._is_full = setup.drafter_info if windows else None, windows == "full"
        # Where nothing is kept whole canvases run, which keep a device busy: they are not captured.
        if is_target:
            self.layout = Layout(
                streams=algorithm.kind == "any_subset",
                keeps=algorithm.keeps,
                # On a CPU each node has its own columns, in the order of positions: only there bits are promised.
                by_node=algorithm.nodes and backbone.device.type == "cpu" and not backbone.reads_rows,
                mask_id=setup.info.mask_id if algorithm.kind == "masked" else None,
                has_flags=backbone.has_sums,
                num_notes=len(sampler.noted_C) if hides_host else 0,
            )
            self._num_slots, is_small = algorithm.num_slots, algorithm.keeps
            self._whole = algorithm.kind == "masked" or not algorithm.keeps
        else:
            self.layout = Layout(
                most_id=backbone.vocab_size - 1 if backbone.vocab_size < self._vocab_size else FAR,
                has_flags=backbone.has_sums,
                num_notes=len(sampler.noted_C) if windows is None else 0,
            )
            self._num_slots, is_small, self._whole = 1, windows is None, windows is not None
        self.graphs = find_graphs(backbone) if is_small else None
        self.clock = Clock(backbone.device)
        self.is_captured = self.graphs is not None and sampler.kernel is not None
        """Whether forwards are captured, if they are small."""
        self._columns = 0
        self._never: Tensor | None = None
        if self._info is not None:
            never = {*self._info.suppressed, *([] if self._info.mask_id is None else [self._info.mask_id])}
            inside = sorted(token for token in never if token < self._vocab_size)
            self._never = torch.tensor(inside, dtype=torch.int64, device=self.device)
        self.hidden_ND: Tensor | None = None
        """Hidden states of all rows (query rows) of the last forward; a Roll reads them."""
        self._source: Work | None = None  # the graph that ran the last forward; None if none did

    @property
    def cell_bytes(self) -> int:
        """Bytes of a column of a slot; where whole canvases run, with the activations of a row."""
        return self.backbone.cell_bytes + (self.backbone.row_bytes if self._whole else 0)

    @property
    def spreads(self) -> bool:
        """Whether slots of different widths stand in one pool."""
        return self.backbone.spreads and self.layout.keeps and self._info is None

    def resize(self, shape: Shape, multiple: int) -> None:
        """Resize the cache to this shape; unless that `stays` as it is, all graphs must have been dropped."""
        num_slots, num_columns = shape.slots, shape.columns
        self._source = self.hidden_ND = None
        if self._num_slots > 1:
            num_slots, num_columns = num_slots * self._num_slots, num_columns // self._num_slots // multiple * multiple
        if self._info is not None and self._info.max_length is not None:
            longest = self._info.max_length
            num_columns = longest if self._is_full and num_slots else min(num_columns, longest)
        self.backbone.resize(num_slots, num_columns)
        self._columns = num_columns

    def spread(self, shape: Shape) -> bool:
        """Have slots of up to this many columns in one pool; whether all that graphs read is where it was."""
        self._columns = shape.columns
        return self.backbone.spread(shape.slots, shape.columns)

    def wipe(self, slots: Iterable[int]) -> None:
        """Clear slots that hold NaN or infinity: a hidden column weighs 0, but 0 times NaN is NaN."""
        for slot in slots:
            self.backbone.clear_slot(slot)

    def start(self, b: Batch[Host], *, comes_again: bool = True) -> Started:
        """Send the batch and run it, without waiting for its record. `comes_again`: there will be others of its size, so that it
        is worth a graph."""
        others = b.draws.split_off() if self.rule.top_k is not None else None
        is_captured = comes_again and self._pad_batch(b)
        if self.backbone.reads_rows:
            b.rows.add_tiles(self.backbone.tiling, is_padded=b.is_padded)
        if is_captured:
            assert self.graphs is not None, "a forward is filled up to be captured"
            done = self.clock.measure(self.graphs.run, "forward", b, self._work)
        else:
            sent = b.to(self.device)
            hidden_ND = self.clock.measure(self.backbone.forward, self.rows(sent))
            record = self._record(sent, hidden_ND) if b.draws.num_sampled else torch.zeros(0)
            done = Work(hidden_ND, record, self.backbone.num_rows_computed)
        self.hidden_ND, self._source = done.hidden_ND, done if done.stays else None
        if not b.draws.num_sampled and self.device.type == "cuda":
            # Nobody waits for this forward: its seconds are read with the next one's.
            return Started(b, None, [], done.num_computed)
        record = done.record if others is None else self._redraw(done.record, b.draws, others)
        copy = HostCopy(record) if b.draws.num_sampled else None
        return Started(b, copy, self.clock.cut(), done.num_computed)

    def _work(self, sent: Batch) -> Work:
        hidden_ND = self.backbone.forward(self.rows(sent))
        return Work(hidden_ND, self._record(sent, hidden_ND), self.backbone.num_rows_computed)

    def _record(self, sent: Batch, hidden_ND: Tensor) -> Tensor:
        record = self.draw(sent.draws, hidden_ND, is_target=self.is_target)
        if not self.layout.has_flags:
            return record
        sums_N = self.backbone.sums_N
        assert sums_N is not None, "a forward of this model gives sums"
        if sent.is_padded:
            # Padding rows may hold anything: they are ignored.
            sums_N = sums_N.where(torch.cat(sent.rows.lines) >= 0, 0.0)
        return torch.cat([record, sums_N])

    def draw(self, sent: Draws, hidden_ND: Tensor, *, is_target: bool) -> Tensor:
        """The fields of the sampled rows, flat float64: [A, F, R], then under the rejection rule the drafts that hold, [B]."""
        logits, hidden_RD = self._sampled(sent, hidden_ND)
        if sent.judging is not None:
            return self._sampler.judge(logits, hidden_RD, sent, self.parts(len(hidden_RD)), is_target=is_target)
        return self._draw_parts(logits, hidden_RD, sent, is_target=is_target).flatten()

    def _sampled(self, sent: Draws, hidden_ND: Tensor) -> tuple[Logits, Tensor]:
        """The output layer, and the hidden states of the sampled rows, [R, D]; behind them those of their partners."""
        hidden_RD = hidden_ND if sent.reads_all else hidden_ND.index_select(0, sent.row_R)
        if sent.partner_R is None:
            return partial(self.logits, raw=sent.by_kernel), hidden_RD
        return self.guided_logits, torch.cat([hidden_RD, hidden_ND.index_select(0, sent.partner_R)], 1)

    def _draw_parts(self, logits: Logits, hidden_RD: Tensor, sent: Draws, *, is_target: bool) -> Tensor:
        """The fields of the sampled rows by the coupled rule, [A, F, R]; the logits of a part of the rows exist at a time."""
        sampler = self._sampler
        parts = [
            sampler.draw_part(logits(hidden_RD[part]), sent, part, is_target=is_target)
            for part in self.parts(len(hidden_RD), by_kernel=sent.by_kernel)
        ]
        fields_AFR = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        sampler.note(sent, fields_AFR[0, 0].to(torch.int64))
        return fields_AFR

    def parts(self, num_rows: int, *, by_kernel: bool = False) -> list[slice]:
        """Cuts rows into parts whose logits are held at once; one part where there are no rows. No part is made smaller than a
        product's least rows, which it would be padded to. A kernel makes no copies of logits: it has twice as many at once."""
        itemsize = self.backbone.dtype.itemsize if by_kernel else max(4, self.backbone.dtype.itemsize)
        step = max(_LEAST_ROWS, (1 + by_kernel) * self._sampler.plan.logits // (self._vocab_size * itemsize))
        return [slice(first, first + step) for first in range(0, max(num_rows, 1), step)]

    def _redraw(self, record: Tensor, draws: Draws[Host], others: Draws[Host]) -> Tensor:
        """The record of a batch, with the rows that were split off as torch draws them; a graph's own record stays as it is."""
        assert self.hidden_ND is not None, "the forward has run"
        sent = others.to(self.device)
        at_R = sent.at_R
        assert at_R is not None, "rows that were split off"
        drawn_AFO = self._draw_parts(*self._sampled(sent, self.hidden_ND), sent, is_target=self.is_target)
        count = drawn_AFO[:, :, 0].numel() * draws.row_R.shape[-1]
        fields_AFR = record[:count].view(*drawn_AFO.shape[:2], -1).index_copy(2, at_R, drawn_AFO)
        return torch.cat([fields_AFR.flatten(), record[count:]])

    def size(self, count: int) -> int:
        return (self.graphs and self.graphs.size(count)) or count

    def _pad_batch(self, b: Batch[Host]) -> bool:
        """Fill the batch up to the size of a captured forward; False where this one is not captured."""
        graphs, draws = self.graphs, b.draws
        is_whole = draws.allowed_R is None and draws.token_ER is None
        is_drawn = draws.by_kernel or (draws.judging is not None and is_whole)
        if graphs is None or not self.is_captured or not is_drawn or draws.num_tops:
            return False
        sizes = dict[str, int]()
        for axis, count in b.counts.items():
            size = graphs.size(count) if count else 0
            if size is None:
                return False
            sizes[axis] = size
        sizes = graphs.choose(sizes)
        if len(self.parts(sizes["R"], by_kernel=draws.by_kernel)) > 1:
            return False
        # Without `start_N` slot 0, where dead rows are, begins at the pool's first cell, too.
        assert b.rows.start_N is not None or not self.layout.streams, "dead rows are of the first slot of the forward"
        dead = {
            "line_N": -1, "line_Q": -1, "column_N": self.backbone.dead_cell, "settings_4R": 1, "scored_R": NO_DRAFT,
            "note_R": len(self._sampler.noted_C) - 1, "cell_R": self._sampler.dead_cell, "row_D": draws.num_sampled,
        }  # fmt: skip
        b.fill_up(sizes, dead, num_positions=self._columns)
        return True

    def more(self, key: Hashable, draws: Draws[Host], work: Callable[[Draws, Tensor], Tensor]) -> NDArray[np.float64]:
        """The record of more draws, which `work` makes of the hidden states of the last forward. With a `key` they may be
        captured."""
        hidden_ND, source = self.hidden_ND, self._source
        assert hidden_ND is not None, "a forward came before"
        if key is None or self.graphs is None or source is None:
            return HostCopy(self.clock.measure(work, draws.to(self.device), hidden_ND)).numbers()
        states_ND = source.hidden_ND
        done = self.clock.measure(
            self.graphs.run, (key, source), draws, lambda sent: Work(states_ND, work(sent, states_ND), 0)
        )
        return HostCopy(done.record).numbers()

    def rows(self, sent: Batch) -> Rows:
        """The rows of a batch, with the tokens that the host has not read."""
        rows, noted_C = sent.rows, self._sampler.noted_C
        if rows.unread_N is None:
            return rows
        if not (isinstance(rows, TokenRows) and rows.takes_drafts):
            noted_C = torch.cat([noted_C, rows.token_N])
        return replace(rows, token_N=noted_C.index_select(0, rows.unread_N), unread_N=None)

    def logits(self, hidden_RD: Tensor, *, raw: bool = False) -> Tensor:
        """The logits of rows, as wide as the target's vocabulary: what only one of them has is cut off, or impossible. Those of a
        GPU's kernel are `raw`, in the dtype of the products."""
        of = self.backbone.raw_logits if raw else self.backbone.logits
        logits_RV: Tensor = self.clock.measure(of, hidden_RD)
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            logits_RV = functional.pad(logits_RV, (0, missing), value=-torch.inf)
        elif missing:
            logits_RV = logits_RV[:, : self._vocab_size]
        return logits_RV if self._never is None else logits_RV.index_fill(-1, self._never, -torch.inf)

    def guided_logits(self, both_RD: Tensor) -> Tensor:
        """The logits of rows guided by their partners, whose hidden states stand behind their own (LLaDA's `cfg_scale`)."""
        own_RV, other_RV = (self.logits(half_RD.contiguous()) for half_RD in both_RD.chunk(2, 1))
        return other_RV + (self._sampler.algorithm.guidance + 1.0) * (own_RV - other_RV)

    def embed(self, tokens_R: Tensor) -> Tensor:
        """The embeddings of tokens, [R, D]; in a drafting model of windows one that it does not know reads as a mask."""
        if self._info is not None and self._info.mask_id is not None:
            tokens_R = tokens_R.masked_fill(tokens_R >= self.backbone.vocab_size, self._info.mask_id)
        return self.backbone.embed(tokens_R)
