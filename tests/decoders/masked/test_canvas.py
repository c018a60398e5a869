"""What canvases ask on the engine: picks are those of a plain reading; wrong rows, nodes and windows are found."""

from functools import partial

import numpy as np
import pytest

from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Algorithm, no_prompt
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.canvas import Canvas, CanvasAsk
from draftmill.decoders.masked.settings import MaskedSettings
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import run_all

VOCAB, MASK, LENGTH = 4, 3, 7
MODEL = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
INFO = ModelInfo("table", VOCAB, MASK, None, "masked", 0, (MASK,))
GREEDY = Sampling(temperature=0.0)


def engine_of(asked_of):
    """An engine whose samples ask once, for what `asked_of` makes of their canvas, and then reveal all with the token 0."""
    heard: dict = {}

    def decoding(s):
        asked = asked_of(s)
        answer = yield asked.ask()
        (heard[s.request.index],) = asked.picks(answer, asked.sure(s, MaskedSettings(), answer))
        s.reveal([(0.0, position, 0, 0.0) for position in s.holes])

    algorithm = Algorithm(
        decode=decoding,
        kind="masked",
        sample=partial(Canvas, block_length=None),
        has_prompt=no_prompt,
        keeps=False,
        nodes=True,
        num_slots=2,
        notes=("top1",),
    )
    setup = Setup(backbone=MODEL, info=INFO, sampling=GREEDY, max_rows=3, max_tokens=1 << 20)
    return Engine(setup, algorithm), heard


def requests_of(count=8):
    rng, found = np.random.default_rng(5), []
    for index in range(count):
        canvas = rng.integers(0, MASK, int(rng.integers(4, LENGTH + 1))).astype(np.int32)
        canvas[rng.random(len(canvas)) < 0.6] = -1
        canvas[-2:] = -1
        found.append(Request(index, index, canvas))
    return found


def plain_reading(canvas, low, high, best):
    """(-worth, position, token) of the surest masks in a stretch, from the table itself."""
    digits = [VOCAB] * LENGTH
    for position, token in enumerate(canvas):
        digits[position] = MASK if token < 0 else int(token)
    code = (VOCAB + 1) ** LENGTH - 1 + sum((d - VOCAB) * (VOCAB + 1) ** i for i, d in enumerate(digits))
    found = []
    for position in range(low, high):
        if canvas[position] < 0:
            law = MODEL.table_PXV[position, code, :MASK].softmax(0)
            found.append((-float(law.max()), position, int(law.argmax())))
    return sorted(found)[:best]


def two_nodes(s):
    """The canvas, and the canvas with its first mask drafted; two stretches of the second one."""
    asked, middle, drafted = CanvasAsk(0), s.length // 2, s.canvas.copy()
    drafted[s.holes[0]] = 1
    first = asked.run(s.canvas, 0, s.length, column=0, below=s.length)
    asked.read(first, s.holes, best=min(2, len(s.holes)), draw=0)
    left, right = ([at for at in s.holes[1:] if (at < middle) == is_left] for is_left in (True, False))
    first = asked.run(drafted, 0, s.length, column=0, below=s.length, node=1)
    asked.read(first, left, best=min(1, len(left)), draw=0)
    asked.read(first, right, best=len(right), draw=0)
    return asked


def test_the_picks_of_each_stretch_are_the_surest_tokens_of_a_plain_reading():
    requests = requests_of()
    engine, heard = engine_of(two_nodes)
    run_all(engine, requests)
    for request in requests:
        canvas, holes = request.canvas, np.flatnonzero(request.canvas < 0)
        drafted, middle = canvas.copy(), len(canvas) // 2
        drafted[holes[0]] = 1
        expected = plain_reading(canvas, 0, len(canvas), 2) + plain_reading(drafted, 0, middle, 1)
        expected += plain_reading(drafted, middle, len(canvas), LENGTH)
        told = [pick for stretch in heard[request.index] for pick in stretch]
        assert [pick[1:3] for pick in told] == [pick[1:] for pick in expected]
        assert [pick[0] for pick in told] == pytest.approx([pick[0] for pick in expected])


def test_a_mask_whose_row_did_not_run_is_found():
    def ask(s):
        asked = CanvasAsk(0)
        asked.read(asked.run(s.canvas, 0, s.length - 1, column=0, below=s.length), s.holes, best=1, draw=0)
        return asked

    engine, _ = engine_of(ask)
    engine.admit(requests_of()[:2])
    with pytest.raises(AssertionError, match="a sampled row does not run"):
        engine.step()


def test_a_canvas_as_an_array_is_what_was_revealed():
    def ask(s):
        assert s.canvas.tolist() == s.tokens
        return two_nodes(s)

    engine, _ = engine_of(ask)
    engine.admit(requests_of()[:3])
    canvases = engine.samples
    engine.step()
    assert all(one.canvas.tolist() == one.tokens and -1 not in one.tokens for one in canvases)
