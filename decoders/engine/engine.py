"""The engine: keeps one generator a slot, runs what all of them ask as one forward, and sends each its answer.

    admit        a sample gets a slot; its generator starts with its first turn
    step         whose turn is it: the new samples alone, or all, with as many rows of new prompts as a budget allows
                 drafts: from distributions that decoders name, and by the drafting model
                 the target's forward: pack the asks, run, draw, read the record, resume the generators
                 drafts that a head makes from rows of that forward
                 samples whose generators end give their outcomes and free their slots

A sample keeps its slot. The next admission takes the lowest free one, so that the slots in use are mostly adjacent and a forward
reads the cache in place. See draftmill.decoders.base.Decoder, and docs/engine.md for the design. Legend: see batch.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.cache import rounded
from draftmill.decoders.backbones.rows import Host, put
from draftmill.decoders.base import JOB_SETTINGS, EngineStats, Outcome, Request
from draftmill.decoders.constraints.constraint import tracker_of
from draftmill.decoders.engine.algorithm import Algorithm, check_completion, without_scored
from draftmill.decoders.engine.asks import MODEL, Answer, Ask, Roll, SampleFrom, Span, Wish
from draftmill.decoders.engine.batch import Batch, answers, bad_samples, best_tokens, pack, steps
from draftmill.decoders.engine.cuda_graphs import drop_all, why_no_graphs
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.memory import Capacity, Extents, MemoryPlan, Shape
from draftmill.decoders.engine.model_runner import ModelRunner, Started, seconds_of
from draftmill.decoders.engine.penalties import PenaltyTracker
from draftmill.decoders.engine.rolls import roll_model, roll_rows
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.samples import Sample, SlotTable, Times, decoding_order
from draftmill.decoders.engine.scheduler import Scheduler, Turn, ask_of_chunk
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.engine.shaping import add_shape


class Running(NamedTuple):
    """A forward of the target that nobody has read. Of its samples those in `chunks`, by slot, ran a part of their prompts."""

    samples: Sequence[Sample]
    chunks: frozenset[int]
    started: Started
    is_plain: bool = True
    """Whether no draft is verified, and none made."""

    def answers(self, sample: Sample) -> bool:
        """Whether the record is for a sample: it has asked for it, or is bad, and has not ended before."""
        return sample.decoding is not None and (sample.is_bad or sample.slot not in self.chunks)


class Engine:
    """Runs an algorithm for up to `max_rows` samples at once; enumerations replace its sampler (`make_sampler`)."""

    def __init__(self, setup: Setup, algorithm: Algorithm, *, make_sampler: Callable[..., Sampler] = Sampler) -> None:
        self.backbone, self.info, self.algorithm = setup.backbone, setup.info, algorithm
        self.max_rows, self.max_tokens = setup.max_rows, setup.max_tokens
        self.tracing, self.heads = setup.trace, setup.heads
        # Texts of any-subset models have no ends; a masked canvas is filled to its end unless a completion says what ends it.
        has_ends = algorithm.kind != "any_subset" and not algorithm.scores
        self.stops = setup.stops or (Stops() if algorithm.kind != "masked" else None) if has_ends else None
        self.plan = MemoryPlan.default(setup.backbone.device)
        self.slots = SlotTable(setup.sampling, setup.max_rows)
        self.hides_host = algorithm.follows is not None and hides_host(setup.backbone)
        """Whether a forward is packed and started before the one before it is read."""
        self.sampler = make_sampler(setup, algorithm, self.slots, self.plan)
        runner = partial(ModelRunner, setup, algorithm, self.sampler, hides_host=self.hides_host)
        self.target = runner(is_target=True)
        self.models = [self.target] if setup.drafter is None else [self.target, runner(is_target=False)]
        setup.backbone.tap(setup.drafter if algorithm.reads_states else None)
        self.sampler.drafts_by = self.models[-1].logits
        self.stats = EngineStats()
        self._multiple = setup.backbone.column_multiple
        self._capacity = Capacity(
            max_rows=setup.max_rows,
            max_tokens=setup.max_tokens,
            plan=self.plan,
            multiple=self._multiple,
            columns_of=self.columns,
            slot_bytes=self.slot_bytes,
            pooled=all(runner.backbone.reads_rows for runner in self.models),
        )
        gathers = self.target.graphs is not None and self.target.graphs.is_launch_bound
        self.scheduler = Scheduler(setup, algorithm, self.stats, gathers=gathers)
        # When the last step ended, for `auto`: on a CPU without the time that other processes have. A call of that clock takes up
        # to 0.4 ms while other cores are busy.
        self._clock = time.thread_time if setup.backbone.device.type == "cpu" else time.perf_counter
        self._ended_s: float | None = None
        self._drafts: dict[str, Callable[[list[Sample], list[Any]], Iterable[Answer]]] = {
            "names": self.sampler.draw_named,
            "model": self._roll_model,
            "rows": self._roll_rows,
            "windows": self._draft_windows,
        }
        self._ran: tuple[Sequence[Sample], Batch[Host], ModelRunner]  # the last forward whose rows a head may read
        self._spreads = all(runner.spreads for runner in self.models)
        self._shape = Shape()
        self._extents: Extents | None = None  # where each sample has as many columns as its canvas needs
        self._slots: list[Sample | None] = []
        self._running: Running | None = None
        self._instant: list[Outcome] = []

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
        return [sample for sample in self._slots if sample is not None]

    @property
    def graphs(self) -> str:
        """Whether forwards are replayed as graphs: `on`, or `off: ` and why. `on` as long as nothing has failed."""
        reasons = [runner.graphs.stopped if runner.graphs else why_no_graphs(runner.backbone) for runner in self.models]
        return next((f"off: {reason}" for reason in reasons if reason), "on")

    def columns(self, length: int) -> int:
        count = self.algorithm.columns(length)
        return count if self.algorithm.keeps else self.algorithm.num_slots * rounded(count, self._multiple)

    def slot_bytes(self, num_columns: int) -> int:
        """Bytes of a sample with this many columns in its slot of each model's cache."""
        return num_columns * sum(runner.cell_bytes for runner in self.models) + self.sampler.slot_bytes

    def room(self, length: int) -> int:
        """How many samples of this canvas length fit now; at least 1 when nothing is inside, however long."""
        inside = self._inside
        if self._extents is not None and inside:
            return min(self.max_rows - inside, self._extents.room(self._capacity.columns(length)))
        most = self._capacity.most_rows(self._capacity.columns(self._longest_with(length)))
        if inside == 0:
            return max(most, 1)
        # A longer canvas may leave fewer slots than the highest one that is in use; then it waits for that sample.
        return most - inside if most >= len(self._slots) else 0

    def most_rows(self, length: int) -> int:
        columns = self._capacity.columns(length)
        return max(self._capacity.most_rows(columns), int(self._capacity.fits(1, columns)))

    def fit(self, free_bytes: int) -> None:
        self.plan = self._capacity.plan = self.sampler.plan = MemoryPlan.of(
            self.backbone.device,
            free_bytes,
            row_bytes=self.backbone.row_bytes,
            captures=any(runner.graphs is not None for runner in self.models),
        )

    def _longest_with(self, length: int) -> int:
        return max([length, 1, *(len(sample.request.canvas) for sample in self.samples)])

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        """Give each request a slot; a canvas without holes is finished at once."""
        now = time.perf_counter()
        queued = [now] * len(requests) if queued_at_s is None else queued_at_s
        waiting = []
        for request, queued_s in zip(requests, queued, strict=True):
            sample = self._sample_of(request, Times(queued_s, now, time.time()))
            if sample.prompt == sample.length:
                self._instant.append(sample.outcome())
            else:
                waiting.append(sample)
        if waiting:
            needed = max(self._inside + len(waiting), len(self._slots))
            self._make_room(needed, max(sample.length for sample in waiting))
        for sample in waiting:
            self._place(sample)

    def _sample_of(self, request: Request, times: Times) -> Sample:
        scores, masked = self.algorithm.scores or (request.probe and request.score_from is not None), request.canvas
        if scores:
            # A score has no settings of its own, and its tokens stand where others have holes.
            request, masked = replace(request, settings=JOB_SETTINGS), without_scored(request)
        order, prompt = decoding_order(masked, request.hole_order)
        ranks = order.tolist() if self.algorithm.kind == "any_subset" else None
        if self.algorithm.kind == "causal" and prompt < len(request.canvas):
            check_completion(masked, scores=scores)
        sample = self.algorithm.sample(
            request, ranks, prompt, stops=self.stops, times=times, stats=self.stats, traced=self.tracing
        )
        own, in_order = request.settings, self.algorithm.kind == "causal"
        if own.constraint is not None:
            sample.tracker = tracker_of(own.constraint, masked.tolist(), in_order=in_order)
        if own.penalties is not None:
            sample.penalties = PenaltyTracker(own.penalties, masked.tolist(), self.info, in_order=in_order)
        return sample

    def _make_room(self, needed: int, length: int) -> None:
        """Give the caches at least `needed` slots, for canvases of this length too."""
        if self._spreads:
            self._spread(needed, self._longest_with(length))
            return
        shape = self._capacity.shape(self._shape, needed=needed, longest=self._longest_with(length))
        if shape[:2] != self._shape[:2]:
            self._allocate(shape)
        self._shape = shape

    def _spread(self, needed: int, longest: int) -> None:
        """Have all slots in one pool, each as wide as its canvas. A pool smaller than a canvas is reallocated."""
        shape = self._capacity.spread(self._shape, needed=needed, longest=longest)
        least = self._capacity.columns(longest)
        if self._extents is not None and self._extents.num_cells < least:
            self._allocate(Shape())
        if self._extents is None:
            self._reserve()
            self._extents = Extents(max(least, self._capacity.cells or self.max_tokens))
            self.slots.start_S = np.zeros(self.max_rows, dtype=np.int64)
        if shape[:2] != self._shape[:2]:
            self._shape = Shape()
            if not all([self.sampler.stays(shape.slots), *(runner.spread(shape) for runner in self.models)]):
                drop_all()
            self.sampler.resize(shape.slots)
            self.scheduler.prefixes.resize(shape.slots, shape.columns)
        self._shape = shape

    def _allocate(self, shape: Shape) -> None:
        self._shape, self._extents = Shape(), None  # until the resize has succeeded
        slots, captured = min(shape.slots, self.max_rows), [one.backbone for one in self.models if one.graphs]
        if captured and not all([self.sampler.stays(slots), *(one.stays(*shape[:2]) for one in captured)]):
            drop_all()
        self.sampler.resize(slots)
        if shape.slots:
            self._reserve()
        for runner in reversed(self.models):
            runner.resize(shape, self._multiple)
        self.scheduler.prefixes.resize(shape.slots, shape.columns)
        self._shape = shape

    def _reserve(self) -> None:
        """Take the memory for all slots together at once, as far as caches are pools and their sizes are known."""
        for runner in reversed(self.models if self._capacity.cells else []):
            runner.backbone.reserve(self._capacity.cells)

    def _place(self, sample: Sample) -> None:
        slot = sample.slot = self._slots.index(None) if None in self._slots else len(self._slots)
        assert slot < self.max_rows, "admit called without room"
        self._slots[slot : slot + 1] = [sample]
        if self._extents is not None and self.slots.start_S is not None:
            columns = self._capacity.columns(sample.length)
            self.slots.start_S[slot], lost = self._extents.take(slot, columns)
            for other in lost:
                self.scheduler.prefixes.forget(other)
            start = int(self.slots.start_S[slot])
            stays = [runner.backbone.place(slot, start, columns) for runner in self.models]
            if not all(stays):
                drop_all()
        if sample.order is not None:
            self.backbone.set_order(slot, put(np.array(sample.order, dtype=np.int64), self.backbone.device))
        self.slots.start(sample)
        self.sampler.start(sample)
        decode = self.algorithm.probe if sample.request.probe else self.algorithm.decode
        assert decode is not None, "this decoder answers no probes"
        sample.decoding = decode(sample)
        self.scheduler.start(sample)

    def clear(self) -> list[int]:
        """See Decoder; frees the caches' memory, too."""
        dropped = [sample.request.index for sample in self.samples] + [outcome.index for outcome in self._instant]
        for slot in range(len(self._slots)):
            self.slots.release(slot)
        self._slots, self._instant, self._running, self._ended_s = [], [], None, None
        self.scheduler.line.clear()
        self._allocate(Shape())
        return dropped

    # ---- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Outcome]:
        """Run the target once for the samples whose turn it is; return the outcomes of those that ended. Where the host is hidden
        these are of the forward before: this one is read in the next step."""
        done, self._instant = self._instant, []
        if not self._slots:
            return done
        auto, committed = self.algorithm.auto, self.stats.committed
        began_s = self._clock() if auto is not None and self._ended_s is None else self._ended_s
        turn = self._turn()
        self._begin(turn)
        self._draft(turn)
        done += [self._finish(sample) for sample in self._evaluate(turn)]
        if self.scheduler.line:
            self.scheduler.finish_prompts(turn)
        if not turn.samples:
            return done
        self.stats.steps += 1
        num_prompts = len(turn.new) + len(turn.chunks)
        has_others = len(turn.samples) > num_prompts
        self.stats.slot_steps += self._shape.possible - turn.num_waiting if has_others else num_prompts
        if auto is not None and began_s is not None:
            now_s, tokens = self._clock(), self.stats.committed - committed
            self.stats.ways[auto.name] = self.stats.ways.get(auto.name, 0) + tokens
            auto.note_step(tokens, now_s - began_s, len(turn.samples), num_prompts)
            self._ended_s = now_s if self._slots else None  # without samples a pause follows
        return done

    def _turn(self) -> Turn:
        samples = self._going()
        if not self.scheduler.line:
            return Turn(samples)
        auto = self.algorithm.auto
        return self.scheduler.next(samples, self.plan, alternates=auto is not None and auto.is_measuring)

    def _going(self) -> list[Sample]:
        """The samples that ask once more. One whose forward is running has the ask that follows, if its text goes on."""
        if self._running is None:
            return self.samples
        assert self.algorithm.follows is not None, "asks that follow"
        ending = set[int]()
        for sample in filter(self._running.answers, self._running.samples):
            sample.ask = self.algorithm.follows(sample)
            if sample.ask is None:
                ending.add(sample.slot)
        return [sample for sample in self.samples if sample.slot not in ending]

    def _begin(self, turn: Turn) -> None:
        """Let every sample of the step have its ask, or that of its prompt's chunk."""
        for sample in turn.chunks:
            sample.ask = ask_of_chunk(sample, self.algorithm)
        for sample in turn.samples:
            if sample.ask is None:
                assert sample.decoding is not None, "a sample in a slot has a generator"
                sample.ask = next(sample.decoding)

    def _draft(self, turn: Turn) -> None:
        """Draft as long as any sample asks for it; all then meet at the target."""
        if turn.chunks and len(self.models) > 1 and not (self.algorithm.windows or self.algorithm.reads_states):
            # The drafting model's columns keep up with the target's.
            self._start(turn.chunks, [sample.catch_up(sample.chunk) for sample in turn.chunks], self.models[1])
        self._answer(turn.samples, "names", "model", "rows", "windows")

    def _answer(self, samples: Sequence[Sample], *sources: str) -> None:
        """Answer what these sources draft, the first ones first, as long as any sample asks one of them."""
        while waiting := [sample for sample in samples if _source(sample.ask) in sources]:
            source = min((_source(sample.ask) for sample in waiting), key=sources.index)
            asking = [sample for sample in waiting if _source(sample.ask) == source]
            self._resume(asking, self._drafts[source](asking, [sample.ask for sample in asking]))

    def _start(self, samples: Sequence[Sample], asks: Sequence[Ask], runner: ModelRunner) -> Started:
        return runner.start(pack(samples, asks, self.slots, runner.layout, runner.rule))

    def _roll_model(self, samples: list[Sample], asks: list[Roll]) -> list[Answer]:
        """Draft by forwards of the drafting model, one a rank."""
        drafter, window = self.models[1], self.algorithm.window
        replies, ran = roll_model(samples, asks, drafter, self.slots, window, self.scheduler.prompt_rows)
        for going, started in ran:
            self._charge(going, sum(started.seconds))
            self._wipe(going, drafter, started)
        return replies

    def _draft_windows(self, samples: list[Sample], asks: list[Ask]) -> list[Answer]:
        """Draft by one forward of a drafting model over windows; a head may draft more from its rows."""
        drafter = self.models[1]
        started = self._start(samples, asks, drafter)
        record = started.wait()
        self._charge(samples, sum(started.seconds))
        self._wipe(samples, drafter, started)
        self._ran = samples, started.batch, drafter
        return answers(started.batch, record)

    def _roll_rows(self, samples: list[Sample], asks: list[Roll]) -> list[Answer]:
        """Draft from rows of the forward that has just run, by their own distributions or a head."""
        replies = list(roll_rows(samples, asks, self._ran, self.sampler, self.slots, self.heads))
        self._charge(samples, sum(seconds_of(self._ran[2].clock.cut())))
        return replies

    @staticmethod
    def _wipe(samples: Sequence[Sample], drafter: ModelRunner, started: Started) -> None:
        """A draft may be anything, but what a drafting model's slots hold must be finite."""
        record = started.wait()
        if record is not None:
            drafter.wipe(samples[index].slot for index in bad_samples(started.batch, record))

    def _evaluate(self, turn: Turn) -> list[Sample]:
        """The target's forward, and the drafts that a head makes from its rows; returns the samples that ended. A forward whose
        samples' next asks can be formed is left running, and the one before it is read."""
        before, self._running = self._running, None
        started = self._launch(turn) if turn.samples else None
        ended = self._settle(before) if before else []
        if started is None:
            return ended
        going = [sample for sample in started.samples if sample.decoding]
        auto = self.algorithm.auto
        has_next = self.hides_host and going and not any(sample.is_shaped or sample.request.probe for sample in going)
        if auto is not None:
            has_next = has_next and auto.stays_plain and started.is_plain
            auto.hold(held=bool(has_next))
        if not has_next:
            return ended + self._settle(started)
        self._running = started
        return ended

    def _launch(self, turn: Turn) -> Running:
        samples = turn.samples
        asks = [sample.ask for sample in samples if isinstance(sample.ask, Ask)]
        assert len(asks) == len(samples), "drafts were answered before"
        rule = self.target.rule
        if rule.ahead and self.algorithm.auto is not None and self.target.graphs is None:
            rule = rule._replace(ahead=min(rule.ahead, self.algorithm.auto()))  # a graph draws always as many
        b = pack(samples, asks, self.slots, self.target.layout, rule)
        if any(sample.is_shaped for sample in samples):
            add_shape(b, samples, self.sampler.masks)
        b.draws.num_tops = min(max(sample.request.settings.top_logprobs for sample in samples), self.info.vocab_size)
        started = self.target.start(b, comes_again=not (turn.new or turn.chunks))
        for sample in turn.chunks:
            sample.cached += sample.chunk
            sample.ask, sample.chunk = None, 0
        return Running(samples, frozenset(sample.slot for sample in turn.chunks), started, all(map(_is_plain, asks)))

    def _settle(self, running: Running) -> list[Sample]:
        """Read a forward and send the answers; returns the samples that ended. Rows of earlier ended ones are dropped."""
        record, batch = running.started.wait(), running.started.batch
        samples = [sample for sample in running.samples if sample.decoding]
        self._count(samples, running)
        if record is not None:
            bad = [running.samples[index] for index in bad_samples(batch, record)]
            self._fail([sample for sample in bad if sample.decoding], batch)
            if batch.draws.num_tops:
                for sample, tops in zip(running.samples, best_tokens(batch, record), strict=True):
                    sample.tops_at |= tops if sample.tops is not None else {}
        replies = zip(running.samples, answers(batch, record), strict=True)
        asked = [(sample, reply) for sample, reply in replies if running.answers(sample)]
        ended = self._resume([sample for sample, _ in asked], [reply for _, reply in asked])
        if self.algorithm.nodes:
            self._copy_columns(samples)
        self._ran = samples, batch, self.target
        self._answer(samples, "rows")
        return ended

    def _copy_columns(self, samples: list[Sample]) -> None:
        copies = [(sample.slot, *copy) for sample in samples for copy in sample.copies]
        if not copies:
            return
        for sample in samples:
            sample.copies = ()
        slot_P, source_P, target_P, count_P = np.array(copies).T
        if self.slots.start_S is not None:
            source_P, target_P = source_P + self.slots.start_S[slot_P], target_P + self.slots.start_S[slot_P]
        step = steps(count_P)
        copied = np.stack(
            [np.repeat(slot_P, count_P), np.repeat(source_P, count_P) + step, np.repeat(target_P, count_P) + step]
        )
        self.backbone.copy_columns(*put(copied, self.backbone.device))

    # ---- after a forward -----------------------------------------------------------------------------------------

    def _count(self, samples: list[Sample], running: Running) -> None:
        """Count a forward of the target: its rows for each canvas of these samples, of its seconds an equal share. The only place
        for it. Rows of samples that had ended before count as computed alone."""
        active, started, stats = sum(sample.canvases for sample in samples), running.started, self.stats
        laps, batch, computed = started.seconds, started.batch, started.computed
        dropped = len(running.samples) - len(samples)  # each had one row of each kind
        seconds, useful = sum(laps), batch.num_rows - dropped * len(batch.rows.lines)
        each = 2 if self.algorithm.guidance else 1  # with and without what was given
        for sample in samples:
            count = sample.canvases
            # A chunk is a part of the evaluation that runs the rest of the prompt.
            if sample.slot not in running.chunks:
                sample.nfe += count * each
                sample.batch_rows += count * active * each
            if sample.nfe <= count * each:
                sample.first_s += laps[0] if laps else 0.0
            sample.device_s += count * seconds / active
            sample.used_rows += count * useful
            sample.computed_rows += count * computed
        stats.active_slot_steps += active
        stats.useful_rows += useful
        stats.computed_rows += computed
        stats.forward_s += seconds

    def _charge(self, samples: Sequence[Sample], seconds: float) -> None:
        """Charge what a draft took; of it only the seconds count, and the evaluations, which the decoder counts."""
        for sample in samples:
            sample.device_s += seconds / len(samples)
        self.stats.forward_s += seconds

    def _fail(self, bad: list[Sample], batch: Batch[Host]) -> None:
        """These samples have NaN or infinity: they end now, and leave nothing of it in their slots."""
        for sample in bad:
            sample.is_bad = True
        if bad and self.algorithm.keeps:
            self.scheduler.drop(bad)
            for sample in bad:
                self.scheduler.prefixes.forget(sample.slot)
        if bad:
            self.target.wipe([sample.slot for sample in bad] if self.algorithm.keeps else batch.rows.slots_G.tolist())

    def _resume(self, samples: Sequence[Sample], replies: Iterable[Answer]) -> list[Sample]:
        """Send every sample its answer and take its next ask; returns the samples that ended."""
        ended = []
        for sample, answer in zip(samples, replies, strict=True):
            assert sample.decoding is not None, "a sample in a slot has a generator"
            try:
                sample.ask = None if sample.is_bad else sample.decoding.send(answer)
            except StopIteration:
                sample.ask = None
            if sample.ask is None:
                sample.decoding = None
                ended.append(sample)
        return ended

    def _finish(self, sample: Sample) -> Outcome:
        outcome = sample.outcome()
        if sample.tracker is not None and outcome.error_kind is None and not sample.tracker.is_met:
            outcome.error_kind, outcome.error = "bad_constraint", "the text does not match its constraint"
            outcome.tokens = outcome.tokens[:0]
        if not (self.algorithm.knows_logprob or sample.request.probe):
            outcome.logprob = None
        self.slots.release(sample.slot)
        if self._extents is not None:
            self._extents.give_back(sample.slot)
        self._slots[sample.slot] = None
        while self._slots and self._slots[-1] is None:
            self._slots.pop()
        return outcome


def hides_host(backbone: Model) -> bool:
    """Whether steps overlap: a GPU runs one while the host packs the next. Rows of samples that have ended meanwhile write
    columns that nobody sees, which kernels alone never read."""
    return backbone.device.type != "cpu" and backbone.reads_rows


def _is_plain(ask: Ask) -> bool:
    """Whether an ask is for one token: a row of a causal model, or one query."""
    return len(ask.drafts) <= 1 and (not ask.queries or (len(ask.queries) == len(Span._fields) and ask.queries[0] == 1))


def _source(ask: Wish | None) -> str:
    """What answers an ask: the target; a drafting model, whose windows are asks of their own; rows of the last forward; the
    decoder's own names."""
    if isinstance(ask, Ask):
        return "windows" if ask.model else "target"
    if isinstance(ask, Roll):
        return "model" if ask.head == MODEL else "rows"
    return "names" if isinstance(ask, SampleFrom) else "none"
