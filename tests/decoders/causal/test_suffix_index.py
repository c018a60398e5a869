"""The index of a worker's texts: what is drafted, how much, and what is forgotten."""

import numpy as np
import pytest

from draftmill.decoders.causal.settings import SuffixDrafterSettings
from draftmill.decoders.causal.suffix_index import Reader, SuffixIndex


def index_of(*texts, **settings):
    index = SuffixIndex(SuffixDrafterSettings.model_validate({"kind": "suffix"} | settings, strict=True))
    for text in texts:
        Reader(index).read(text)
    return index


def drafted(index, text, most=9):
    reader = Reader(index)
    reader.read(text)
    return reader.drafts(most)


def longest_match(texts, text):
    """The length of the longest end of a text that something has followed in any of the texts, and what has."""
    for length in range(len(text), 0, -1):
        end = text[len(text) - length :]
        found = {own[j] for own in texts for j in range(length, len(own)) if own[j - length : j] == end}
        if found:
            return length, found
    return 0, set()


def test_the_first_draft_followed_the_longest_match_in_any_text():
    rng, drafts = np.random.default_rng(0), 0
    for _ in range(300):
        texts = [rng.integers(0, 3, int(rng.integers(1, 12))).tolist() for _ in range(int(rng.integers(1, 5)))]
        *others, text = texts
        found = drafted(index_of(*others, min_token_prob=0.0), text)
        # The text itself is among those in which its end may have stood before.
        length, follow = longest_match(texts, text)
        assert len(found) <= length and bool(found) == bool(length)
        assert not found or found[0] in follow
        drafts += len(found)
    assert drafts > 300


def test_another_text_drafts_and_so_does_the_text_itself():
    index = index_of([1, 2, 3, 4, 5, 6, 7])
    assert drafted(index, [9, 2, 3, 4]) == [5, 6, 7]
    assert drafted(index, [10, 11, 12, 10, 11], most=2) == [12, 10]
    assert drafted(index_of(), [10, 11, 12]) == []


def test_a_repetition_goes_on_behind_the_end_of_what_was_copied():
    assert drafted(index_of(), [5, 6, 7, 5, 6, 7], most=3) == [5, 6, 7]
    assert drafted(index_of(max_spec_factor=4.0), [5, 6, 7, 5, 6, 7], most=8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_drafts_are_as_long_as_a_multiple_of_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for factor, expected in ((0.5, [4]), (1.0, [4, 5, 6]), (1.5, [4, 5, 6, 7])):
        assert drafted(index_of(text, max_spec_factor=factor), [9, 1, 2, 3]) == expected
    assert drafted(index_of(text, max_spec_factor=0.25), [9, 1, 2, 3]) == []
    assert drafted(index_of(text, max_spec_factor=64.0), [9, 1, 2, 3], most=2) == [4, 5]


def test_drafts_end_where_they_are_too_unlikely_to_hold_together():
    def prefixed(*ends):
        return [[30 + number, 1, 2, 3, *end] for number, end in enumerate(ends)]

    # Behind 1 2 3 came 4 in two of three texts, and behind 4 came 5 in one of two: together one third.
    texts = prefixed([4, 5], [4, 6], [7])
    for least, expected in ((0.7, []), (0.6, [4]), (0.34, [4])):
        assert drafted(index_of(*texts, min_token_prob=least), [9, 1, 2, 3]) == expected
    assert len(drafted(index_of(*texts, min_token_prob=0.33), [9, 1, 2, 3])) >= 2


def test_the_index_is_bounded_and_forgets_the_oldest_texts_first():
    rng, most = np.random.default_rng(1), 1 << 10
    index = index_of(max_tokens=most)
    texts = [rng.integers(0, 1 << 16, 50).tolist() for _ in range(100)]
    for text in texts:
        Reader(index).read(text)
        assert index.young.size + index.old.size <= most
    held = [number for number, text in enumerate(texts) if is_held(index, text)]
    # All of the last ones but one that two automata share, and at least half of what is allowed.
    assert held[-1] == 99 and held[-1] - held[0] <= len(held)
    assert most // 2 <= 50 * (len(held) + 1) <= most + 50


def is_held(index, text):
    """Whether the index knows the first half of a text, and what came then; asked without reading it."""
    for automaton in (index.young, index.old):
        state = 0
        for token in text[:25]:
            state = automaton.step(state, token)
            if state < 0:
                break
        else:
            return automaton.best[state] == text[25]
    return False


def test_a_text_at_work_goes_on_drafting_when_what_is_young_becomes_old():
    rng = np.random.default_rng(2)
    index, phrase = index_of(max_tokens=1 << 10), [1, 2, 3, 4, 5, 6, 7, 8]
    reader, others = Reader(index), Reader(index)
    reader.read([*phrase, 99, *phrase[:4]])
    others.read(rng.integers(1000, 1 << 16, 512).tolist())
    assert index.era == 1
    assert reader.drafts(4) == [5, 6, 7, 8]
    reader.read([5, 6])
    assert reader.drafts(2) == [7, 8]
    # Two eras later its first words are forgotten; it reads on, and its new words are found.
    others.read(rng.integers(1000, 1 << 16, 1100).tolist())
    assert index.era == 3 and reader.drafts(2) == []
    reader.read([*phrase, 99, *phrase[:4]])
    assert reader.drafts(4) == [5, 6, 7, 8]


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_an_empty_match_drafts_nothing(least):
    index = index_of([1, 2, 3], min_token_prob=least)
    assert drafted(index, [7]) == []
    assert Reader(index).drafts(3) == []
