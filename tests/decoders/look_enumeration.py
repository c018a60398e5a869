"""The exact law of the decoders of masked diffusion: their generators on the real engine, with a chooser in place of noise.

A mask's token is drawn by the noise of its position and step, which several forwards may read (regions.py); where a position
keeps its noise, every forward until it is revealed does. What is drawn for steps ahead only makes drafts: these are the most
likely tokens here, which takes no branches.
The chooser takes every branch; the engine then draws from noise of that branch, and must find the same token. With `confidence:
random` it also chooses how the positions follow each other. All else is the engine's own: distributions, cuts, confidences, the
order of picks, what they reveal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.decoders.draws import noise
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.picks import Masks, Picks
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import algorithm_of
from tests.decoders.enumeration import Law, decoded
from tests.decoders.references.choosers import Chooser, enumerate_law
from tests.decoders.regions import Regions


class ChosenPicks(Picks):
    """Draws the tokens of some samples by choosers, by their requests' indices; those of all others by their own noise."""

    def __init__(self, picks: Picks, choosers: Mapping[int, Chooser], top_p: float | None) -> None:
        self.__dict__.update(picks.__dict__)
        self.choosers, self.top_p = choosers, top_p
        self.inside: dict[int, int] = {}
        self.regions = Regions()
        self.orders: dict[int, list[int]] = {}

    def start(self, sample: Sample) -> None:
        super().start(sample)
        self.inside[sample.slot] = sample.request.index

    def _ours(self, masks: Masks) -> list[tuple[int, int, int]]:
        """(row, request, position) of the masks that are chosen."""
        where = zip(masks.slot_R.tolist(), masks.position_R.tolist(), strict=True)
        return [
            (row, self.inside[slot], at) for row, (slot, at) in enumerate(where) if self.inside[slot] in self.choosers
        ]

    def _drawn(self, law_RV: Tensor, masks: Masks) -> Tensor:
        if masks.ahead:
            return law_RV.argmax(1)
        token_R, step_R = super()._drawn(law_RV, masks), masks.numbers()
        for row, index, position in self._ours(masks):
            cut_V, step = in_nucleus(law_RV[row], self.top_p), int(step_R[row]) if self._fresh else 0
            token_R[row], region = self.regions.chosen(self.choosers[index], index, position, cut_V, step)
            points = region.gumbels()
            gumbel_PV = law_RV.new_zeros(len(points), law_RV.shape[1])
            gumbel_PV[:, :3] = torch.from_numpy(points)[:, : law_RV.shape[1]]
            own_2P = None if masks.own_2R is None else masks.own_2R[:, row : row + 1].expand(-1, len(points))
            found_P = self._rows.draw(law_RV[row].expand(len(points), -1), gumbel_PV, own_2P)
            assert (found_P == token_R[row]).all(), "noise of the chosen branch gives another token"
        return token_R

    def _confidence(self, law_RV: Tensor, token_R: Tensor, masks: Masks) -> Tensor:
        sure_R = super()._confidence(law_RV, token_R, masks)
        if self._kind == "random":
            ours = self._ours(masks)
            for _, index, position in ours:
                self._put_in_order(index, position)
            for row, index, position in ours:
                sure_R[row] = -self.orders[index].index(position)
        return sure_R

    def _put_in_order(self, index: int, position: int) -> None:
        """Where a position comes among those already in order: every place is as likely as the others."""
        order = self.orders.setdefault(index, [])
        if position not in order:
            places = torch.zeros(len(order) + 1, dtype=torch.float64)
            order.insert(self.choosers[index].choose(places, noise.ORDER, position, 0), position)

    def _uniform(self, chance_R: Tensor, masks: Masks) -> Tensor:
        uniform_R = super()._uniform(chance_R, masks)
        for row, index, position in self._ours(masks):
            chance, step = float(chance_R[row]), int(masks.numbers()[row])
            struck = self.choosers[index].accept(chance, position, step)
            # Close to the chance, so that any other limit is found.
            uniform_R[row] = chance * 0.999 if struck else chance + 0.001 * (1.0 - chance)
        return uniform_R


def in_nucleus(law_V: Tensor, top_p: float | None) -> Tensor:
    """Log-probabilities cut to the most probable tokens (of equal ones the lower ids) until their mass reaches `top_p`."""
    if top_p is None:
        return law_V
    before, cut_V = 0.0, torch.full_like(law_V, -torch.inf)
    for token in sorted(range(len(law_V)), key=lambda one: (-float(law_V[one]), one)):
        if before < top_p:
            cut_V[token] = law_V[token]
        before += float(law_V[token].exp())
    return cut_V - cut_V.logsumexp(0)


def engine_of(setup: Setup, settings: DecoderChoice, choosers: Mapping[int, Chooser]) -> Engine:
    """The engine that runs these settings, with choosers for some requests."""
    engine = Engine(setup, algorithm_of(setup, settings))
    picks: Any = engine.answers
    engine.answers = ChosenPicks(picks, choosers, setup.sampling.top_p)
    return engine


def law_of(setup: Setup, settings: DecoderChoice, requests: Sequence[Request], index: int) -> Law:
    """The exact law of the text of one request, while the others' texts come from their own noise."""

    def run(chooser: Chooser) -> tuple[int, ...]:
        return tuple(decoded(engine_of(setup, settings, {index: chooser}), requests)[index].tokens.tolist())

    return enumerate_law(run)
