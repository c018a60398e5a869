"""A forward that was started and whose answers were not read yet; meanwhile, more may be started.

    the drafting model's     the draft of each forward is a row of the next one; all are read when the window is complete
    the target's             the token drawn in one step is a row of the next one, unless the text ends with it: what the forward
                             computed for such a sample is dropped, and is no evaluation of it

Legend: B samples of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftmill.decoders.engine.asks import ASKED, COUNT, FIELDS, FIRST_PROMISE, RANK, Answer, Ask, promise
from draftmill.decoders.engine.lanes import Lane, Started
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.pieces import ran_ahead
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.transfers import Laps


@dataclass(slots=True, eq=False)
class Flight:
    """One forward of these samples. `asks` are theirs, or what they were expected to ask.

    `laps` is None where nothing will be answered: its seconds are read with the next forward's. `useful` and `computed` are its
    rows, `verified_B` the tokens that each sample decides or checks. `promised_B` are the ranks of promised drafts.
    """

    lane: Lane
    samples: list[Sample]
    asks: Sequence[Ask]
    started: Started[Any]
    laps: Laps | None
    useful: int
    computed: int
    verified_B: Ints
    promised_B: list[list[int]] = field(default_factory=list)

    @property
    def asked(self) -> Iterator[tuple[Sample, Ask]]:
        """Each sample with its ask."""
        return zip(self.samples, self.asks, strict=True)

    def seconds(self) -> list[float]:
        """Of its network, output layer and so on; the answers must have been read."""
        return self.lane.laps() if self.laps is None else self.laps.read()

    def without(self, dead: Sequence[int]) -> tuple[int, int]:
        """Useful rows and verified tokens, without some samples' (numbers in `samples`)."""
        rows = sum(num_rows(self.asks[index]) for index in dead)
        return self.useful - rows, int(self.verified_B.sum()) - sum(int(self.verified_B[index]) for index in dead)

    def is_asked_by(self, samples: list[Sample]) -> bool:
        """Whether each of these samples asks what was expected of it."""
        ask_of = {id(sample): ask for sample, ask in self.asked}
        return all(sample.ask == known(ask_of.get(id(sample)), sample) for sample in samples)

    def give_promises(self) -> None:
        """Let each sample go on with promises in place of its drafts; of a prompt's piece nothing was asked."""
        for sample, ask in self.asked:
            ranks = [] if sample.piece else answered_ranks(ask)
            self.promised_B.append(ranks)
            if sample.piece:
                ran_ahead(sample)
                continue
            assert sample.decoding is not None, "a sample in a slot has a generator"
            sample.ask = sample.decoding.send(Answer(0, [promise(rank) for rank in ranks], [0.0] * len(ranks)))

    def keep_promises(self) -> None:
        """Read the drafts, and put them in the promises' places."""
        answers = self.lane.finish(self.started)
        for sample, ranks, answer in zip(self.samples, self.promised_B, answers, strict=True):
            for rank, token in zip(ranks, answer.tokens, strict=True):
                sample.tokens[rank] = token


def known(ask: Ask | None, sample: Sample) -> Ask | None:
    """An ask with the sample's tokens in place of promises."""
    if ask is None or not ask.tokens or min(ask.tokens) > FIRST_PROMISE:
        return ask
    tokens = [sample.tokens[FIRST_PROMISE - token] if token <= FIRST_PROMISE else token for token in ask.tokens]
    return ask._replace(tokens=tokens)


def num_rows(ask: Ask) -> int:
    """How many rows an ask has."""
    return sum(ask.spans[COUNT::FIELDS]) + sum(ask.queries[COUNT::FIELDS])


def answered_ranks(ask: Ask) -> list[int]:
    """The ranks that an ask's answered rows speak of; not those of queries."""
    firsts, counts = ask.spans[RANK::FIELDS], ask.spans[ASKED::FIELDS]
    return [rank for first, count in zip(firsts, counts, strict=True) for rank in range(first, first + count)]
