"""The exact law of a decoder: its own generator on the real engine, with a chooser in place of a sample's noise.

`ChosenSampler` makes one random choice after the other, as the papers write them down, each from a distribution that it computes
again. Then it gives the engine's own sampler noise of the branches chosen, at both ends of each, and asserts that it takes them:

    a draw by Gumbel noise             noise close to each corner of the token's region (regions.py)
    a draw by a uniform number u       the least and the greatest u of the token's part of the cumulative distribution
    a draft that holds (or does not)   u = 0 and just below the ratio (just above it, and almost 1)

So whatever else may happen has no share of the law. An enumerating chooser takes every branch of every choice, and the
probabilities of the branches add up to the law of the text. A chooser that reads a sample's noise must give what the engine's
batched draws give, which ties those to the enumeration.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.base import Outcome, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws import keys, noise
from draftmill.decoders.engine.asks import Answer, Ask, SampleFrom
from draftmill.decoders.engine.batch import Draws
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.noise_cache import NoiseCache
from draftmill.decoders.engine.sampler import Logits, Sampler
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.canvas import Canvas
from draftmill.decoders.registry import algorithm_of
from tests.decoders.references.choosers import Chooser, CoupledRule, NoiseChooser, enumerate_law
from tests.decoders.references.sampling import log_law
from tests.decoders.regions import Regions

Law = dict[tuple[int, ...], float]
_EDGE: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How close to an end of its part a number is chosen, as a share of the part, by the precision of the distributions."""
_ROUNDING: Final = 1e-14
"""A draft that is refused with so small a probability always holds: where p is q, this is how they differ."""


class CoupledChooser:
    """Draws every token, drafts too, by the noise of its position alone; `when` numbers it, where steps draw anew."""

    def __init__(self, key: int, sampling: Sampling) -> None:
        self._rule = CoupledRule(key, sampling)

    def choose(self, log_law_V: Tensor, purpose: int, position: int, when: int) -> int:
        return self._rule.direct(log_law_V, position, when, when)

    def accept(self, probability: float, position: int, when: int) -> bool:
        raise AssertionError("under coupled acceptance drafts are compared")


# ---- the sampler -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Chosen:
    """Choices of some sampled rows: their tokens, how many drafts of each sample hold, and both ends of the uniform numbers."""

    tokens: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    draws: dict[int, tuple[float, float]] = field(default_factory=dict)
    accepts: dict[int, tuple[float, float]] = field(default_factory=dict)

    def check(self, tokens: Sequence[int], accepted: Sequence[int] = ()) -> None:
        """The engine's sampler must have taken these branches."""
        holds = {owner: accepted[owner] for owner in self.accepted}
        assert holds == self.accepted, (
            f"noise of the chosen branch makes other drafts hold: {holds}, not {self.accepted}"
        )
        found = {row: tokens[row] for row in self.tokens}
        assert found == self.tokens, f"noise of the chosen branch gives another token: {found}, not {self.tokens}"


class ChosenNoise:
    """The noise of samples, and in its place what was chosen for some rows. Ahead these draw their most likely tokens.

    What is drawn ahead only makes drafts, so this takes no branches.
    """

    def __init__(self, own: NoiseCache) -> None:
        self._own, self.start, self.resize = own, own.start, own.resize
        self.chosen: dict[int, Tensor] = {}

    def rows(self, draws: Draws, part: slice, most_bytes: int, ahead: int) -> Tensor:
        found_RV = self._own.rows(draws, part, most_bytes, ahead).to(torch.float64)
        for line, gumbel_V in self.chosen.items():
            found_RV[line] = 0.0 if ahead else gumbel_V
        return found_RV


class ChosenOrder:
    """In place of `Canvas.order_uniforms`: numbers of positions in an order of which every place is as likely as the others.

    Positions come into the order when they are first asked about.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser, self._order = chooser, list[int]()

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        for position in positions.tolist():
            if position not in self._order:
                places = torch.zeros(len(self._order) + 1, dtype=torch.float64)
                self._order.insert(self._chooser.choose(places, keys.ORDER, position, 0), position)
        return np.array([-self._order.index(position) for position in positions.tolist()], dtype=np.float64)


class ChosenSampler(Sampler):
    """`choosers` has one for the indices of some requests; all others are drawn by their own noise."""

    def __init__(self, *made: Any, choosers: Mapping[int, Chooser]) -> None:
        super().__init__(*made)
        self._sampling: Sampling = made[0].sampling
        self.choosers = choosers
        self._noise: Any = ChosenNoise(self._noise)
        self._samples: dict[int, Sample] = {}
        self._regions = Regions()
        self._q: dict[tuple[int, int, int], Tensor] = {}
        self._used = set[tuple[int, int, int, int]]()

    def start(self, sample: Sample) -> None:
        super().start(sample)
        self._samples[sample.slot] = sample
        if isinstance(sample, Canvas) and sample.request.index in self.choosers:
            sample.uniform = ChosenOrder(self.choosers[sample.request.index])  # type: ignore[assignment]

    def _ours(self, draws: Draws, rows: range) -> Iterator[tuple[int, int, Sample, Chooser]]:
        """The rows that are chosen: their numbers in the part and in the batch, their samples and choosers."""
        for line, row in enumerate(rows):
            sample = self._samples[int(draws.slot_R[row])]
            chooser = self.choosers.get(sample.request.index)
            if chooser is not None:
                yield line, row, sample, chooser

    def _cut(self, law_V: Tensor, slot: int) -> Tensor:
        _, top_p, min_p, _ = self._slots.settings_4S[:, slot].tolist()
        cut_V = in_nucleus(law_V, top_p)
        return cut_V - cut_V.logsumexp(0) if min_p else cut_V

    # ---- by the noise of a position ------------------------------------------------------------------------------

    def draw_part(self, logits_RV: Tensor, draws: Draws, part: slice, *, is_target: bool) -> Tensor:
        """See Sampler; all tokens of a position, drafts too, are drawn by its noise, which may be that of a step."""
        warp, chosen, rows = self._warp(draws, part), Chosen(), range(draws.num_sampled)[part]
        self._noise.chosen = {}
        if not warp.uses.all_greedy:
            uncut_RV = warp.law(warp.shape(warp.suppress(logits_RV.clone())), cut=False)
            corners: list[tuple[int, Tensor]] = []
            for line, row, sample, chooser in self._ours(draws, rows):
                if isinstance(chooser, NoiseChooser):
                    continue  # It knows only uniform numbers.
                step = int(draws.host_draw_R[row]) if self.algorithm.fresh else 0
                law_V, position = self._cut(uncut_RV[line], sample.slot), int(draws.place_R[row])
                if isinstance(chooser, CoupledChooser):
                    chosen.tokens[line] = chooser.choose(law_V, keys.TARGET, position, step)
                    continue
                chosen.tokens[line], points_PV = self._region(chooser, sample, position, law_V, step)
                self._noise.chosen[line] = points_PV[0]
                corners.append((line, points_PV))
            self._check_corners(uncut_RV, draws, rows, corners, chosen.tokens)
        told_AFR = super().draw_part(logits_RV, draws, part, is_target=is_target)
        chosen.check(told_AFR[0, 0].to(torch.int64).tolist())
        return told_AFR

    def _region(
        self, chooser: Chooser, sample: Sample, position: int, law_V: Tensor, step: int = 0
    ) -> tuple[int, Tensor]:
        """A token, and Gumbel noise that must draw it, [P, V]."""
        token, region = self._regions.chosen(chooser, sample.request.index, position, law_V, step)
        points = torch.from_numpy(region.gumbels())
        gumbel_PV = torch.zeros(len(points), len(law_V), dtype=torch.float64)
        gumbel_PV[:, :3] = points[:, : len(law_V)]
        return token, gumbel_PV

    def _check_corners(
        self, uncut_RV: Tensor, draws: Draws, rows: range, corners: list[tuple[int, Tensor]], tokens: dict[int, int]
    ) -> None:
        if not corners:
            return
        line_P = torch.tensor([line for line, points_PV in corners for _ in points_PV])
        warp = self._warp(draws, line_P + rows.start)
        drawn = warp.draw(uncut_RV[line_P], torch.cat([points_PV for _, points_PV in corners])).tolist()
        for line, token in zip(line_P.tolist(), drawn, strict=True):
            Chosen({line: tokens[line]}).check({line: token})  # type: ignore[arg-type]

    # ---- by uniform numbers --------------------------------------------------------------------------------------

    def judge(
        self, logits: Logits, hidden_RD: Tensor, draws: Draws, parts: Sequence[slice], *, is_target: bool
    ) -> Tensor:
        chosen, whole = self._judge(logits(hidden_RD), draws, slice(None)), super().judge

        def work() -> Tensor:
            record = whole(logits, hidden_RD, draws, parts, is_target=is_target)
            chosen.check(record[: draws.num_sampled].tolist(), record[-len(draws.sampled_B) :].tolist())
            return record

        return self._steered(draws, chosen, work)

    def drafts(self, logits_RV: Tensor, hidden_RD: Tensor, draws: Draws, part: slice) -> Tensor:
        whole = super().drafts
        if draws.judging is None:
            return whole(logits_RV, hidden_RD, draws, part)
        chosen, first = self._judge(logits_RV, draws, part), range(draws.num_sampled)[part].start

        def work() -> Tensor:
            token_R = whole(logits_RV.clone(), hidden_RD, draws, part)
            chosen.check([0] * first + token_R.tolist())
            return token_R

        return self._steered(draws, chosen, work)

    def _steered(self, draws: Draws, chosen: Chosen, work: Callable[[], Tensor]) -> Tensor:
        """Do it with numbers at both ends of what was chosen; the second time as if it were the first."""
        kept = self._states_CD.clone(), self._log_q_C.clone()
        found = self._log_q_C
        for end in range(2):
            self._states_CD.copy_(kept[0])
            self._log_q_C.copy_(kept[1])
            for held_R, ends in (
                (draws.by_rejection.uniform_R, chosen.draws),
                (draws.by_rejection.accept_R, chosen.accepts),
            ):
                for row, numbers in ends.items():
                    held_R[row] = numbers[end]
            found = work()
        return found

    def _judge(self, logits_RV: Tensor, draws: Draws, part: slice) -> Chosen:
        """Row by row: draw drafts and keep their distributions, judge chains by those that were kept before."""
        warp, chosen, news, broken = self._warp(draws, part), Chosen(), dict[tuple[int, int, int], Tensor](), set[int]()
        assert not self._untempered, "S2D2's rule at temperature 0 is not written down here"
        law_RV = warp.law(warp.shape(warp.suppress(logits_RV.clone())), cut=False)
        for line, row, sample, chooser in self._ours(draws, range(draws.num_sampled)[part]):
            p_V = self._cut(law_RV[line], sample.slot)
            owner = int(draws.by_rejection.owner_R[row])
            when = when_of(sample)
            index, position, draft = sample.request.index, int(draws.place_R[row]), int(draws.by_rejection.draft_R[row])
            bank = int(draws.by_rejection.cell_R[row]) // self.algorithm.window % self.algorithm.banks
            drafted = index, int(draws.rank_R[row]), bank
            if not draws.judges_R[row]:
                news[drafted] = p_V
                self._choose(chosen, row, chooser, p_V, (keys.DRAFT, position, when))
                continue
            chosen.accepted.setdefault(owner, 0)
            if owner in broken:
                continue
            if not draws.by_rejection.judged_R[row]:
                self._take(index, keys.BONUS, position, when)
                self._choose(chosen, row, chooser, p_V, (keys.BONUS, position, when))
                continue
            sure_V = torch.full_like(p_V, -torch.inf).index_fill(0, torch.tensor([draft]), 0.0)
            q_V = sure_V if draws.by_rejection.is_sure else self._q[drafted]
            ratio = float((p_V[draft].double() - q_V[draft].double()).exp()) ** self.algorithm.temper
            ratio = 1.0 if ratio > 1.0 - _ROUNDING else ratio
            self._take(index, keys.ACCEPT, position, when)
            if chooser.accept(ratio, position, when):
                chosen.accepts[row] = ends_of(0.0, ratio, p_V)
                chosen.tokens[row] = draft
                chosen.accepted[owner] += 1
                continue
            chosen.accepts[row] = ends_of(ratio, 1.0, p_V)
            broken.add(owner)
            self._take(index, keys.RESIDUAL, position, when)
            mass_V = left_over(p_V, q_V)
            self._choose(chosen, row, chooser, mass_V.log(), (keys.RESIDUAL, position, when), mass_V)
        self._q |= news
        return chosen

    def _choose(
        self,
        chosen: Chosen,
        row: int,
        chooser: Chooser,
        law_V: Tensor,
        number: tuple[int, int, int],
        mass_V: Tensor | None = None,
    ) -> None:
        chosen.tokens[row] = token = chooser.choose(law_V, *number)
        chosen.draws[row] = part_of(law_V.exp() if mass_V is None else mass_V, token)

    def _take(self, *number: int) -> None:
        """What decides about a token is independent of all else only if its number is not used twice."""
        assert number not in self._used, "a random number decides twice"
        self._used.add(number)  # type: ignore[arg-type]

    # ---- drafts from distributions that decoders name ------------------------------------------------------------

    def draw_named(self, samples: Sequence[Sample], asks: Sequence[SampleFrom]) -> Iterator[Answer]:
        chosen, gumbels, whole = Chosen(), dict[int, Tensor](), super().draw_named
        for number, (sample, ask) in enumerate(zip(samples, asks, strict=True)):
            index = sample.request.index
            if index not in self.choosers or (self._slots.uses.all_greedy and not self.by_ratio):
                continue
            chooser, law_V = self.choosers[index], self._named_law(ask)
            position = ask.rank if sample.order is None else sample.order[ask.rank]
            if self.by_ratio:
                self._q[index, ask.rank, 0] = law_V
                self._choose(chosen, number, chooser, law_V, (keys.DRAFT, position, sample.decided))
            elif isinstance(chooser, CoupledChooser):
                chosen.tokens[number] = chooser.choose(law_V, keys.TARGET, position, 0)
            else:
                chosen.tokens[number], points_PV = self._region(chooser, sample, position, law_V)
                gumbels[number] = points_PV[0]
        uniform_rows, gumbel_at = keys.uniform_rows, noise.gumbel_at
        answers = list[Answer]()
        for end in range(2):

            def uniforms(*numbers: Any, end: int = end) -> Any:
                found_B = uniform_rows(*numbers)
                for number, ends in chosen.draws.items():
                    found_B[number] = ends[end]
                return found_B

            def noise_at(key_B2: Tensor, place_B: Tensor, token_BT: Tensor) -> Tensor:
                found_BT = gumbel_at(key_B2, place_B, token_BT).to(torch.float64)
                for number, gumbel_V in gumbels.items():
                    found_BT[number] = gumbel_V[token_BT[number]]
                return found_BT

            own_uniforms = mock.patch.object(keys, "uniform_rows", uniforms)
            own_noise = mock.patch.object(noise, "gumbel_at", noise_at)
            with own_uniforms, own_noise:
                answers = list(whole(samples, asks))
            chosen.check([answer.tokens[0] for answer in answers])
        return iter(answers)

    def _named_law(self, ask: SampleFrom) -> Tensor:
        weight_V = torch.zeros(self._vocab_size, dtype=torch.float64)
        weight_V[ask.tokens or slice(None)] = torch.tensor(ask.weights or 1.0, dtype=torch.float64)
        log_V = weight_V.index_fill(0, self._suppressed, 0.0).log().to(self._law_dtype)
        return log_law(log_V.unsqueeze(0), self._sampling)[0]


def when_of(sample: Sample) -> int:
    """The number of a sample's present draws under the rejection rule."""
    when = sample.ask.when if isinstance(sample.ask, Ask) else -1
    return sample.decided if when < 0 else when


def left_over(p_V: Tensor, q_V: Tensor) -> Tensor:
    """What a token is drawn from after a refused draft: the positive part of p - q; p where rounding leaves nothing."""
    mass_V = (p_V.exp() - q_V.exp()).clamp(min=0.0)
    return mass_V if float(mass_V.sum()) > 0 else p_V.exp()


def part_of(mass_V: Tensor, token: int) -> tuple[float, float]:
    """The least and the greatest uniform number that draws a token, in ascending order of tokens."""
    cumulative = mass_V.to(torch.float64).cumsum(0).tolist()
    before = cumulative[token - 1] if token else 0.0
    return ends_of(before / cumulative[-1], cumulative[token] / cumulative[-1], mass_V)


def ends_of(low: float, high: float, law_V: Tensor) -> tuple[float, float]:
    """Numbers close to both ends of a part."""
    edge = _EDGE[law_V.dtype] * (high - low)
    return low + edge, high - edge


def in_nucleus(law_V: Tensor, top_p: float) -> Tensor:
    """Log-probabilities cut to the most probable tokens (of equal ones the lower ids) until their mass reaches `top_p`."""
    if top_p >= 1.0:
        return law_V
    before, cut_V = 0.0, torch.full_like(law_V, -torch.inf)
    for token in sorted(range(len(law_V)), key=lambda one: (-float(law_V[one]), one)):
        if before < top_p:
            cut_V[token] = law_V[token]
        before += float(law_V[token].exp())
    return cut_V - cut_V.logsumexp(0)


# ---- laws ------------------------------------------------------------------------------------------------------------


def engine_of(setup: Setup, settings: DecoderChoice, choosers: Mapping[int, Chooser]) -> Engine:
    """The engine that runs these settings, with choosers in place of the noise of some requests."""
    make = partial(ChosenSampler, choosers=choosers)
    return Engine(setup, algorithm_of(setup, settings), make_sampler=make)


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
        return tuple(decoded(engine_of(setup, settings, {index: chooser}), requests)[index].tokens.tolist())

    return enumerate_law(run)


def fills(vocab_size: int, num_holes: int) -> Iterator[tuple[int, ...]]:
    """Every text of so many tokens."""
    return itertools.product(range(vocab_size), repeat=num_holes)


def total_variation(one: Law, other: Law) -> float:
    """Half of the summed differences: 0 for equal laws, 1 for laws without a common text."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys()) / 2
