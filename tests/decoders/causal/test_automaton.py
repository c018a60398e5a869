"""The suffix automaton: it knows every piece of its texts and no other, in linear time, and counts what follows."""

import numpy as np
import pytest

from draftmill.decoders.causal.suffix_index import NOWHERE, ROOT, Automaton


class Counted(Automaton):
    """Counts the steps that its work takes."""

    __slots__ = ("steps",)

    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self, state, token):
        self.steps += 1
        return super().step(state, token)


def grown(texts, automaton=None):
    """An automaton of some texts, which grow in turns as texts of a batch do, and the last state of each."""
    automaton = automaton or Automaton()
    lasts = [ROOT] * len(texts)
    for place in range(max(map(len, texts))):
        for number, text in enumerate(texts):
            if place < len(text):
                lasts[number] = automaton.extend(lasts[number], text[place])
    return automaton, lasts


def state_of(automaton, context):
    state = ROOT
    for token in context:
        state = automaton.step(state, token)
        if state == NOWHERE:
            return NOWHERE
    return state


def followers(automaton, state):
    """How often each token was followed, of those that follow a state."""
    others = automaton._others[state] or {}
    own = {} if automaton.best[state] == NOWHERE else {automaton.best[state]: automaton.count[state]}
    return own | {token: packed >> 32 for token, packed in others.items()}


def random_texts(rng, vocab_size):
    return [rng.integers(0, vocab_size, int(rng.integers(1, 14))).tolist() for _ in range(int(rng.integers(1, 6)))]


@pytest.mark.parametrize("vocab_size", [1, 2, 4])
def test_every_piece_of_a_text_is_known_and_nothing_else(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for _ in range(150):
        texts = random_texts(rng, vocab_size)
        automaton, lasts = grown(texts)
        pieces = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
        for piece in pieces:
            state = state_of(automaton, piece)
            assert state != NOWHERE
            following = {text[j] for text in texts for j in range(len(piece), len(text)) if ends(text[:j], piece)}
            assert set(followers(automaton, state)) == following
        for piece in list(pieces):
            for token in range(vocab_size):
                assert (state_of(automaton, [*piece, token]) != NOWHERE) == ((*piece, token) in pieces)
        for text, last in zip(texts, lasts, strict=True):
            assert (state_of(automaton, text), automaton.length[last]) == (last, len(text))


def ends(text, piece):
    return tuple(text[len(text) - len(piece) :]) == tuple(piece)


def test_a_link_leads_to_the_longest_end_that_also_stood_elsewhere():
    rng = np.random.default_rng(7)
    for _ in range(150):
        texts = random_texts(rng, 2)
        automaton, lasts = grown(texts)
        places = [(text, j) for text in texts for j in range(1, len(text) + 1)]
        for text, last in zip(texts, lasts, strict=True):
            occurrences = [sum(ends(own[:j], text[start:]) for own, j in places) for start in range(len(text))]
            whole = occurrences[0]
            longest = next((len(text) - start for start, count in enumerate(occurrences) if count > whole), 0)
            assert automaton.length[automaton.link[last]] == longest


def test_counts_are_sums_and_the_best_is_the_most_frequent_one():
    rng = np.random.default_rng(8)
    for _ in range(100):
        automaton, _ = grown(random_texts(rng, 3))
        for state in range(len(automaton.length)):
            counts = followers(automaton, state)
            assert automaton.total[state] == sum(counts.values())
            assert automaton.count[state] == max(counts.values(), default=0)


def test_a_token_counts_in_the_longest_context_that_knew_it_and_not_in_shorter_ones():
    automaton, _ = grown([[0, 1]])
    for text in ([0, 1], [0, 2], [0, 1]):
        last = ROOT
        for token in text:
            last = automaton.extend(last, token)
    assert followers(automaton, state_of(automaton, [0])) == {1: 3, 2: 1}
    # 1 and 2 were new to the empty context once, with the first texts that had them; 0 came to it with each text.
    assert followers(automaton, ROOT) == {0: 4, 1: 1, 2: 1}


def test_of_equally_frequent_tokens_the_last_one_is_the_best():
    automaton, _ = grown([[0, 1]])
    assert automaton.best[state_of(automaton, [0])] == 1
    automaton.extend(automaton.extend(ROOT, 0), 2)
    assert automaton.best[state_of(automaton, [0])] == 2
    automaton.extend(automaton.extend(ROOT, 0), 1)
    assert automaton.best[state_of(automaton, [0])] == 1


@pytest.mark.parametrize("kind", ["equal tokens", "random", "a period", "the same text again"])
def test_the_work_and_the_memory_of_a_token_do_not_grow_with_the_texts(kind):
    rng, count = np.random.default_rng(0), 3000
    text = {
        "equal tokens": [0] * count,
        "random": rng.integers(0, 50, count).tolist(),
        "a period": ([*range(17)] * count)[:count],
        "the same text again": rng.integers(0, 50, count // 3).tolist(),
    }[kind]
    texts = [text] * (3 if kind == "the same text again" else 1)
    automaton, _ = grown(texts, Counted())
    total = sum(map(len, texts))
    assert automaton.steps < 8 * total and len(automaton.length) <= 2 * total
    # What is known already takes no memory.
    assert automaton.size == len(text)
