"""Texts that begin alike come after one another: hashes of their tokens, groups, and groups within groups."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.actors.planning.beginnings import LEAST, LEVELS, STRIDE, beginnings, group_by_beginning, group_texts
from draftmill.actors.rows.makers import shares_beginnings
from draftmill.actors.task import Complete, Infill, Random, Score
from draftmill.decoders.base import ModelInfo

Ids = np.ndarray[Any, np.dtype[np.int32]]


def ids(*given: int) -> Ids:
    return np.array(given, dtype=np.int32)


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, count).tolist()


def order_of(texts: list[list[int]], *, large: int = 1000) -> tuple[list[int], list[int]]:
    """Order and depth, by the hashes; without groups, the longest first."""
    rank = np.empty(len(texts), dtype=np.int64)
    rank[np.argsort([-len(text) for text in texts], kind="stable")] = np.arange(len(texts))
    column = pa.chunked_array([beginnings([ids(*text) for text in texts])])
    found = group_by_beginning(column, rank, large=large)
    return found.order.tolist(), found.depth.tolist()


def test_every_whole_stride_of_tokens_has_a_hash_wherever_the_row_stands():
    text = words(3 * STRIDE + 5, 1)
    alone = beginnings([ids(*text)])
    among = beginnings([ids(*words(50, 2)), None, ids(), ids(*text), ids(*text[: 2 * STRIDE])])
    noted = [value.as_py() for value in among]
    assert noted[3] == alone[0].as_py() and len(noted[3]) == 3 * 4
    assert noted[1:3] == [b"", b""] and noted[4] == noted[3][:8]
    other = beginnings([ids(*text[:STRIDE], *words(STRIDE, 3))])[0].as_py()
    assert other[:4] == noted[3][:4] and other[4:] != noted[3][4:8]
    assert beginnings([]).to_pylist() == []


def test_the_hashes_are_the_same_on_every_machine():
    tokens, factor = words(2 * STRIDE, 4), 0x9E3779B97F4A7C15
    blocks = [tokens[:STRIDE], tokens[STRIDE:]]
    sums = [sum(token * factor**power for power, token in enumerate(block, 1)) % 2**64 for block in blocks]
    expected = b"".join((number >> 32).to_bytes(4, "little") for number in sums)
    assert beginnings([ids(*tokens)])[0].as_py() == expected


def test_a_table_s_column_may_be_cut_anywhere():
    texts = [words(20, seed) for seed in (1, 2, 1, 3, 2, 1)]
    column = beginnings([ids(*text) for text in texts])
    rank = np.arange(3)
    parts = [column.slice(1, 2), column.slice(5, 1)]  # texts 2, 1, 1
    assert group_by_beginning(pa.chunked_array(parts), rank, large=9).order.tolist() == [0, 1, 2]
    assert group_by_beginning(pa.chunked_array([column.slice(0, 3)]), rank, large=9).order.tolist() == [0, 2, 1]


def plain(texts: list[tuple[int, ...]], rank: list[int], least: int, large: int) -> list[int]:
    """The same by recursion over lists."""

    def common(one: int, other: int) -> int:
        pairs = zip(texts[one], texts[other], strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(texts[one]), len(texts[other])))

    def items(members: list[int], known: int, tried: int, levels: int) -> list[list[int]]:
        if not levels:
            return [[member] for member in members]
        sets = [members[:1]]
        for before, member in pairwise(members):
            if common(before, member) >= known + least and common(before, member) > tried:
                sets[-1].append(member)
            else:
                sets.append([member])
        found: list[list[int]] = []
        for one in sets:
            shared = common(one[0], one[-1])
            whole = sum(len(texts[member]) - known for member in one)
            if len(one) == 1:
                found.append(one)
            elif len(one) >= large or 2 * (shared - known) * len(one) >= whole:
                found.append(joined(items(one, shared, shared, levels - 1)))
            else:
                found += items(one, known, shared, levels - 1)
        return found

    def joined(found: list[list[int]]) -> list[int]:
        ordered = sorted(found, key=lambda item: min(rank[member] for member in item))
        return [member for item in ordered for member in item]

    by_text = sorted(range(len(texts)), key=lambda number: texts[number])
    return joined(items(by_text, 0, 0, LEVELS)) if texts else []


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), max_size=9).map(tuple), max_size=14),
    least=st.integers(1, 3),
    large=st.integers(2, 15),
)
def test_the_order_is_that_of_a_plain_recursion(texts, least, large):
    by_text = sorted(range(len(texts)), key=lambda number: texts[number])
    pairs = [(texts[one], texts[other]) for one, other in pairwise(by_text)]
    common = [
        next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair))) for pair in pairs
    ]
    longest = sorted(range(len(texts)), key=lambda number: (-len(texts[number]), number))
    rank = [longest.index(number) for number in range(len(texts))]
    length = [len(text) for text in texts]
    given = [np.array(numbers, dtype=np.int64) for numbers in (by_text, common, length, rank)]
    found = group_texts(*given, least=least, large=large)
    assert found.order.tolist() == plain(texts, rank, least, large)
    assert len(found.depth) == len(texts) and found.depth[:1].tolist() in ([], [0])


def test_rows_without_a_beginning_keep_their_places():
    column = pa.chunked_array([beginnings([None] * 5)])
    rank = np.array([3, 0, 4, 1, 2])
    found = group_by_beginning(column, rank, large=2)
    assert found.order.tolist() == [1, 3, 4, 0, 2] and found.depth.tolist() == [0] * 5


def test_the_ends_of_a_question_stand_together_inside_of_a_task():
    tasks = [words(160, seed) for seed in (1, 2)]
    questions = [[*tasks[number % 2], *words(32 + number, 10 + number)] for number in range(4)]
    # The first ends of all questions, then the second ones; the third question's first end is by far the longest.
    ends = {(2, 0): 40}
    texts = [
        [*questions[q], *words(ends.get((q, end), 3 + end), 100 + 10 * q + end)] for end in (0, 1) for q in range(4)
    ]
    order, depth = order_of(texts)
    assert order == [2, 6, 4, 0, 7, 3, 5, 1]
    assert depth == [0, 2, 1, 2, 0, 2, 1, 2]


def test_what_is_little_of_long_texts_makes_no_group_unless_it_is_large():
    system = words(LEAST, 1)
    texts = [[*system, *words(length, length)] for length in (90, 200, 100, 210)]
    others = [words(length, length) for length in (205, 95)]
    assert order_of(texts + others)[0] == [3, 1, 4, 2, 0, 5]
    # Four that fill a unit by themselves: one group, and in it the longest first.
    assert order_of(texts + others, large=4)[0] == [3, 1, 2, 0, 4, 5]


def test_what_is_alike_in_a_set_that_is_no_group_is_still_a_group():
    header = words(LEAST, 1)
    question = [*header, *words(80, 2)]
    texts = [[*header, *words(300, 3)], [*question, *words(90, 4)], [*header, *words(150, 5)], [*question, 7]]
    assert order_of(texts)[0] == [0, 1, 3, 2]


@pytest.mark.parametrize(
    ("kind", "completes", "scores"),
    [("causal", True, True), ("blocks", True, False), ("masked", False, False), ("any_subset", False, False)],
)
def test_only_jobs_whose_decoder_takes_beginnings_over_note_them(kind, completes, scores):
    info = ModelInfo("some", 300, 6, 64, kind, 1000)
    mask = Random(kind="random", rate=0.5)
    assert shares_beginnings(Complete(kind="complete", max_new_tokens=8), info) is completes
    assert shares_beginnings(Score(kind="score"), info) is scores
    assert not shares_beginnings(Infill(kind="infill", mask=mask), info)
    assert not shares_beginnings(Score(kind="score", mask=mask), info)
