"""`ssd` with `cache: dual_relaxed`: drafts continue where the cache would be rebuilt, and its text is no longer stepwise's."""

import numpy as np
import pytest

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.ssd_support import decode, reveals, same
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, toy_requests

GREEDY, MASK, LENGTH = Sampling(temperature=0.0), 3, 7
LIVES: list[tuple[int | None, int | None]] = [(2, None), (3, None), (2, 3), (3, 2), (1, 4), (None, 2)]


def info(shift=0):
    return ModelInfo("table", 4, MASK, None, "masked", 0, (MASK,), shift)


def ssd(cache="dual_relaxed", **more):
    return decoder_settings("ssd", cache=cache, **more)


def requests_of(count, seed):
    return toy_requests(count, vocab_size=MASK, longest=LENGTH, shortest=2, share=0.8, seed=seed)


class Reference:
    """One canvas, as one would write it down: what the cache holds of a position is the token that was last run there."""

    def __init__(self, model, canvas, *, shift, block_length, refresh, draft_length):
        self.model, self.canvas, self.shift = model, canvas.copy(), shift
        self.size, self.refresh, self.most = block_length or len(canvas), refresh, draft_length
        self.origin = int(np.flatnonzero(canvas < 0)[0])
        self.held, self.revealed = canvas.copy(), []
        self.drafts: dict[int, tuple[float, int]] = {}
        self.before: int | None = None
        self.made_at, self.rounds = 0, 0

    def block(self, position):
        return max(position - self.origin, 0) // self.size

    def window(self, *blocks):
        """The positions of these blocks, each with the row in front of it."""
        starts = [self.origin + block * self.size for block in blocks]
        return [p for p in range(len(self.canvas)) if any(s - self.shift <= p < s + self.size for s in starts)]

    def masks(self, canvas):
        return [int(p) for p in np.flatnonzero(canvas < 0)]

    def said(self, view, position):
        """(how sure, token) of one position when the model sees `view`."""
        tokens = np.where(view < 0, MASK, view)
        code = 5**self.model.num_positions - 1 - sum(5**p * (4 - int(t)) for p, t in enumerate(tokens))
        law = self.model.table_PXV[max(position - self.shift, 0), code, :MASK].softmax(0)
        return float(law.max()), int(law.argmax())

    def read(self, view, canvas, run, count):
        """What a node says of the masks that it has the rows of: whole blocks until there are `count`."""
        masks = self.masks(canvas)
        asked: list[int] = []
        for position in masks:
            if len(asked) >= count and self.block(position) != self.block(asked[-1]):
                break
            asked.append(position)
        return {p: self.said(view, p) for p in asked if max(p - self.shift, 0) in run}

    def choice(self, reading, canvas):
        block = self.block(self.masks(canvas)[0])
        return min((p for p in self.masks(canvas) if self.block(p) == block), key=lambda p: (-reading[p][0], p))

    def chain(self):
        """The drafts of this block and the next one, in their order."""
        masks = self.masks(self.canvas)
        near = sorted({self.block(p) for p in masks})[:2]
        known = [p for p in masks if self.block(p) in near and p in self.drafts]
        known.sort(key=lambda p: (self.block(p), -self.drafts[p][0], p))
        return known[: min(self.most, sum(self.block(p) in near for p in masks) - 1)]

    def round(self):
        self.rounds += 1
        here = self.block(self.masks(self.canvas)[0])
        due = self.before != here if self.refresh is None else len(self.revealed) - self.made_at >= self.refresh
        due = due or self.before is None
        self.made_at = len(self.revealed) if due else self.made_at
        run = range(len(self.canvas)) if due else self.window(self.before, here)
        self.before = here
        self.held[run] = self.canvas[run]
        chain, count = self.chain(), 1 + self.most + self.size * (self.size < len(self.canvas))
        root = self.read(self.held, self.canvas, run, count)
        canvas, view, reading, told, last = self.canvas.copy(), self.held.copy(), root, [], here
        for place in [*chain, None]:
            pick = self.choice(reading, canvas)
            told.append((pick, reading[pick][1]))
            if place != pick or self.drafts[place][1] != reading[pick][1] or len(self.masks(canvas)) == 1:
                break
            canvas[pick] = reading[pick][1]
            block = self.block(self.masks(canvas)[0])
            there = self.window(last, block)
            view[there], last = canvas[there], block
            reading = self.read(view, canvas, there, count)
        if self.refresh is not None:
            self.held, self.before = view, last
        self.drafts |= root | reading
        for position, token in told:
            self.canvas[position] = token
        self.revealed += told


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("block_length", "refresh"), LIVES)
@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_are_judged_by_the_cache_of_their_round(block_length, refresh, shift):
    crossed = 0
    for draft_length in (1, 3, 6):
        model = TokenTable(vocab_size=4, num_positions=LENGTH, seed=draft_length, spread=1.0)
        life: dict = {"block_length": block_length, "refresh": refresh, "draft_length": draft_length}
        requests = requests_of(12, seed=draft_length)
        outcomes = decode(model, info(shift), ssd(**life), GREEDY, requests, rows=5)
        for request in requests:
            if not (request.canvas < 0).any():
                continue
            reference = Reference(model, request.canvas, shift=shift, **life)
            while reference.masks(reference.canvas):
                reference.round()
            assert reveals(outcomes[request.index]) == reference.revealed
            assert outcomes[request.index].nfe == reference.rounds
        strict = decode(model, info(shift), ssd("dual_strict", **life), GREEDY, requests, rows=5)
        crossed += sum(strict[index].nfe - outcomes[index].nfe for index in strict)
    assert crossed > 0


def test_it_is_lossy_and_its_texts_tell_how_often(golden):
    """The only honest count of what differs: both texts of every sample, side by side."""
    backbone, known = load(golden / "llada", dtype="float64"), inspect_model(golden / "llada")
    prompts = np.random.default_rng(0).integers(0, 80, (16, 4))
    requests = [Request(at, at, np.array([*prompt, *[-1] * 16], dtype=np.int32)) for at, prompt in enumerate(prompts)]
    sampled = Sampling(temperature=1.0)
    base = decoder_settings("stepwise", cache="dual_strict", block_length=4)
    expected = decode(backbone, known, base, sampled, requests, rows=8)
    settings = ssd(draft_length=4, block_length=4)
    outcomes = decode(backbone, known, settings, sampled, requests, rows=8)
    differs = [outcomes[at].tokens.tolist() != expected[at].tokens.tolist() for at in expected]
    assert 0 < np.mean(differs) < 1
    exact = decode(backbone, known, ssd("dual_strict", draft_length=4, block_length=4), sampled, requests, rows=8)
    same(exact, expected)


def test_where_the_cache_is_made_once_there_is_nothing_to_relax():
    model = TokenTable(vocab_size=4, num_positions=LENGTH, seed=2, spread=1.0)
    requests = requests_of(30, seed=2)
    base = decoder_settings("stepwise", cache="dual_strict", block_length=None)
    expected = decode(model, info(), base, GREEDY, requests, rows=4)
    same(
        decode(model, info(), ssd(draft_length=3, block_length=None), GREEDY, requests, rows=4),
        expected,
    )


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4])
def test_a_model_that_keeps_its_mind_pays_nothing_for_the_ends_of_blocks(draft_length):
    model = TokenTable(vocab_size=4, num_positions=LENGTH)
    model.table_PXV[:] = model.table_PXV[:, :1]
    nothing = [Request(0, 0, np.full(LENGTH, -1, dtype=np.int32))]
    settings = ssd(draft_length=draft_length, block_length=3)
    (outcome,) = decode(model, info(), settings, GREEDY, nothing, rows=1).values()
    assert outcome.nfe == 1 + -(-(LENGTH - 1) // (draft_length + 1))
