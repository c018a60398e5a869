"""The engine: keeps one generator a slot, runs what all of them ask as one forward, and sends each its answer.

    admit        a sample gets a slot; its generator starts with its first turn
    step         whose turn is it: the new samples alone, or all, with as many rows of new prompts as a budget allows
                 how many drafts may each take (lengths `auto` only)
                 draws from decoders' own weights and the drafting model's forwards, as long as anyone asks for them
                 the target's forward: pack the asks, run, draw or judge (block-diffusion models: rows that asks name)
                 windows that a head rolls over from rows of that forward
                 samples whose generators end give their outcomes and free their slots

A sample keeps its slot. The next admission takes the lowest free one, so that the slots in use are mostly adjacent and a forward
reads the cache in place. Of a sample, only its cache, its noise and the distributions of its drafts are on
the device. See draftmill.decoders.base.Decoder, and docs/engine.md for the design.

Legend: B samples of a forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.base import JOB_SETTINGS, EngineStats, Outcome, Request
from draftmill.decoders.engine.algorithm import Algorithm, check_completion, without_scored
from draftmill.decoders.engine.answers import Answers, NoiseAnswers
from draftmill.decoders.engine.asks import (
    BARE,
    DRAFT,
    FAR,
    FIELDS,
    GIVEN,
    JUDGE,
    MODEL,
    NO_DRAFT,
    SURE,
    TARGET,
    WIDE,
    Answer,
    Ask,
    Noted,
    Roll,
    Weights,
    Wish,
)
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.canvases import CanvasLane
from draftmill.decoders.engine.counters import Counters
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.graphs import find_graphs, why_no_graphs
from draftmill.decoders.engine.lanes import Lane, Packed, Started
from draftmill.decoders.engine.lengths import Lengths
from draftmill.decoders.engine.look_packing import copied, pack
from draftmill.decoders.engine.memory import Account, column_multiple
from draftmill.decoders.engine.named import NamedRows
from draftmill.decoders.engine.named_answers import NamedAnswers
from draftmill.decoders.engine.orders import decoding_order
from draftmill.decoders.engine.packing import Asked, Ints, Table
from draftmill.decoders.engine.parcels import Parcel
from draftmill.decoders.engine.picks import Picks
from draftmill.decoders.engine.pieces import DEVICE_ROWS, ask_of_piece, deal, ran_ahead
from draftmill.decoders.engine.prefixes import Prefixes
from draftmill.decoders.engine.prompts import Prompts
from draftmill.decoders.engine.rolls import Rolling
from draftmill.decoders.engine.room import Room
from draftmill.decoders.engine.samples import Sample, Times, equal_queries
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.token_lanes import TokenLane
from draftmill.decoders.engine.two_stream_lanes import TwoStreamLane
from draftmill.decoders.engine.windows import WindowLane
from draftmill.decoders.kernels.find import find_choice, find_notes

# At most one new sample in this many joins the others: more of them fill a forward of their own.
_FEW_PROMPTS: Final = 4
# Rows whose tokens are decided or checked by the target, by kind.
_IS_VERIFIED_K: Final = np.isin(np.arange(GIVEN + 1), (TARGET, JUDGE, SURE))


@dataclass(frozen=True, slots=True)
class Turn:
    """The samples of one step. It is the first one of those that are `new`; `pieces` run a part of their prompts only.

    `fresh`: there are no others; `joined`: there are. `num_waiting` samples are left out until others' prompts have run.
    """

    samples: list[Sample]
    fresh: bool = False
    joined: bool = False
    new: Sequence[Sample] = ()
    pieces: Sequence[Sample] = ()
    num_waiting: int = 0

    @classmethod
    def of(cls, everyone: list[Sample], running: list[Sample], line: list[Sample]) -> Turn:
        """The step of those whose prompts have run, and of `running` ones among those in `line`, whose prompts have not."""
        slots = {sample.slot for sample in line} - {sample.slot for sample in running}
        samples = [sample for sample in everyone if sample.slot not in slots]
        fresh = len(samples) == len(running)
        new, pieces = ([one for one in running if bool(one.piece) is cut] for cut in (False, True))
        return cls(samples, fresh, bool(running) and not fresh, new, pieces, len(slots))

    @property
    def is_usual(self) -> bool:
        """Whether the time of the step says something about later ones: prompts take longer."""
        return not (self.fresh or self.joined)


class Engine:
    """Runs an algorithm for up to `max_rows` samples at once; `answers` replaces the samples' own noise in enumerations."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, answers: Answers | None = None) -> None:
        self.backbone, self.info, self.algorithm = setup.backbone, setup.info, algorithm
        self.max_rows, self.max_tokens, self.tracing = setup.max_rows, setup.max_tokens, setup.trace
        # Texts of any-subset models have no ends; a masked canvas is filled to its end unless a completion says what ends it.
        has_ends = algorithm.kind != "any_subset" and not algorithm.scores
        self.stops = setup.stops or (Stops() if algorithm.kind != "masked" else None) if has_ends else None
        self.heads, self.joins_prompts = setup.heads, algorithm.joins_prompts
        self._names = algorithm.kind == "blocks"
        self.account = Account.unmeasured(setup.backbone.device)
        self.lanes: list[Lane] = [self._target(setup)]
        if setup.drafter:
            self.lanes.append(self._drafting(setup))
        for lane in self.lanes:
            lane.graphs = find_graphs(lane.backbone) if lane.can_capture else None
        made = NamedAnswers if self._names else Picks if algorithm.canvases is not None else NoiseAnswers
        self.answers: Answers = answers or made(setup, algorithm, account=lambda: self.account)
        self.stats = EngineStats()
        self.counters = Counters(setup.max_rows, self.stats)
        self._space = Room(
            max_rows=setup.max_rows,
            max_tokens=setup.max_tokens,
            account=self.account,
            multiple=column_multiple(setup.backbone),
            columns=self.columns,
            slot_bytes=self.slot_bytes,
        )
        has_drafter = len(self.lanes) > 1
        self.lengths = Lengths(setup.max_rows, algorithm, has_drafter=has_drafter) if algorithm.most_auto else None
        self._shape = (0, 0)
        self.prefixes = Prefixes(algorithm.grain)
        self.prompts = Prompts(lambda: self.algorithm, self.prefixes, self.lanes[0], setup.info.vocab_size, self.stats)
        self._prompt_rows = setup.prompt_rows or (DEVICE_ROWS if getattr(setup.backbone, "reads_rows", False) else None)
        self._was_mixed = False
        self._slots: list[Sample | None] = []
        self._instant: list[Outcome] = []
        self._all_slots: Ints = np.arange(setup.max_rows)
        self._rolled: Table | None = None  # the rows of the last forward from which a window can be rolled

    def _drafting(self, setup: Setup) -> Lane:
        if self.algorithm.windows:
            return WindowLane(setup, self.algorithm.windows)
        assert setup.drafter is not None, "a drafting model"
        lane = TokenLane(setup.drafter, setup.info.vocab_size, is_target=False)
        lane.drafted_C = torch.zeros(2 * setup.max_rows + 1, dtype=torch.int64, device=lane.device)
        return lane

    def _target(self, setup: Setup) -> Lane:
        if (canvases := self.algorithm.canvases) is not None:
            return CanvasLane(setup.backbone, setup.info, canvases)
        kind = TwoStreamLane if self.algorithm.kind == "any_subset" else TokenLane
        return kind(setup.backbone, setup.info.vocab_size, is_target=True)

    # ---- admission -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Number of samples inside: in a slot, or finished without needing one."""
        return self._inside + len(self._instant)

    @property
    def _inside(self) -> int:
        return len(self._slots) - self._slots.count(None)

    @property
    def samples(self) -> list[Sample]:
        """The samples in slots."""
        return [sample for sample in self._slots if sample is not None]

    @property
    def graphs(self) -> str:
        """Whether forwards are replayed as graphs: `on`, or `off: ` and why. `on` as long as nothing has failed."""
        reasons = [lane.graphs.stopped if lane.graphs else why_no_graphs(lane.backbone) for lane in self.lanes]
        return next((f"off: {reason}" for reason in reasons if reason), "on")

    def columns(self, length: int) -> int:
        """How many cached columns a canvas of this length takes; with graphs one more, for rows that fill up a forward."""
        canvases = self.algorithm.canvases
        if canvases is not None and not canvases.cached:
            return canvases.num_slots * rounded(length, column_multiple(self.backbone))
        return self.algorithm.columns(length) + any(lane.graphs is not None for lane in self.lanes)

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes of a sample with this many columns in its slot of each model's cache."""
        return num_columns * sum(lane.cell_bytes for lane in self.lanes) + self.answers.slot_bytes

    def room(self, length: int) -> int:
        """How many samples of this canvas length fit now; at least 1 when nothing is inside, however long."""
        inside, most = self._inside, self._space.most_rows(self._space.columns(self._longest_with(length)))
        if inside == 0:
            return max(most, 1)
        # A longer canvas may leave fewer slots than the highest one that is in use; then it waits for that sample.
        return most - inside if most >= len(self._slots) else 0

    def most_rows(self, length: int) -> int:
        """How many samples of this canvas length can run at once; 0 if not even one fits into memory."""
        columns = self._space.columns(length)
        return max(self._space.most_rows(columns), int(self._space.fits(1, columns)))

    def fit(self, free_bytes: int) -> None:
        """Limit the batch to `free_bytes` of device memory, measured after all models were loaded."""
        device, dtype = self.backbone.device, self.backbone.dtype
        self.account = self._space.account = Account.of(
            device,
            free_bytes,
            row_bytes=int(getattr(self.backbone, "row_bytes", 0)),
            keeps_noise=find_choice(device, dtype) is None or find_notes(device, dtype) is None,
            captures=any(lane.graphs is not None for lane in self.lanes),
        )

    def _longest_with(self, length: int) -> int:
        return max([length, 1, *(len(sample.request.canvas) for sample in self._slots if sample is not None)])

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        """Give each request a slot; a canvas without holes is finished at once."""
        now = time.perf_counter()
        queued = [now] * len(requests) if queued_at_s is None else queued_at_s
        waiting = []
        for request, queued_s in zip(requests, queued, strict=True):
            sample = self._made(request, Times(queued_s, now, time.time()))
            if sample.prompt == sample.length:
                self._instant.append(sample.outcome(None))
            else:
                waiting.append(sample)
        if waiting:
            needed = max(self._inside + len(waiting), len(self._slots))
            self._make_room(needed, max(sample.length for sample in waiting))
        for sample in waiting:
            self._place(sample)

    def _made(self, request: Request, times: Times) -> Sample:
        scores, masked = self.algorithm.scores, request.canvas
        if scores:
            # A score has no settings of its own, and its tokens stand where others have holes.
            request, masked = replace(request, settings=JOB_SETTINGS), without_scored(request)
        order, prompt = decoding_order(masked, request.hole_order)
        ranks = order.tolist() if self.algorithm.kind == "any_subset" else None
        if self.algorithm.kind == "causal" and prompt < len(request.canvas):
            check_completion(masked, scores=scores)
        return self.algorithm.sample(
            request, ranks, prompt, stops=self.stops, times=times, stats=self.stats, traced=self.tracing
        )

    def _make_room(self, needed: int, length: int) -> None:
        """Give the caches at least `needed` slots, for canvases of this length too."""
        shape = self._space.shape(self._shape, needed=needed, longest=self._longest_with(length))
        if shape != self._shape:
            self._allocate(*shape)

    def _allocate(self, num_slots: int, num_columns: int) -> None:
        self._shape = (0, 0)  # until the resize has succeeded
        self.answers.use(min(num_slots, self.max_rows))
        for lane in reversed(self.lanes):
            lane.resize(num_slots, num_columns)
        self.prefixes.resize(num_slots, num_columns)
        self._shape = (num_slots, num_columns)

    def _place(self, sample: Sample) -> None:
        slot = sample.slot = self._slots.index(None) if None in self._slots else len(self._slots)
        assert slot < self.max_rows, "admit called without room"
        self._slots[slot : slot + 1] = [sample]
        for lane in self.lanes:
            lane.start(sample)
        self.answers.start(sample)
        self.counters.start(slot)
        if self.lengths is not None:
            self.lengths.start(slot)
        sample.decoding = self.algorithm.decode(sample)
        if self.algorithm.has_prompt(sample):
            self.prompts.came(sample)
        else:
            self.prefixes.forget(slot)

    def clear(self) -> list[int]:
        """Free every slot, and the caches' memory; returns the indices of the requests that were inside."""
        dropped = [sample.request.index for sample in self._slots if sample] + [one.index for one in self._instant]
        for slot in range(len(self._slots)):
            self._release(slot)
        self._slots, self._instant = [], []
        self.prompts.clear()
        self._allocate(0, 0)
        return dropped

    def _release(self, slot: int) -> None:
        self.answers.release(slot)
        for lane in self.lanes:
            lane.release(slot)

    # ---- whose turn it is ----------------------------------------------------------------------------------------

    def _turn(self) -> Turn:
        """With a budget of rows, prompts run beside the others, in pieces. Without, many go together, a few with the others."""
        everyone, line = self.samples, self.prompts.samples
        if not line:
            self._was_mixed = False
            return Turn(everyone)
        budget = self._budget(len(line), len(everyone))
        if budget == 0:
            return Turn.of(everyone, [], line)
        ready = self.prompts.ready()
        if budget is None:
            new = sorted(ready, key=lambda sample: sample.slot)
            return Turn.of(sorted(line, key=lambda sample: sample.slot), new[: self._fitting(new)], line)
        return Turn.of(everyone, deal(ready, self.algorithm, budget), line)

    def _budget(self, num_new: int, num_samples: int) -> int | None:
        """How many rows of prompts may run beside the others' rows now; None if prompts run without the others."""
        if self._prompt_rows is None:
            joins = self.joins_prompts and _FEW_PROMPTS * num_new <= num_samples and self.backbone.device.type == "cpu"
            return FAR if joins else None
        is_mixed = num_new < num_samples
        if is_mixed and self._was_mixed and self.lengths is not None:
            # Lengths `auto` are chosen by the times of steps without prompts: every other one is such a step.
            self._was_mixed = False
            return 0
        self._was_mixed = is_mixed
        return min(self._prompt_rows, self.account.prompt_rows or self._prompt_rows)

    def _fitting(self, new: list[Sample]) -> int:
        """How many prompts fit into the memory of one forward; at least one."""
        most, num_rows = self.account.prompt_rows, 0
        for count, sample in enumerate(new):
            num_rows += len(sample.request.canvas) - sample.cached
            if most is not None and count and num_rows > most:
                return count
        return len(new)

    # ---- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """Run the target once for the samples whose turn it is; return the outcomes of those that ended."""
        done, self._instant = self._instant, []
        if not self._slots:
            return done
        turn = self._turn()
        deciding = self._begin(turn)
        if self.lengths is not None and deciding:
            self.lengths.settle(deciding, fresh=turn.fresh, joined=turn.joined)
        self._draft(turn)
        began_s, kv = time.perf_counter(), sum(sample.decided for sample in turn.samples)
        is_new = turn.fresh or turn.joined
        ended = self._evaluate(turn.samples, is_new=is_new)
        self.prompts.ran(turn.new, turn.pieces)
        if turn.pieces:
            self.counters.ran_ahead([sample.slot for sample in turn.pieces], active=len(turn.samples))
        if self.lengths is not None:
            seconds = time.perf_counter() - began_s
            self.lengths.ran(deciding, self.lanes[0].useful, kv, seconds, is_usual=turn.is_usual)
        if rolling := [one for one in turn.samples if isinstance(one.ask, Roll) and one.ask.head != MODEL]:
            seconds = self._roll(rolling, turn.samples, self.lanes[0])
            if self.lengths is not None:
                self.lengths.spent(seconds)
        self.stats.steps += 1
        self.stats.slot_steps += len(turn.samples) if turn.fresh else self._space.num_lanes - turn.num_waiting
        return done + [self._finish(sample) for sample in ended]

    def _begin(self, turn: Turn) -> list[Sample]:
        """Let every sample of the step have its ask, or that of its prompt's piece; returns those whose decoders ask."""
        self.prompts.begin([*turn.new, *turn.pieces])
        for sample in turn.pieces:
            sample.ask = ask_of_piece(sample, self.algorithm)
        for sample in turn.samples:
            if sample.ask is None:
                assert sample.decoding is not None, "a sample in a slot has a generator"
                sample.ask = next(sample.decoding)
        return [sample for sample in turn.samples if not sample.piece] if turn.pieces else turn.samples

    def _evaluate(self, samples: list[Sample], *, is_new: bool) -> list[Sample]:
        """The target's forward; returns the samples that ended."""
        lane = self.lanes[0]
        if self._names:
            return self._land(samples, lane, *self._start_named(samples), is_new=True)
        if isinstance(lane, CanvasLane):
            return self._look(samples, lane)
        return self._land(samples, lane, *self._start(samples, lane, [sample.ask for sample in samples]), is_new=is_new)

    def _draft(self, turn: Turn) -> None:
        """Draft as long as any sample asks for it, by its own weights or the drafting model; all then meet at the target."""
        began_s = time.perf_counter()
        self._weigh(turn.samples)
        if turn.pieces and len(self.lanes) > 1 and not self.algorithm.windows:
            # The drafting model's columns keep up with the target's.
            self._start(turn.pieces, self.lanes[1], [sample.catch_up(sample.piece) for sample in turn.pieces])
        if rolling := [one for one in turn.samples if isinstance(one.ask, Roll)]:
            self._roll_model(rolling, is_usual=turn.is_usual)
        while asking := [one for one in turn.samples if isinstance(one.ask, Ask) and one.ask.model]:
            forward_s, lane = time.perf_counter(), self.lanes[1]
            rows, kv = self._size_of(asking)
            self._land(asking, lane, *self._start(asking, lane, [sample.ask for sample in asking]), is_new=False)
            if self.lengths is not None and turn.is_usual:
                self.lengths.drafted(rows, kv, time.perf_counter() - forward_s)
            if rolling := [sample for sample in asking if isinstance(sample.ask, Roll)]:
                self._roll(rolling, asking, lane)
        if self.lengths is not None:
            self.lengths.spent(time.perf_counter() - began_s)

    def _roll_model(self, samples: list[Sample], *, is_usual: bool) -> None:
        """Draft windows by the drafting model, a forward a rank; the host waits once, for the last one."""
        began_s, lane = time.perf_counter(), self.lanes[1]
        self._catch_up(samples, lane)
        asks = [sample.ask for sample in samples if isinstance(sample.ask, Roll)]
        assert all(ask.head == MODEL for ask in asks), "before the target's forward a model drafts"
        runs = list[tuple[list[Sample], int, Started[Answer]]]()
        for offset in range(max(ask.num_drafts for ask in asks)):
            going = [sample for sample, ask in zip(samples, asks, strict=True) if offset < ask.num_drafts]
            nexts = [sample.draft_next(sample.decided + offset) for sample in going]
            started, _ = self._start(going, lane, nexts)
            runs.append((going, sum(sample.cached_draft for sample in going), started))
        found, laps = [], list[float]()
        for going, _, started in reversed(runs):
            found.append({one.slot: answer.tokens[0] for one, answer in zip(going, lane.finish(started), strict=True)})
            laps.append(sum(lane.seconds(started)))
            self.counters.drafted(np.array([sample.slot for sample in going]), laps[-1])
        if self.lengths is not None and is_usual:
            # The forwards overlap with the host: each has its share of the whole time.
            whole_s = time.perf_counter() - began_s
            for (_, kv, started), lap_s in zip(runs, reversed(laps), strict=True):
                self.lengths.drafted(started.useful, kv, whole_s * lap_s / max(sum(laps), 1e-9))
        drafts = [
            [token_of[sample.slot] for token_of in reversed(found) if sample.slot in token_of] for sample in samples
        ]
        self._resume(samples, (Answer(0, each, [0.0] * len(each)) for each in drafts))

    def _catch_up(self, samples: list[Sample], lane: Lane) -> None:
        """Let the drafting model run prompts in forwards of their own, until the rest is no more than a budget of rows.

        Its cache takes over nothing from other samples. Up to `window` + 1 rows are those of a sample that decodes.
        """
        budget = self._prompt_rows
        while budget is not None:
            long = [one for one in samples if one.decided - one.cached_draft > self.algorithm.window + 1]
            if sum(one.decided - one.cached_draft for one in long) <= budget:
                return
            going, asks, left = list[Sample](), list[Ask](), budget
            for sample in long:
                if count := min(left, sample.decided - sample.cached_draft - 1):
                    going.append(sample)
                    asks.append(sample.catch_up(count))
                    left -= count
            self._start(going, lane, asks)

    @staticmethod
    def _size_of(asking: list[Sample]) -> tuple[int, int]:
        """What a forward over windows costs by: the drafts to be made, and the columns that are read."""
        windows = [sample.ask.window for sample in asking if isinstance(sample.ask, Ask) and sample.ask.window]
        return sum(window.num_drafts for window in windows), sum(sample.decided for sample in asking)

    def _weigh(self, samples: list[Sample]) -> None:
        """Draw drafts from distributions of the samples' own, rank after rank."""
        began_s, most, count = time.perf_counter(), 0, 0
        while asking := [(sample, sample.ask) for sample in samples if isinstance(sample.ask, Weights)]:
            drafting, asks = map(list, zip(*asking, strict=True))
            most, count = most + 1, max(count, len(drafting))
            self._resume(drafting, self.answers.weighed(self.lanes[0], drafting, asks))
        if most and self.lengths is not None:
            self.lengths.drew(count, most, time.perf_counter() - began_s)

    def _roll(self, rolling: list[Sample], turn: list[Sample], lane: Lane) -> float:
        """Draft windows from rows of the forward that `turn` has just run; returns the seconds."""
        began_s = time.perf_counter()
        owner_of = {sample.slot: index for index, sample in enumerate(turn)}
        asks = [sample.ask for sample in rolling if isinstance(sample.ask, Roll)]
        assert self._rolled is not None, "a roll follows a forward"
        assert len({ask.head for ask in asks}) == 1, "the samples of a decoder roll by the same head"
        owner_B = np.array([owner_of[sample.slot] for sample in rolling])
        row_B = self._rolled.places(owner_B, np.array([ask.row for ask in asks]))
        if asks[0].head == BARE:
            self._resume(rolling, self._rolled_bare(rolling, asks, row_B, lane))
        else:
            assert self.heads is not None, "a roll by a head that was not loaded"
            windows = Rolling(rolling, asks, row_B)
            self._resume(windows.samples, self.answers.roll(lane, self.heads, windows))
        self.counters.drafted(np.array([sample.slot for sample in rolling]), sum(lane.laps()))
        seconds = time.perf_counter() - began_s
        if self.lengths is not None:
            self.lengths.drew(len(rolling), max(ask.num_drafts for ask in asks), seconds)
        return seconds

    def _rolled_bare(self, rolling: list[Sample], asks: list[Roll], row_B: Ints, lane: Lane) -> Iterator[Answer]:
        """Drafts from the rows' own distributions: no rank waits for the one before it."""
        spans = [number for ask in asks for number in equal_queries(ask.rank, ask.num_drafts, 0, DRAFT)]
        table = Table(spans, self._all_slots[: len(rolling)], len(rolling))
        slot_B, sizes = np.array([sample.slot for sample in rolling]), [ask.num_drafts for ask in asks]
        asked = Asked.of(table, slot_B, [NO_DRAFT] * sum(sizes), sizes, [sample.decided for sample in rolling])
        parcel = Parcel()
        reading = self.answers.answer(lane, asked, parcel)
        return lane.again(row_B[table.owner_N] + table.step_N, reading, parcel)

    def _look(self, samples: list[Sample], lane: CanvasLane) -> list[Sample]:
        """One forward over canvases of these samples, and their answers; returns the samples that ended."""
        canvases = [sample for sample in samples if isinstance(sample, Canvas)]
        packed, asked, num_nodes = pack(
            canvases,
            self._slots_of(samples),
            cached=lane.cached,
            by_node=lane.by_node,
            conditioned=lane.conditioned,
            mask_id=lane.mask_id,
        )
        parcel = Parcel()
        assert isinstance(self.answers, Picks), "what reads masks"
        reading = self.answers.looked(lane, asked, parcel)
        started = lane.start_run(lane.plan(packed, reading, parcel), reading, parcel)
        ended = self._land(samples, lane, started, num_nodes, is_new=True)
        if wanting := [canvas for canvas in canvases if canvas.copies]:
            lane.backbone.copy_columns(*lane.put(copied(wanting, packed.longest)))
        return ended

    def _start(self, samples: Sequence[Sample], lane: Lane, asks: Sequence[Wish | None]) -> tuple[Started[Answer], int]:
        """Start a forward of one model for what these samples ask; with how many tokens it decides or checks."""
        tokens: list[int] = []
        spans: list[int] = []
        queries: list[int] = []
        drafts: list[int] = []
        sizes, whens, more, more_queries, shares = [], [], [], [], list[float]()
        for index, (sample, ask) in enumerate(zip(samples, asks, strict=True)):
            assert isinstance(ask, Ask), "offers were answered before"
            tokens += ask.tokens
            spans += ask.spans
            queries += ask.queries
            drafts += ask.drafts
            sizes.append(len(ask.drafts))
            whens.append(sample.decided)
            if ask.window is not None:
                shares.append(ask.window.share)
            if len(ask.spans) != FIELDS:
                more.append((index, len(ask.spans) // FIELDS))
            if len(ask.queries) != FIELDS:
                more_queries.append((index, len(ask.queries) // FIELDS))
        slot_B = self._slots_of(samples)
        table = Table(spans, self._owners(len(samples), more), len(samples))
        answered = self._rolled = table
        if queries:
            answered = self._rolled = Table(queries, self._owners(len(samples), more_queries), len(samples))
        longest = max(len(sample.tokens) for sample in samples)
        packed = Packed(
            slot_B, tokens, table, answered if queries else None, longest, share_B=np.array(shares) if shares else None
        )
        asked = Asked.of(answered, slot_B, drafts, sizes, whens)
        parcel = Parcel()
        reading = self.answers.answer(lane, asked, parcel)
        started = lane.start_run(lane.plan(packed, reading, parcel), reading, parcel)
        return started, int(_IS_VERIFIED_K[asked.kind_R].sum())

    def _start_named(self, samples: list[Sample]) -> tuple[Started[Noted], int]:
        """As `_start`, of the target, for asks that name their answered rows."""
        tokens: list[int] = []
        spans: list[int] = []
        named, counts = [], []
        for sample in samples:
            ask = sample.ask
            assert isinstance(ask, Ask) and ask.named is not None, "all of these samples name their rows"
            tokens += ask.tokens
            spans += ask.spans
            named.append(ask.named)
            counts.append(len(ask.spans) // WIDE)
        lane, slot_B = self.lanes[0], self._slots_of(samples)
        owner_P = np.repeat(self._all_slots[: len(samples)], counts)
        table = Table(spans, owner_P, len(samples), fields=WIDE)
        asked = NamedRows.of(named, table, slot_B)
        packed = Packed(slot_B, tokens, table, None, 0, asked.place_R)
        parcel = Parcel()
        reading = self.answers.named(lane, asked, parcel)
        return lane.start_run(lane.plan(packed, reading, parcel), reading, parcel), asked.num_checked

    def _slots_of(self, samples: Sequence[Sample]) -> Ints:
        """Their slots, which ascend."""
        if len(samples) == len(self._slots):
            return self._all_slots[: len(samples)]
        return np.array([sample.slot for sample in samples])

    def _land(
        self, samples: list[Sample], lane: Lane, started: Started[Any], num_verified: int, *, is_new: bool
    ) -> list[Sample]:
        """Read the answers of a forward, and count it; returns the samples that ended."""
        answers, laps = lane.finish(started), lane.seconds(started)
        slot_B = np.array([sample.slot for sample in samples])
        if not lane.is_target:
            # Only the seconds count, and the evaluations, which the decoder counts.
            self.counters.drafted(slot_B, sum(laps))
            return self._resume(samples, answers)
        self.stats.verified += num_verified
        self.counters.ran(slot_B, useful=started.useful, computed=started.computed, seconds=sum(laps))
        for sample in samples:
            sample.nfe += not sample.piece  # a piece of a prompt is a part of the evaluation that its rest belongs to
        if is_new:
            self.counters.first([sample.slot for sample in samples if sample.nfe <= 1], laps[0] if laps else 0.0)
        return self._resume(samples, answers)

    def _owners(self, num_samples: int, more: list[tuple[int, int]]) -> Ints:
        """The sample of each span; `more` are (sample, number of spans) where these are not one."""
        if not more:
            return self._all_slots[:num_samples]
        counts = np.ones(num_samples, dtype=np.int64)
        for index, count in more:
            counts[index] = count
        return np.repeat(self._all_slots[:num_samples], counts)

    def _resume(self, samples: list[Sample], answers: Iterator[Any]) -> list[Sample]:
        """Send every sample its answer and take its next ask; returns the samples that ended."""
        ended = []
        for sample, answer in zip(samples, answers, strict=True):
            if sample.piece:
                ran_ahead(sample)
                continue
            try:
                sample.ask = sample.decoding.send(answer)  # type: ignore[union-attr]
            except StopIteration:
                ended.append(sample)
        return ended

    def _finish(self, sample: Sample) -> Outcome:
        outcome = sample.outcome(self.counters.spent(sample.slot))
        if not self.algorithm.knows_logprob:
            outcome.logprob = None
        self._release(sample.slot)
        self._slots[sample.slot] = None
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        return outcome
