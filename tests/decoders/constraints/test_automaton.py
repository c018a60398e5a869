"""Automata over tokens, compared with Python's `re` on every short text."""

import itertools
import re

import numpy as np
import pytest

from draftmill.decoders.constraints.automaton import FAR, Vocabulary, automaton_of
from tests.decoders.support import accepts

TOKENS = [b"a", b"b", b"ab", None, b"1", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"ba1"]
EXPRESSIONS = ["(ab|ba)*1?", "a+b", "[^a]+", "a{2,3}", "(a|b1)?", "é*(ab)?", ".", "(ab|ba1)+"]


def matches(expression, tokens):
    if any(TOKENS[token] is None for token in tokens):
        return False
    try:
        text = b"".join(TOKENS[token] for token in tokens).decode()
    except UnicodeDecodeError:
        return False
    return re.fullmatch(expression, text) is not None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_automaton_matches_what_the_expression_matches(expression):
    automaton, num_matches = automaton_of(expression, Vocabulary(TOKENS)), 0
    for count in range(4):
        for tokens in itertools.product(range(len(TOKENS)), repeat=count):
            assert accepts(automaton, tokens) == matches(expression, tokens)
            num_matches += matches(expression, tokens)
    assert num_matches


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_token_is_allowed_if_a_text_of_the_tokens_left_begins_so(expression):
    automaton, most = automaton_of(expression, Vocabulary(TOKENS)), 3
    texts = {
        count: [t for t in itertools.product(range(len(TOKENS)), repeat=count) if matches(expression, t)]
        for count in range(most + 1)
    }
    for first in range(-1, len(TOKENS)):
        begun = () if first < 0 else (first,)
        state = automaton.step(0, first) if begun else 0
        for left in range(1, most + 1 - len(begun)):
            for exactly in (True, False):
                lengths = [left] if exactly else range(1, left + 1)
                wanted = {
                    text[len(begun)]
                    for length in lengths
                    for text in texts[len(begun) + length]
                    if text[: len(begun)] == begun
                }
                found = (
                    set[int]() if state < 0 else set(np.flatnonzero(automaton.allowed(state, left, exactly=exactly)))
                )
                assert found == wanted


def test_the_fewest_tokens_to_an_end_are_counted_in_tokens():
    assert automaton_of("abba1", Vocabulary(TOKENS)).least_S[0] == 2
    assert automaton_of("abba1", Vocabulary([b"a", b"b", b"1"])).least_S[0] == 5


def test_an_expression_that_no_text_of_the_vocabulary_matches_is_refused():
    with pytest.raises(ValueError, match="no text of this vocabulary matches"):
        automaton_of("x", Vocabulary(TOKENS))
    with pytest.raises(ValueError, match="can be compiled"):
        automaton_of("(a", Vocabulary(TOKENS))


def test_every_state_with_an_edge_reaches_an_end():
    automaton = automaton_of("a(b|1{5})|b", Vocabulary(TOKENS))
    assert (automaton.least_S[automaton.next_E] < FAR).all()
