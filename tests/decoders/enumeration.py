"""The exact law of a decoder: its own generator on the real engine, with a chooser in place of each sample's noise.

`ChosenAnswers` makes one random choice after the other, as the papers write them down. An enumerating chooser takes every branch
of every choice, and the probabilities of the branches add up to the law of the text. A chooser that reads a sample's noise must
give what the engine's batched draws give, which ties those to the enumeration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftmill.decoders.backbones.heads import DraftHeads
from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.sampling import log_law, residual
from draftmill.decoders.engine.asks import DRAFT, LOOSE, NO_DRAFT, SURE, TARGET, Answer, Noted, Weights
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.lanes import Lane, Reading
from draftmill.decoders.engine.named import NamedRows
from draftmill.decoders.engine.packing import Asked
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.rolls import Draft, Rolling
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import algorithm_of
from tests.decoders.references.choosers import Chooser, CoupledRule, NoiseChooser, enumerate_law
from tests.decoders.regions import RegionChooser

Law = dict[tuple[int, ...], float]


class CoupledChooser:
    """Draws every token, drafts too, by the noise of its position alone; `when` numbers it, where steps draw anew."""

    def __init__(self, key: int, sampling: Sampling) -> None:
        self._rule = CoupledRule(key, sampling)

    def choose(self, log_law_V: Tensor, purpose: int, position: int, when: int) -> int:
        return self._rule.direct(log_law_V, position, when, when)

    def accept(self, probability: float, position: int, when: int) -> bool:
        raise AssertionError("under coupled acceptance drafts are compared")


def reading_of(answers: Callable[[Tensor], Iterator[Any]]) -> Reading[Any]:
    """What reads hidden states on the host, at once, and needs no record."""
    found: list[Iterator[Any]] = []

    def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
        found.append(answers(hidden_RD))
        return torch.zeros(0, dtype=torch.float64)

    return Reading(work, lambda _: found.pop())


class ChosenAnswers:
    """Answers one row after the other, by the job's acceptance rule; `choosers` has one for each request's index."""

    slot_bytes = 0

    def __init__(self, sampling: Sampling, suppressed: Sequence[int], choosers: Mapping[int, Chooser]) -> None:
        self.sampling, self.suppressed, self.choosers = sampling, torch.tensor(suppressed, dtype=torch.int64), choosers
        self.samples: dict[int, Sample] = {}
        self.q: dict[tuple[int, int], Tensor] = {}

    def start(self, sample: Sample) -> None:
        self.samples[sample.slot] = sample

    def move(self, source: int, target: int) -> None:
        self.samples[target] = self.samples[source]

    def release(self, slot: int) -> None:
        """Nothing is kept."""

    def use(self, num_slots: int) -> None:
        """Nothing is kept."""

    def answer(self, lane: Lane, asked: Asked, parcel: Parcel) -> Reading[Answer]:
        note, found = lane.noting(asked, slice(None), parcel), list[list[Answer]]()

        def work(sent: Sent, hidden_RD: Tensor) -> Tensor:
            answers = self.answered(lane, hidden_RD, asked)
            found.append(answers)
            note(sent, torch.tensor([token for answer in answers for token in answer.tokens], dtype=torch.int64))
            return torch.zeros(0, dtype=torch.float64)

        return Reading(work, lambda _: iter(found.pop()))

    def answered(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> list[Answer]:
        first, answers = 0, []
        for owner, size in enumerate(asked.size_B.tolist()):
            if not size:
                answers.append(Answer(0, [], []))  # a roll follows
                continue
            rows = slice(first, first + size)
            first += size
            slot = int(asked.slot_R[rows][0])
            law = self.law(lane.logits(hidden_RD[rows]))
            answers.append(self._one(self.samples[slot], law, asked, rows, self.when(asked.when_B[owner])))
        return answers

    def law(self, logits: Tensor) -> Tensor:
        return log_law(logits.index_fill_(-1, self.suppressed, -torch.inf), self.sampling)

    def when(self, when: int, number: int = 0) -> int:
        """The number of a draw: under coupled acceptance that of the noise."""
        return number if self.sampling.acceptance == "coupled" else int(when)

    def drafted(self, sample: Sample, rank: int, when: int, law: Tensor) -> int:
        """Draw a draft and keep its distribution."""
        self.q[sample.request.index, rank] = law
        position = rank if sample.order is None else sample.order[rank]
        return self.choosers[sample.request.index].choose(law, noise.DRAFT, position, when)

    def roll(self, lane: Lane, heads: DraftHeads, rolling: Rolling) -> Iterator[Answer]:
        def draft(asked: Asked, parcel: Parcel) -> Draft:
            places = [*zip(asked.slot_R.tolist(), asked.rank_R.tolist(), asked.when_R.tolist(), strict=True)]

            def draw(sent: Sent, logits: Tensor) -> Tensor:
                rows = zip(places, self.law(logits), strict=True)
                return torch.tensor(
                    [self.drafted(self.samples[slot], rank, self.when(when), law) for (slot, rank, when), law in rows]
                )

            return draw

        parcel = Parcel()
        return rolling.drafts(lane.after(None, parcel, rolling.plan(lane, heads, draft, parcel)))

    def weighed(self, lane: Lane, samples: Sequence[Sample], asks: Sequence[Weights]) -> Iterator[Answer]:
        for sample, ask in zip(samples, asks, strict=True):
            weights = torch.zeros(1, lane.backbone.vocab_size, dtype=torch.float64)
            weights[0, ask.tokens or slice(None)] = torch.tensor(ask.weights or 1.0, dtype=torch.float64)
            yield Answer(
                0, [self.drafted(sample, ask.rank, self.when(sample.decided), self.law(weights.log())[0])], [0.0]
            )

    def named(self, lane: Lane, asked: NamedRows, parcel: Parcel) -> Reading[Noted]:
        return reading_of(lambda hidden_RD: self.noted(lane, hidden_RD, asked))

    def noted(self, lane: Lane, hidden_RD: Tensor, asked: NamedRows) -> Iterator[Noted]:
        first, answers = 0, []
        for size in asked.size_B.tolist():
            rows = slice(first, first + size)
            first += size
            answers.append(self._noted(lane, hidden_RD[rows], asked, rows) if size else Noted(0, [], [], [], [], []))
        return iter(answers)

    def _noted(self, lane: Lane, hidden: Tensor, asked: NamedRows, rows: slice) -> Noted:
        """Rows of one sample, one after the other; those that judge are a chain."""
        logits = lane.logits(hidden).index_fill_(-1, self.suppressed, -torch.inf)
        law = log_law(logits, self.sampling)
        if self.sampling.temperature == 0.0:
            law = torch.log_softmax(logits.to(torch.float64), -1)
        index = self.samples[int(asked.slot_R[rows][0])].request.index
        chooser, when = self.choosers[index], self.when(asked.when_R[rows][0], int(asked.number_R[rows][0]))
        tokens: list[int] = []
        new: dict[tuple[int, int], Tensor] = {}
        accepted, broken = 0, False
        fields = (asked.position_R, asked.kind_R, asked.drafts_R, asked.cell_R)
        for p, position, kind, draft, cell in zip(law, *(one[rows].tolist() for one in fields), strict=True):
            if kind == DRAFT:
                tokens.append(chooser.choose(p, noise.DRAFT, position, when))
                new[index, cell] = p
            elif kind == TARGET or (draft == NO_DRAFT and not broken):
                tokens.append(chooser.choose(p, noise.BONUS, position, when))
            elif self.sampling.acceptance == "coupled":
                tokens.append(chooser.choose(p, noise.TARGET, position, when))
                broken |= tokens[-1] != draft
                accepted += not broken
            elif broken:
                tokens.append(0)
            elif chooser.accept(float((p[draft] - self.q[index, cell][draft]).exp()), position, when):
                tokens.append(draft)
                accepted += 1
            else:
                broken = True
                mass = self.left_over(p, self.q[index, cell])
                tokens.append(chooser.choose(mass.log(), noise.RESIDUAL, position, when))
        self.q |= new
        nothing, sures = [0.0] * len(tokens), law.exp()[range(len(tokens)), tokens].tolist()
        return Noted(accepted, tokens, nothing, sures, nothing, nothing)

    def left_over(self, p: Tensor, q: Tensor) -> Tensor:
        """What a token is drawn from after a refused draft."""
        return residual(p.unsqueeze(0), q.unsqueeze(0))[0]

    def _one(self, sample: Sample, law: Tensor, asked: Asked, rows: slice, when: int) -> Answer:
        chooser, index = self.choosers[sample.request.index], sample.request.index
        tokens: list[int] = []
        accepted = 0
        told = zip(
            law, asked.rank_R[rows].tolist(), asked.kind_R[rows].tolist(), asked.drafts_R[rows].tolist(), strict=True
        )
        for p, rank, kind, draft in told:
            position = rank if sample.order is None else sample.order[rank]
            if kind == DRAFT:
                tokens.append(self.drafted(sample, rank, when, p))
                continue
            if draft == NO_DRAFT:
                tokens.append(
                    chooser.choose(p, noise.TARGET if kind in (TARGET, LOOSE) else noise.BONUS, position, when)
                )
                continue
            if self.sampling.acceptance == "coupled":
                tokens.append(chooser.choose(p, noise.TARGET, position, when))
                if tokens[-1] != draft:
                    break
                accepted += 1
                continue
            sure = torch.full_like(p, -torch.inf).index_fill(0, torch.tensor([draft]), 0.0)
            q = sure if kind == SURE else self.q[index, rank]
            if chooser.accept(float((p[draft] - q[draft]).exp()), position, when):
                tokens.append(draft)
                accepted += 1
                continue
            mass = residual(p.unsqueeze(0), q.unsqueeze(0))[0]
            tokens.append(chooser.choose(mass.log(), noise.RESIDUAL, position, when))
            break
        tokens += [0] * (len(asked.drafts_R[rows]) - len(tokens))
        return Answer(accepted, tokens, [0.0] * len(tokens))


def engine_of(setup: Setup, settings: DecoderChoice, choosers: Mapping[int, Chooser]) -> Engine:
    """The engine that runs these settings, with choosers in place of noise."""
    answers = ChosenAnswers(setup.sampling, setup.info.suppressed, choosers)
    return Engine(setup, algorithm_of(setup, settings), answers=answers)


def decoded(engine: Any, requests: Sequence[Request]) -> dict[int, Outcome]:
    """Outcomes by index; slots are refilled as they become free."""
    queue, found = list(requests), dict[int, Outcome]()
    while queue or engine.active:
        while queue and engine.room(len(queue[0].canvas)):
            engine.admit([queue.pop(0)])
        found |= {outcome.index: outcome for outcome in engine.step()}
    return found


def law_of(setup: Setup, settings: DecoderChoice, requests: Sequence[Request], index: int) -> Law:
    """The exact law of the text of one request, while the others' texts come from their own noise."""
    coupled = setup.sampling.acceptance == "coupled"

    def run(chooser: Chooser) -> tuple[int, ...]:
        choosers: dict[int, Chooser] = {
            request.index: CoupledChooser(request.key, setup.sampling) if coupled else NoiseChooser(request.key)
            for request in requests
        }
        choosers[index] = RegionChooser(chooser) if coupled else chooser
        return tuple(decoded(engine_of(setup, settings, choosers), requests)[index].tokens.tolist())

    return enumerate_law(run)


def fills(vocab_size: int, num_holes: int) -> Iterator[tuple[int, ...]]:
    """Every text of so many tokens."""
    return itertools.product(range(vocab_size), repeat=num_holes)


def total_variation(one: Law, other: Law) -> float:
    """Half of the summed differences: 0 for equal laws, 1 for laws without a common text."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys()) / 2
