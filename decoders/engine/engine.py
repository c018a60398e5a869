"""The engine: keeps one generator a slot, runs what all of them ask as one forward, and sends each its answer.

    admit        a sample gets a slot; its generator starts with its first turn
    step         whose turn is it: the new samples alone, or all, with as many rows of new prompts as a budget allows
                 how many drafts may each take (lengths `auto` only)
                 draws from decoders' own weights and the drafting model's forwards, as long as anyone asks for them
                 the target's forward: pack the asks, run, draw or judge (block-diffusion models: rows that asks name)
                 on a GPU the next one, where it is known what will be asked if texts go on; read the first one's answers
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
    NO_DRAFT,
    SURE,
    TARGET,
    WIDE,
    Answer,
    Ask,
    Fetch,
    Roll,
    Weights,
)
from draftmill.decoders.engine.canvas_samples import Canvas
from draftmill.decoders.engine.canvases import CanvasLane
from draftmill.decoders.engine.counters import Counters
from draftmill.decoders.engine.drawn import Drawn, plans_ahead
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.flights import Flight
from draftmill.decoders.engine.graphs import find_graphs, why_no_graphs
from draftmill.decoders.engine.lanes import Lane, Packed, Reading
from draftmill.decoders.engine.lengths import Lengths
from draftmill.decoders.engine.look_packing import copied, pack
from draftmill.decoders.engine.memory import Account, column_multiple
from draftmill.decoders.engine.named import NamedRows
from draftmill.decoders.engine.named_answers import NamedAnswers
from draftmill.decoders.engine.orders import decoding_order
from draftmill.decoders.engine.packing import Asked, Ints, Table
from draftmill.decoders.engine.parcels import Parcel
from draftmill.decoders.engine.picks import Picks
from draftmill.decoders.engine.pieces import DEVICE_ROWS, ask_of_piece, cut_drafting, deal, ran_ahead
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

    def without(self, behind: list[Sample]) -> Turn:
        """The step without samples that wait for their drafting model."""
        if not behind:
            return self
        samples, new = ([one for one in some if one not in behind] for some in (self.samples, self.new))
        return replace(self, samples=samples, new=new, num_waiting=self.num_waiting + len(behind))

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
        self._ahead: Flight | None = None  # the forward that runs before the records of those before it were read
        self._plans_ahead = plans_ahead(setup.backbone.device)
        for lane in self.lanes:
            lane.graphs = find_graphs(lane.backbone) if lane.can_capture else None
            if self._plans_ahead and (algorithm.following or not lane.is_target):
                lane.drawn = Drawn(setup.max_rows, algorithm.window + 1, lane.device)
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
        return TokenLane(setup.drafter, setup.info.vocab_size, is_target=False)

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
        self._slots, self._instant, self._ahead = [], [], None
        self.prompts.clear()
        self._allocate(0, 0)
        return dropped

    def _release(self, slot: int) -> None:
        self.answers.release(slot)
        for lane in self.lanes:
            lane.release(slot)

    # ---- whose turn it is ----------------------------------------------------------------------------------------

    def _turn_ahead(self) -> Turn | None:
        """The samples whose forward runs already, if any of them goes on; new ones wait for the next step."""
        if self._ahead is None:
            return None
        samples = sorted(self._alive(self._ahead), key=lambda sample: sample.slot)
        if not samples:
            self._ahead = None
            return None
        return Turn(samples, num_waiting=self._inside - len(samples))

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
        turn = self._turn_ahead() or self._turn()
        deciding = self._begin(turn)
        if self.lengths is not None and deciding:
            self.lengths.settle(deciding, fresh=turn.fresh, joined=turn.joined)
        turn = turn.without(self._draft(turn))
        began_s, kv = time.perf_counter(), sum(sample.decided for sample in turn.samples)
        is_new = turn.fresh or turn.joined
        ended = self._evaluate(turn.samples, is_new=is_new) if turn.samples else []
        self.prompts.ran(turn.new, turn.pieces)
        if turn.pieces:
            self.counters.ran_ahead([sample.slot for sample in turn.pieces], active=len(turn.samples))
        if self.lengths is not None:
            seconds = time.perf_counter() - began_s
            self.lengths.ran(deciding, self.lanes[0].useful, kv, seconds, is_usual=turn.is_usual)
        if rolling := [sample for sample in turn.samples if isinstance(sample.ask, Roll)]:
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
        """The target's forward; returns the samples that ended. Before it is read, the next one starts where it is known."""
        if self._names:
            return self._land(self._start_named(samples), is_new=True)
        lane = self.lanes[0]
        if isinstance(lane, CanvasLane):
            return self._look(samples, lane)
        flight, self._ahead = self._ahead, None
        assert flight is None or flight.is_asked_by(samples), "a forward that nobody asked for: `following` is wrong"
        flight = flight or self._start(samples, lane)
        if self._plans_ahead and self.algorithm.following is not None:
            self._ahead = self._start_following(samples, lane)
        return self._land(flight, is_new=is_new)

    def _start_following(self, samples: list[Sample], lane: Lane) -> Flight | None:
        """Start what these samples will ask when they have their answers; None if others begin, or none is known to go on."""
        following = self.algorithm.following
        assert following is not None, "this decoder's asks are known before"
        if any(sample.piece for sample in samples) or len(samples) < self._inside:
            return None
        going = [(sample, ask) for sample in samples if (ask := following(sample)) is not None]
        return self._start([sample for sample, _ in going], lane, [ask for _, ask in going]) if going else None

    def _draft(self, turn: Turn) -> list[Sample]:
        """Draft as long as any sample asks for it, by its own weights or the drafting model; all then meet at the target.

        Returns the samples that do not: of whose prompts the drafting model has run a piece only, or nothing yet.
        """
        began_s, behind, flights = time.perf_counter(), list[Sample](), list[tuple[Flight, int, int]]()
        self._weigh(turn.samples)
        while True:
            asking = [one for one in turn.samples if isinstance(one.ask, Ask) and one.ask.model and one not in behind]
            if not asking:
                fetching = [one for one in turn.samples if isinstance(one.ask, Fetch)]
                if not fetching:
                    break
                self._fetch(fetching, flights, time.perf_counter() - began_s, is_usual=turn.is_usual)
                continue
            if self._prompt_rows is not None:
                everyone, asking = asking, cut_drafting(asking, self.algorithm.window, self._prompt_rows)
                behind += [one for one in everyone if one.piece or one not in asking]
            forward_s = time.perf_counter()
            rows, kv = self._size_of(asking)
            flight = self._start(asking, self.lanes[1])
            if self._plans_ahead and all(ask.later for sample, ask in flight.asked if not sample.piece):
                flights.append((flight, rows or flight.useful, kv))
                flight.give_promises()
                continue
            self._land(flight, is_new=False)
            if self.lengths is not None and turn.is_usual:
                self.lengths.drafted(rows or flight.useful, kv, time.perf_counter() - forward_s)
            if rolling := [sample for sample in asking if isinstance(sample.ask, Roll)]:
                self._roll(rolling, asking, self.lanes[1])
        if self.lengths is not None:
            self.lengths.spent(time.perf_counter() - began_s)
        return behind

    def _fetch(
        self, fetching: list[Sample], flights: list[tuple[Flight, int, int]], started_s: float, *, is_usual: bool
    ) -> None:
        """Read all drafts that were promised, and let their samples go on. `started_s` are the seconds until now."""
        began_s, laps = time.perf_counter(), list[float]()
        # When the last one is over, all are: there is one wait.
        flights.reverse()
        for flight, _, _ in flights:
            flight.keep_promises()
            laps.append(sum(flight.seconds()))
            self.counters.drafted(np.array([sample.slot for sample in flight.samples]), laps[-1])
        if flights and self.lengths is not None and is_usual:
            # The forwards overlapped with the host: each has its share of the whole time.
            whole_s = started_s + time.perf_counter() - began_s
            for (_, rows, kv), lap_s in zip(flights, laps, strict=True):
                self.lengths.drafted(rows, kv, whole_s * lap_s / max(sum(laps), 1e-9))
        flights.clear()
        for sample in fetching:
            assert sample.decoding is not None, "a sample in a slot has a generator"
            sample.ask = sample.decoding.send(None)

    @staticmethod
    def _size_of(asking: list[Sample]) -> tuple[int, int]:
        """What a forward of the drafting model costs by: of windows the drafts to be made; and the columns that are read."""
        windows = [sample.ask.window for sample in asking if isinstance(sample.ask, Ask) and sample.ask.window]
        if windows:
            return sum(window.num_drafts for window in windows), sum(sample.decided for sample in asking)
        return 0, sum(sample.cached_draft for sample in asking)

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
        verified_B = np.array([num_nodes])
        ended = self._land(
            self._flight(samples, [], lane, packed, parcel, reading=reading, verified_B=verified_B), is_new=True
        )
        if wanting := [canvas for canvas in canvases if canvas.copies]:
            lane.backbone.copy_columns(*lane.put(copied(wanting, packed.longest)))
        return ended

    def _start(self, samples: list[Sample], lane: Lane, following: list[Ask] | None = None) -> Flight:
        """Start a forward of one model for what these samples ask, or for what they will ask after one more token."""
        asks: list[Ask] = [sample.ask for sample in samples] if following is None else following  # type: ignore[misc]
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
            whens.append(sample.decided + (following is not None))
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
        verified_B = np.bincount(asked.owner_R, _IS_VERIFIED_K[asked.kind_R], len(samples))
        parcel = Parcel()
        reading = self.answers.answer(lane, asked, parcel)
        return self._flight(samples, asks, lane, packed, parcel, reading=reading, verified_B=verified_B)

    def _start_named(self, samples: list[Sample]) -> Flight:
        """As `_start`, of the target, for asks that name their answered rows."""
        tokens: list[int] = []
        spans: list[int] = []
        named, counts, asks = [], [], list[Ask]()
        for sample in samples:
            ask = sample.ask
            assert isinstance(ask, Ask) and ask.named is not None, "all of these samples name their rows"
            tokens += ask.tokens
            spans += ask.spans
            asks.append(ask)
            named.append(ask.named)
            counts.append(len(ask.spans) // WIDE)
        lane, slot_B = self.lanes[0], self._slots_of(samples)
        owner_P = np.repeat(self._all_slots[: len(samples)], counts)
        table = Table(spans, owner_P, len(samples), fields=WIDE)
        asked = NamedRows.of(named, table, slot_B)
        packed = Packed(slot_B, tokens, table, None, 0, asked.place_R)
        parcel = Parcel()
        reading = self.answers.named(lane, asked, parcel)
        verified_B = np.array([asked.num_checked])
        return self._flight(samples, asks, lane, packed, parcel, reading=reading, verified_B=verified_B)

    def _slots_of(self, samples: list[Sample]) -> Ints:
        """Their slots, which ascend."""
        if len(samples) == len(self._slots):
            return self._all_slots[: len(samples)]
        return np.array([sample.slot for sample in samples])

    @staticmethod
    def _flight(
        samples: list[Sample],
        asks: list[Ask],
        lane: Lane,
        packed: Packed,
        parcel: Parcel,
        *,
        reading: Reading[Any],
        verified_B: Ints,
    ) -> Flight:
        """Start what is packed."""
        started = lane.start_run(lane.plan(packed, reading, parcel), reading, parcel)
        laps = None if started.up is None else lane.clock.cut()
        return Flight(lane, samples, asks, started, laps, lane.useful, lane.computed, verified_B)

    def _alive(self, flight: Flight) -> list[Sample]:
        """The samples of a flight that have not ended since it started."""
        slots = self._slots
        return [one for one in flight.samples if one.slot < len(slots) and slots[one.slot] is one]

    def _land(self, flight: Flight, *, is_new: bool) -> list[Sample]:
        """Read the answers of a forward, and count it; returns the samples that ended. Those that had ended before drop out."""
        lane, samples = flight.lane, self._alive(flight)
        answers, laps = lane.finish(flight.started), flight.seconds()
        dead = list[int]()
        if len(samples) < len(flight.samples):
            alive = {id(sample) for sample in samples}
            dead = [index for index, sample in enumerate(flight.samples) if id(sample) not in alive]
            answers = (answer for index, answer in enumerate(answers) if index not in dead)
        useful, verified = flight.without(dead)
        slot_B = np.array([sample.slot for sample in samples])
        if lane.is_target:
            self.stats.verified += verified
        self._count(samples, lane, slot_B, sum(laps), useful=useful, computed=flight.computed)
        if lane.is_target and is_new:
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

    def _count(
        self, samples: list[Sample], lane: Lane, slot_B: Ints, seconds: float, *, useful: int, computed: int
    ) -> None:
        """Charge a forward; of a drafting model only the seconds count, and its evaluations (the decoder counts those).

        A piece of a prompt is a part of the evaluation that its rest belongs to.
        """
        if not lane.is_target:
            self.counters.drafted(slot_B, seconds)
            return
        self.counters.ran(slot_B, useful=useful, computed=computed, seconds=seconds)
        for sample in samples:
            sample.nfe += not sample.piece

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
