"""The exact law of a decoder: its own generator on the real engine, with a chooser in place of each sample's noise.

`ChosenAnswers` makes one random choice after the other, as the papers write them down. An enumerating chooser takes every branch
of every choice, and the probabilities of the branches add up to the law of the text. A chooser that reads a sample's noise must
give what the engine's batched draws give, which ties those to the enumeration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decoders.base import Outcome, Request
from decoders.common_settings import DecoderChoice, Sampling
from decoders.draws import noise
from decoders.draws.sampling import log_law, residual
from decoders.engine.asks import DRAFT, NO_DRAFT, SURE, TARGET, Answer
from decoders.engine.engine import Engine
from decoders.engine.lanes import Lane
from decoders.engine.packing import Asked
from decoders.engine.samples import Sample
from decoders.engine.setup import Setup
from decoders.references.choosers import Chooser, NoiseChooser, enumerate_law
from decoders.registry import algorithm_of

Law = dict[tuple[int, ...], float]


class ChosenAnswers:
    """Answers of the rejection rule, one row after the other; `choosers` has one for each request's index."""

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

    def answer(self, lane: Lane, hidden_RD: Tensor, asked: Asked) -> Iterator[Answer]:
        first, answers = 0, []
        for owner, size in enumerate(asked.size_B.tolist()):
            rows = slice(first, first + size)
            first += size
            slot = int(asked.slot_R[rows][0])
            law = log_law(lane.logits(hidden_RD[rows]).index_fill_(-1, self.suppressed, -torch.inf), self.sampling)
            answers.append(self._one(self.samples[slot], law, asked, rows, int(asked.when_B[owner])))
        return iter(answers)

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
                self.q[index, rank] = p
                tokens.append(chooser.choose(p, noise.DRAFT, position, when))
                continue
            if draft == NO_DRAFT:
                tokens.append(chooser.choose(p, noise.TARGET if kind == TARGET else noise.BONUS, position, when))
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

    def run(chooser: Chooser) -> tuple[int, ...]:
        choosers: dict[int, Chooser] = {request.index: NoiseChooser(request.key) for request in requests}
        choosers[index] = chooser
        return tuple(decoded(engine_of(setup, settings, choosers), requests)[index].tokens.tolist())

    return enumerate_law(run)


def fills(vocab_size: int, num_holes: int) -> Iterator[tuple[int, ...]]:
    """Every text of so many tokens."""
    return itertools.product(range(vocab_size), repeat=num_holes)


def total_variation(one: Law, other: Law) -> float:
    """Half of the summed differences: 0 for equal laws, 1 for laws without a common text."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys()) / 2
