"""Rows become canvases and canvases texts: every mask, what is scored of it, and every row that it can't take."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.actors.rows.canvas import Canvas, CanvasSize, finish_row, runs
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Infill, Score
from draftmill.decoders.base import HOLE
from draftmill.storage.errors import RowError
from tests.actors.rows.test_prompts import error_kind
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of, word_pieces

TEXT = "def f(x):\n    return x\n\nfor value in values:\n        total += value\n"
LETTER = byte_level().encode("A")[0]


def maker(mask: dict, *, columns: dict[str, str] | None = None, max_length: int | None = 64, tokenizer=None):
    task = Infill.model_validate({"kind": "infill", "mask": mask}, strict=True)
    return maker_for(recipe_of(task, columns), tokenizer or byte_level(), model_info(max_length=max_length))


def filled(canvas: Canvas, token: int = LETTER) -> str | None:
    return finish_row(canvas, np.full(canvas.num_masked, token, dtype=np.int32), byte_level())[0]


def error_of(make: Maker, values: dict) -> RowError:
    with pytest.raises(RowError) as caught:
        make.make(values, 1)
    return caught.value


def planned_error_of(make: Maker, values: dict) -> RowError:
    with pytest.raises(RowError) as caught:
        make.size(values, 1)
    return caught.value


TEXT_MASKS: list[dict] = [
    {"kind": "random", "rate": 0.5},
    {"kind": "random", "rate": 1.0},
    {"kind": "spans", "count": 2, "length": 3},
    {"kind": "span_fraction", "fraction": 0.25},
    {"kind": "lines", "count": 2},
    {"kind": "lines", "rate": 0.5},
]


@pytest.mark.parametrize("mask", TEXT_MASKS, ids=str)
def test_a_canvas_is_a_function_of_the_row_and_its_key(mask):
    one, again, other = (maker(mask).make({"text": TEXT}, key) for key in (5, 5, 6))
    assert np.array_equal(one.tokens, again.tokens) and one.holes == again.holes
    if mask.get("rate") != 1.0:
        assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("mask", TEXT_MASKS, ids=str)
def test_the_planner_knows_the_size_without_drawing(mask):
    make = maker(mask)
    rows: list[dict] = [{"text": TEXT}, {"text": ""}, {"text": "x"}, {}, {"text": "y" * 500}]
    for key, values in enumerate(rows, start=5):
        try:
            canvas = make.make(values, key)
        except RowError as error:
            assert planned_error_of(make, values).kind == error.kind
        else:
            assert make.size(values, key) == CanvasSize(len(canvas.tokens), canvas.num_masked)


@pytest.mark.parametrize("mask", TEXT_MASKS, ids=str)
def test_original_tokens_in_the_holes_give_the_original_text(mask):
    make = maker(mask)
    canvas = make.make({"text": TEXT}, 3)
    if mask["kind"] == "lines":
        hidden = [part for part in TEXT.split("\n") if part not in (filled(canvas) or "").split("\n")]
        tokens = [token for line in hidden for token in byte_level().encode(line)]
    else:
        tokens = np.asarray(byte_level().encode(TEXT))[canvas.tokens == HOLE].tolist()
    whole, fills = finish_row(canvas, np.asarray(tokens, dtype=np.int32), byte_level())
    assert whole == TEXT
    assert [(fill["start"], fill["end"]) for fill in fills] == list(canvas.holes)


@pytest.mark.parametrize(
    ("rate", "length", "masked"), [(0.5, 10, 5), (0.25, 10, 3), (0.01, 10, 1), (1.0, 10, 10), (0.5, 0, 0)]
)
def test_random_masks_a_rounded_share_and_at_least_one(rate, length, masked):
    canvas = maker({"kind": "random", "rate": rate}).make({"text": "7" * length}, 1)
    assert (len(canvas.tokens), canvas.num_masked) == (length, masked)


@settings(max_examples=60, deadline=None)
@given(key=st.integers(0, 2**64 - 1), count=st.integers(1, 5), length=st.integers(1, 6), size=st.integers(0, 40))
def test_spans_are_separate_and_of_their_length(key, count, length, size):
    make = maker({"kind": "spans", "count": count, "length": length})
    values = {"text": "7" * size}
    if 0 < size < count * length + count - 1:
        assert error_of(make, values).kind == "bad_mask"
    else:
        holes = make.make(values, key).holes
        assert [end - start for start, end in holes] == ([length] * count if size else [])


def test_every_placement_of_spans_occurs():
    make = maker({"kind": "spans", "count": 2, "length": 1})
    assert len({make.make({"text": "7" * 5}, key).holes for key in range(200)}) == 6


def test_span_fraction_is_one_span_anywhere():
    make = maker({"kind": "span_fraction", "fraction": 0.5})
    found = {make.make({"text": "7" * 6}, key).holes for key in range(100)}
    assert found == {((start, start + 3),) for start in range(4)}


def test_lines_hide_whole_lines_and_nothing_else():
    text = "a = 1\r\n\n   \n    b = 2\nc"
    canvas = maker({"kind": "lines", "rate": 1.0}).make({"text": text}, 1)
    sizes = [len(byte_level().encode(line)) for line in ("a = 1", "    b = 2", "c")]
    assert [end - start for start, end in canvas.holes] == sizes
    assert filled(canvas) == "{}\r\n\n   \n{}\n{}".format(*("A" * size for size in sizes))


def test_a_text_without_lines_has_no_holes():
    assert maker({"kind": "lines"}).make({"text": " \n\n"}, 1).holes == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = <mask>;", "x = AAAA;"),
        ("<mask:2> + <mask:1>", "AA + A"),
        ("<mask><mask>", "AAAAAAAA"),
        ("é<mask:3>🙂", "éAAA🙂"),
    ],
)
def test_markers_are_holes_of_their_length(text, expected):
    assert filled(maker({"kind": "marker", "length": 4}).make({"text": text}, 1)) == expected


def test_a_marker_without_a_bracket_has_one_length():
    assert filled(maker({"kind": "marker", "marker": "___", "length": 2}).make({"text": "a ___ b"}, 1)) == "a AA b"


def test_prefix_and_suffix_leave_a_hole_between_them():
    make = maker({"kind": "marker", "length": 3}, columns={"prefix": "p", "suffix": "s"})
    assert filled(make.make({"p": "<mask> a", "s": "b"}, 1)) == "<mask> aAAAb"
    assert filled(maker({"kind": "marker", "length": 2}, columns={"prefix": "p"}).make({"p": "a"}, 1)) == "aAA"


def test_spans_of_the_row_hide_its_own_characters():
    make = maker({"kind": "spans"}, columns={"spans": "s"})
    canvas = make.make({"text": "héllo 🙂 world", "s": [[6, 7], {"start": 1, "end": 2}]}, 1)
    assert [end - start for start, end in canvas.holes] == [2, 4]  # the bytes of é and of the face
    assert filled(canvas) == "hAAllo AAAA world"


def test_touching_spans_of_a_row_are_one_hole():
    canvas = maker({"kind": "spans"}, columns={"spans": "s"}).make(
        {"text": "7777777", "s": [[2, 4], [1, 2], [3, 5]]}, 1
    )
    assert canvas.holes == ((1, 5),)


def test_middle_sentences_become_one_hole():
    make = maker({"kind": "sentences"}, columns={"sentences": "s"})
    canvas = make.make({"s": ["One.", "Two.", "Three.", "Four."]}, 1)
    assert len(canvas.holes) == 1
    text = filled(canvas)
    assert text is not None and text.startswith("One.AAAA") and text.endswith("A Four.")


def test_sentences_are_found_in_text():
    make = maker({"kind": "sentences", "which": [0, -1]})
    first, last = (len(byte_level().encode(part)) for part in ('"Hi there!"', " End."))
    canvas = make.make({"text": '"Hi there!" It is 3.5 now. End. '}, 1)
    assert filled(canvas) == f"{'A' * first} It is 3.5 now.{'A' * last} "


def test_a_lone_surrogate_fails_its_row():
    for mask, columns, values in (
        ({"kind": "random"}, {}, {"text": "a\ud800"}),
        ({"kind": "sentences"}, {"sentences": "s"}, {"s": ["a.", "\ud800", "c."]}),
    ):
        assert error_of(maker(mask, columns=columns), values).kind == "bad_encoding"


def test_given_tokens_need_no_tokenizer():
    task = Infill.model_validate({"kind": "infill", "mask": {"kind": "given"}})
    make = maker_for(recipe_of(task, {"tokens": "ids"}), None, model_info())
    canvas = make.make({"ids": [5, None, None, 7, None]}, 1)
    assert canvas.tokens.tolist() == [5, HOLE, HOLE, 7, HOLE] and canvas.holes == ((1, 3), (4, 5))
    text, fills = finish_row(canvas, np.asarray([1, 2, 3], dtype=np.int32), None)
    assert text is None and fills[0] == {"start": 1, "end": 3, "text": None}


def test_a_mask_may_hide_given_tokens():
    canvas = maker({"kind": "random", "rate": 0.5}, columns={"tokens": "ids"}).make({"ids": [9] * 8}, 1)
    assert canvas.num_masked == 4 and set(canvas.tokens.tolist()) == {9, HOLE}


def test_half_a_character_at_a_hole_does_not_raise():
    ids = np.asarray(byte_level().encode("é🙂"), dtype=np.int32)
    canvas = Canvas(np.where(np.arange(len(ids)) == 1, HOLE, ids).astype(np.int32), ((1, 2),))
    text, fills = finish_row(canvas, ids[1:2], byte_level())
    assert text == "é🙂" and fills[0]["text"] == "\ufffd"


def test_a_mask_of_tokens_may_cut_a_character_and_a_mask_of_text_never_does():
    text = "a🙂b\nc🙂d"
    broken = 0
    for key in range(40):
        cut = maker({"kind": "spans", "count": 1, "length": 2}, tokenizer=byte_level()).make({"text": text}, key)
        ids = np.asarray(byte_level().encode(text), dtype=np.int32)
        shown = cut.tokens != HOLE
        assert (cut.tokens[shown] == ids[shown]).all(), "visible tokens stay what they were"
        broken += "\ufffd" in (finish_row(cut, np.full(2, ids[0], np.int32), byte_level())[0] or "")
        whole = maker({"kind": "lines", "count": 1}, tokenizer=byte_level()).make({"text": text}, key)
        filled_in = filled(whole, ids[0]) or ""
        assert "\ufffd" not in filled_in and "🙂" in filled_in
    assert broken, "what docs/specs.md says of masks of tokens"


def test_words_that_do_not_join_are_hidden_by_their_tokens():
    words = word_pieces()
    assert not words.joins and byte_level().joins
    make = maker({"kind": "spans"}, columns={"spans": "s"}, tokenizer=words)
    canvas = make.make({"text": "the cat sat on a mat", "s": [[4, 11]]}, 1)
    kept = words.encode("the cat sat on a mat")
    assert canvas.tokens.tolist() == [kept[0], HOLE, HOLE, *kept[3:]]


@pytest.mark.parametrize(
    ("kind", "mask", "columns", "values"),
    [
        ("missing_column", {"kind": "random"}, {}, {"txt": "a"}),
        ("missing_column", {"kind": "random"}, {"text": "body"}, {"text": "a", "body": None}),
        ("missing_column", {"kind": "given"}, {"tokens": "ids"}, {"text": "a"}),
        ("missing_column", {"kind": "sentences"}, {"sentences": "s"}, {"text": "a"}),
        ("missing_column", {"kind": "spans"}, {"spans": "s"}, {"text": "a"}),
        ("bad_row", {"kind": "random"}, {}, {"text": 5}),
        ("bad_row", {"kind": "sentences"}, {"sentences": "s"}, {"s": "One. Two."}),
        ("marker_absent", {"kind": "marker"}, {}, {"text": "no hole"}),
        ("marker_absent", {"kind": "marker"}, {}, {"text": ""}),
        ("bad_mask", {"kind": "marker"}, {}, {"text": "<mask:0>"}),
        ("bad_mask", {"kind": "marker"}, {}, {"text": "<mask:99999999999>"}),
        ("bad_mask", {"kind": "spans"}, {"spans": "s"}, {"text": "abc", "s": [[1, 9]]}),
        ("bad_mask", {"kind": "spans"}, {"spans": "s"}, {"text": "abc", "s": [[2, 2]]}),
        ("bad_mask", {"kind": "spans"}, {"spans": "s"}, {"text": "abc", "s": [["a", 2]]}),
        ("bad_mask", {"kind": "spans"}, {"spans": "s"}, {"text": "abc", "s": "0-2"}),
        ("bad_mask", {"kind": "sentences"}, {}, {"text": "Only. Two."}),
        ("bad_mask", {"kind": "sentences", "which": [4]}, {}, {"text": "Only. Two."}),
        ("bad_mask", {"kind": "sentences", "which": "random"}, {}, {"text": " "}),
        ("too_long", {"kind": "random"}, {}, {"text": "7" * 65}),
        ("too_long", {"kind": "marker"}, {}, {"text": "<mask:900000000>"}),
        ("too_long", {"kind": "given"}, {"tokens": "ids"}, {"ids": [None] * 65}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": [300]}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": [-1]}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": [2**80]}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": [1.0]}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": [True]}),
        ("bad_tokens", {"kind": "given"}, {"tokens": "ids"}, {"ids": "1 2"}),
        ("bad_tokens", {"kind": "random"}, {"tokens": "ids"}, {"ids": [1, None]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_that_does_not_fit_is_an_error_with_its_class(kind, mask, columns, values):
    make = maker(mask, columns=columns)
    error = error_of(make, values)
    assert error.kind == kind and error.message
    assert planned_error_of(make, values).kind == kind


def test_an_empty_text_is_an_empty_canvas():
    for mask in (
        {"kind": "random"},
        {"kind": "spans"},
        {"kind": "span_fraction"},
        {"kind": "lines"},
        {"kind": "sentences"},
    ):
        canvas = maker(mask).make({"text": ""}, 1)
        assert len(canvas.tokens) == 0 and canvas.holes == ()


def test_special_tokens_in_the_text_are_text():
    text = "a <mask> </s> b"
    ids = byte_level().encode(text)
    assert min(ids) > 6 and byte_level().decode(ids) == text
    assert byte_level().encode("") == []


def test_runs_are_maximal():
    assert list(runs(np.asarray([1, 1, 0, 1, 0, 0, 1], dtype=bool))) == [(0, 2), (3, 4), (6, 7)]
    assert list(runs(np.zeros(0, dtype=bool))) == []


CODE = "def f(x):\n    y = x\n    return y\n"


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
    text = "One two. Three four! Five?" if mask["kind"] == "sentences" else CODE
    for key in (1, 2):
        canvas, holes = score.make({"text": text}, key), infill.make({"text": text}, key)
        check(canvas, holes, text, byte_level())
        assert score.size({"text": text}, key) == canvas.size


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
