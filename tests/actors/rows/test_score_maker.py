"""A mask's hidden tokens become what is scored: the same holes as in infilling, with the text that was there."""

from dataclasses import replace

import numpy as np
import pytest

from draftmill.actors.rows.canvas import Canvas, CanvasSize
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Infill, Score
from draftmill.decoders.base import HOLE
from tests.actors.rows.test_prompts import error_kind
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of, word_pieces

TEXT = "def f(x):\n    y = x\n    return y\n"


def makers(
    mask: dict, *, columns: dict[str, str] | None = None, tokenizer: Tokenizer | None = None
) -> tuple[Maker, Maker]:
    """What scores such a mask's text, and what fills its holes."""
    info, vocabulary = replace(model_info(max_length=64), mask_id=None), tokenizer or byte_level()
    score = Score.model_validate({"kind": "score", "mask": mask}, strict=True)
    infill = Infill.model_validate({"kind": "infill", "mask": mask}, strict=True)
    without = {name: column for name, column in (columns or {}).items() if name != "reference"}
    return (
        maker_for(recipe_of(score, columns), vocabulary, info),
        maker_for(recipe_of(infill, without), vocabulary, info),
    )


def check(canvas: Canvas, holes: Canvas, text: str, tokenizer: Tokenizer) -> None:
    """The canvas has the holes of the other, and this text."""
    assert canvas.scored is not None and canvas.holes == holes.holes
    assert tokenizer.decode(canvas.tokens.tolist()) == text
    assert canvas.scored.tolist() == np.flatnonzero(holes.tokens == HOLE).tolist()
    assert (canvas.score_from, canvas.size) == (canvas.scored[0], holes.size)


@pytest.mark.parametrize(
    "mask",
    [
        {"kind": "random", "rate": 0.3},
        {"kind": "spans", "count": 2, "length": 3},
        {"kind": "span_fraction", "fraction": 0.4},
        {"kind": "lines", "count": 1},
        {"kind": "sentences", "which": "random"},
    ],
)
def test_what_a_mask_hides_of_a_text_is_scored(mask):
    score, infill = makers(mask)
    text = "One two. Three four! Five?" if mask["kind"] == "sentences" else TEXT
    for key in (1, 2):
        canvas, holes = score.make({"text": text}, key), infill.make({"text": text}, key)
        check(canvas, holes, text, byte_level())
        assert score.sizes([({"text": text}, key)]) == [canvas.size]


def test_a_vocabulary_that_joins_no_pieces_scores_the_tokens_that_overlap_what_is_hidden():
    score, infill = makers({"kind": "spans"}, columns={"text": "t", "spans": "s"}, tokenizer=word_pieces())
    row: dict = {"t": "the cat sat on the mat", "s": [[4, 7], [15, 18]]}
    check(score.make(row, 1), infill.make(row, 1), row["t"], word_pieces())


def test_a_reference_belongs_into_the_hole_between_prefix_and_suffix():
    columns = {"prefix": "before", "suffix": "after", "reference": "middle"}
    score, _ = makers({"kind": "marker"}, columns=columns)
    row = {"before": "def f(x):\n", "middle": "    return x", "after": "\n"}
    canvas = score.make(row, 1)
    pieces = [byte_level().encode(row[name]) for name in ("before", "middle", "after")]
    assert canvas.tokens.tolist() == [token for piece in pieces for token in piece]
    start = len(pieces[0])
    assert canvas.scored is not None and canvas.scored.tolist() == list(range(start, start + len(pieces[1])))
    assert error_kind(score, {"before": "a", "after": "b"}) == "missing_column"
    assert error_kind(score, row | {"middle": ""}) == "empty_text"


def test_references_are_the_texts_of_the_markers():
    score, _ = makers({"kind": "marker"}, columns={"text": "t", "reference": "r"})
    canvas = score.make({"t": "a<mask>b<mask>", "r": ["xx", "y"]}, 1)
    assert canvas.tokens.tolist() == byte_level().encode("axxby")
    assert canvas.scored is not None and canvas.scored.tolist() == [1, 2, 4] and canvas.holes == ((1, 3), (4, 5))
    assert score.make({"t": "a<mask>", "r": "xx"}, 1).size == CanvasSize(3, 2)
    assert error_kind(score, {"t": "a<mask>b<mask>", "r": "xx"}) == "bad_mask"
    assert error_kind(score, {"t": "a<mask>b<mask>", "r": ["xx", 1]}) == "bad_mask"
    assert error_kind(score, {"t": "ab", "r": "xx"}) == "marker_absent"


def test_the_reference_of_given_tokens_are_the_ids_of_their_nulls():
    score, _ = makers({"kind": "given"}, columns={"tokens": "t", "reference": "r"})
    canvas = score.make({"t": [7, None, 9, None], "r": [8, 10]}, 1)
    assert canvas.tokens.tolist() == [7, 8, 9, 10]
    assert canvas.scored is not None and canvas.scored.tolist() == [1, 3]
    assert error_kind(score, {"t": [7, None], "r": [8, 10]}) == "bad_mask"
    assert error_kind(score, {"t": [7, 8], "r": []}) == "empty_text"
    assert error_kind(score, {"t": [7, None], "r": "x"}) == "bad_tokens"


def test_a_text_of_which_nothing_is_hidden_has_nothing_to_score():
    score, _ = makers({"kind": "random"})
    assert error_kind(score, {"text": ""}) == "empty_text"
    lines, _ = makers({"kind": "lines"})
    assert error_kind(lines, {"text": "\n\n"}) == "empty_text"
