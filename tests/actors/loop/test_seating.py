"""The order in which a unit's samples get slots: longest first, and those that begin alike after one another."""

import numpy as np

from draftmill.actors.loop.runner import in_order
from draftmill.actors.planning.beginnings import LEAST
from draftmill.actors.rows.samples import Sample


def samples_of(*canvases):
    return [Sample(index, canvas=np.array(canvas, dtype=np.int32)) for index, canvas in enumerate(canvases)]


def order(*canvases):
    return [sample.index for sample in in_order(samples_of(*canvases))]


def words(count, seed):
    return np.random.default_rng(seed).integers(0, 999, count).tolist()


def test_texts_that_differ_come_longest_first_and_equally_long_ones_in_their_order():
    assert order(*[words(length, seed) for seed, length in enumerate((20, 50, 30, 50, 9))]) == [1, 3, 2, 0, 4]
    assert order() == [] and order([1, 2]) == [0]


def test_texts_that_begin_alike_follow_each_other_wherever_they_stood():
    one, two = words(40, 1), words(40, 2)
    texts = [[*one, *words(5, 3)], [*two, *words(8, 4)], [*one, *words(9, 5)], words(43, 6), [*two, *words(2, 7)]]
    # The groups by their longest ones, 49, 48 and 43 tokens; in a group the longest first.
    assert order(*texts) == [2, 0, 1, 4, 3]


def test_inside_of_a_group_those_come_together_that_have_more_in_common():
    shots, questions = words(100, 1), [words(30, seed) for seed in (2, 3, 4)]
    # The ends of a question differ in length, so that by length alone they would be far apart.
    texts = [[*shots, *question, *words(end, 50 + end)] for end in (2, 6, 4) for question in questions]
    found = order(*texts)
    assert found == [3, 6, 0, 4, 7, 1, 5, 8, 2]


def test_a_few_common_words_or_less_than_half_of_a_text_are_no_beginning():
    few, shared = words(LEAST - 1, 1), words(LEAST, 2)
    texts = [[*few, *words(5, 3)], [*words(30, 4)], [*few, *words(9, 5)]]
    assert order(*texts) == [1, 2, 0]
    texts = [[*shared, *words(LEAST + 9, 3)], words(38, 4), [*shared, *words(LEAST + 1, 5)]]
    assert order(*texts) == [0, 1, 2]


def test_holes_and_equal_canvases_are_in_order_too():
    prompt = words(30, 1)
    assert order([*prompt, -1, -1], words(31, 2), [*prompt, -1, -1], [*prompt, -1, -1, -1]) == [3, 0, 2, 1]


def test_long_completions_of_prompts_that_begin_alike_are_a_group():
    """What they have in common is half of each prompt, and a small part of each canvas."""
    shots, room = words(40, 1), [-1] * 200
    texts = [[*shots, *words(9, seed), *room] for seed in (2, 3)]
    assert order(texts[0], [*words(45, 4), *room], texts[1]) == [0, 2, 1]


def test_beginnings_in_beginnings_without_end_are_no_trouble():
    text = [7] * (LEAST * 600)
    found = order(*[text[: LEAST * (1 + number)] for number in range(600)])
    assert sorted(found) == list(range(600))
