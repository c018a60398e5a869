"""Speculative decoding of causal models: the sequential text whatever drafts, and every count by hand or by the reference."""

from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import ModelDrafterSettings, NgramDrafterSettings, SuffixDrafterSettings
from draftmill.decoders.causal.speculative import Lookup
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from tests.decoders.references import causal as causal_reference
from tests.decoders.references.causal import PlainCausal, by_lookup, by_model
from tests.decoders.references.choosers import rule_of
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode, decoder_settings, engine, run_all, texts, token_info, toy_prompts

VOCAB, LENGTH = 3, 7
INFO = token_info(VOCAB)
AR = decoder_settings("autoregressive")
MODEL = ModelDrafterSettings(kind="model", path="drafter")
NGRAM = NgramDrafterSettings(kind="ngram", max_n=2, min_n=1)
SUFFIX = SuffixDrafterSettings(kind="suffix", max_spec_factor=4.0, min_token_prob=0.0)
DRAFTERS: dict[str, Any] = {"model": MODEL, "ngram": NGRAM}
ALL: dict[str, Any] = DRAFTERS | {"suffix": SUFFIX}
WARPS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {},
    {"top_p": 0.7},
    {"temperature": 0.8, "top_p": 0.8},
    {"top_k": 2},
]


@cache
def made(seed, share):
    """A table, or the logits of one with those of another mixed in: a drafter that is right more often than chance."""
    backbone = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=seed)
    if share < 1:
        backbone.table_PXV = share * backbone.table_PXV + (1 - share) * made(seed + 100, 1.0).table_PXV
    return backbone


def table(seed=1):
    # Nothing was allocated in what is copied, so that only the table itself is shared.
    return copy(made(seed, 1.0))


def blend(seed=1):
    return copy(made(seed, 0.3))


def spec(k, drafter):
    return decoder_settings("speculative", k=k, drafter=drafter)


def speculate(requests, *, k=3, drafter=MODEL, sampling=Sampling(), target=None, model=None, **more):  # noqa: B008
    target = target or table()
    return decode(target, INFO, spec(k, drafter), sampling, requests, drafter=model or blend(), **more)


def prompt(*tokens, holes):
    return np.array([*tokens, *[-1] * holes], dtype=np.int32)


def requests_of(*canvases):
    return [Request(i, sample_key(0, str(i)), canvas) for i, canvas in enumerate(canvases)]


def as_sequential(found, expected):
    assert texts(found) == texts(expected)
    for index, outcome in found.items():
        assert outcome.logprob == pytest.approx(expected[index].logprob, abs=1e-9)
        assert outcome.nfe <= expected[index].nfe and outcome.finish == expected[index].finish


@pytest.mark.one_in(19, soak=2)
@pytest.mark.parametrize("drafter", ALL)
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_coupled_text_is_the_autoregressive_text(drafter, warp):
    requests, sampling = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=2), Sampling(**warp)
    expected = decode(table(), INFO, AR, sampling, requests, rows=5)
    for number, (k, rows) in enumerate([(0, 3), (1, 1), (2, 16), (3, 3), (5, 1), (8, 3), (8, 16), ("auto", 3)]):
        shuffled = [requests[i] for i in np.random.default_rng(number).permutation(len(requests))]
        found = speculate(shuffled, k=k, drafter=ALL[drafter], sampling=sampling, rows=rows)
        as_sequential(found, expected)


def by_reference(request, k, drafter, sampling, stop=lambda generated: False):
    length = len(request.canvas)
    model = PlainCausal(table(), length=length, sampling=sampling)
    rule, tokens = rule_of(request.key, sampling), request.canvas[request.canvas >= 0].tolist()
    draft, more = by_model(PlainCausal(blend(), length=length, sampling=sampling)), {}
    if drafter == "ngram":
        draft, more = by_lookup(VOCAB, max_n=NGRAM.max_n, min_n=NGRAM.min_n), {"calls": lambda drafts: 1}
    return causal_reference.speculative(model, tokens, rule, k=k, draft=draft, stop=stop, **more)


def same_as_reference(outcome, trail, request):
    assert outcome.tokens.tolist() == trail.tokens[int((request.canvas >= 0).sum()) :]
    assert (outcome.nfe, outcome.nfe_draft) == (trail.nfe, trail.lookups)
    assert (outcome.proposed, outcome.accepted) == (trail.proposed, trail.accepted)
    assert outcome.iterations == len(trail.committed)
    assert outcome.accept_hist == np.bincount(trail.committed).tolist()


def check_runs(outcomes, requests, plain):
    """Tokens and counts are those of the reference's run, `plain(request)`; some drafts are accepted and some refused."""
    for request in requests:
        same_as_reference(outcomes[request.index], plain(request), request)
    assert sum(o.accepted for o in outcomes.values()) >= 4
    assert sum(o.proposed - o.accepted for o in outcomes.values()) >= 4


def cut_places(outcomes, requests, plain):
    """How many tokens the last steps of the samples committed that the stop id 2 ends, as in the reference's runs."""
    places = set()
    for request in requests:
        outcome, trail = outcomes[request.index], plain(request, stop=lambda generated: generated[-1] == 2)
        same_as_reference(outcome, trail, request)
        assert outcome.finish == ("eos" if outcome.tokens[-1] == 2 else "length")
        if outcome.finish == "eos":
            places.add(trail.committed[-1])
    return places


@pytest.mark.one_in(7)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_batched_decoder_gives_the_reference_tokens_and_counts(drafter, acceptance, k):
    sampling = Sampling(acceptance=acceptance, temperature=0.9)
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=3)
    outcomes = speculate(requests, k=k, drafter=DRAFTERS[drafter], sampling=sampling, rows=7)
    check_runs(outcomes, requests, partial(by_reference, k=k, drafter=drafter, sampling=sampling))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_stop_id_cuts_an_accepted_run_where_it_stands(drafter, acceptance):
    sampling = Sampling(acceptance=acceptance)
    requests = toy_prompts(80, vocab_size=VOCAB, longest=LENGTH, seed=4)
    outcomes = speculate(requests, k=4, drafter=DRAFTERS[drafter], sampling=sampling, stops=Stops(ids=(2,)))
    places = cut_places(outcomes, requests, partial(by_reference, k=4, drafter=drafter, sampling=sampling))
    assert places >= ({1, 2, 3} if drafter == "model" else {1, 2})


class After:
    """Stops at the n-th generated token, as a stop string that ends there would."""

    def __init__(self, place):
        self.place = place

    def find(self, tokens, num_checked):
        return self.place if len(tokens) >= self.place > num_checked else None


@pytest.mark.parametrize("place", range(1, 7))
def test_a_stop_string_may_end_at_every_place_of_an_accepted_run(place):
    request = requests_of(prompt(1, holes=6))
    sure = {"target": table(), "model": table()}
    whole = speculate(request, k=8, **sure)[0]
    assert (whole.nfe, whole.accepted, whole.finish) == (1, 5, "length")
    cut = speculate(request, k=8, stops=Stops(text=After(place)), **sure)[0]
    assert cut.tokens.tolist() == whole.tokens.tolist()[:place]
    assert (cut.finish, cut.nfe, cut.iterations) == ("stop", 1, 1)
    # Five drafts and a bonus: the drafts after the stop were never there.
    assert (cut.proposed, cut.accepted) == (min(place, 5), min(place, 5))
    assert cut.accept_hist == [0] * place + [1]
    model = PlainCausal(table(), length=LENGTH, sampling=Sampling())
    assert cut.logprob == pytest.approx(model.logprob([1], cut.tokens.tolist()), abs=1e-12)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_drafter_equal_to_the_target_accepts_everything(acceptance):
    """Six new tokens, k = 2: two drafts and a bonus twice. The second drafting starts with a catch-up of two tokens."""

    class Watched(TokenTable):
        def forward(self, rows):
            widths.append(rows.owner_N.bincount().tolist())
            return super().forward(rows)

    widths: list[list[int]] = []
    twin = Watched(vocab_size=VOCAB, num_positions=LENGTH, seed=1)
    requests = requests_of(*[prompt(token % VOCAB, holes=6) for token in range(6)])
    sampling = Sampling(acceptance=acceptance)
    outcomes = speculate(requests, k=2, sampling=sampling, model=twin, rows=6)
    for outcome in outcomes.values():
        assert (outcome.nfe, outcome.nfe_draft, outcome.iterations) == (2, 4, 2)
        assert (outcome.proposed, outcome.accepted) == (4, 4)
        assert outcome.accept_hist == [0, 0, 0, 2]
    # Drafter: the prompt's one token; its first draft; its own last draft and the bonus; its third draft.
    assert widths == [[1] * 6, [1] * 6, [2] * 6, [1] * 6]


def test_a_scripted_case_by_hand():
    """The target always says 0, 1, 2, 0, ..; the drafter says so too, except at position 3."""
    target, drafter = scripted(), scripted(wrong_at=3)
    request = requests_of(prompt(0, holes=6))
    outcome = decode(target, INFO, spec(3, MODEL), Sampling(temperature=0.0), request, drafter=drafter, trace=True)[0]
    assert outcome.tokens.tolist() == [1, 2, 0, 1, 2, 0]
    # Positions 1 2 3 drafted, 3 refused and replaced; then 4 5 drafted and 6 as the bonus: room for one draft fewer.
    assert [step.proposed for step in outcome.trace] == [[1, 2, 1], [1, 2]]
    assert [step.committed for step in outcome.trace] == [[1, 2, 0], [1, 2, 0]]
    assert [step.positions for step in outcome.trace] == [[1, 2, 3], [4, 5, 6]]
    assert (outcome.nfe, outcome.nfe_draft, outcome.proposed, outcome.accepted) == (2, 5, 5, 4)
    assert outcome.accept_hist == [0, 0, 0, 2]


def scripted(wrong_at=None):
    """A table that puts (position mod 3) at every position whatever the context, or one more at `wrong_at`."""
    backbone = TokenTable(vocab_size=VOCAB, num_positions=LENGTH)
    for position in range(LENGTH):
        token = (position + 1 + (position + 1 == wrong_at)) % VOCAB
        backbone.table_PXV[position] = -30.0
        backbone.table_PXV[position, :, token] = 30.0
    return backbone


def followed(text, *, max_n, min_n, most=1):
    """What a look-up drafts after a text, whether it has seen its beginnings before or not."""
    fresh, growing = (Lookup(max_n, min_n) for _ in range(2))
    for length in range(1, len(text)):
        growing.drafts(text, length, most)
    drafts = fresh.drafts(text, len(text), most)
    assert growing.drafts(text, len(text), most) == drafts
    return drafts


def test_prompt_lookup_drafts_what_followed_the_longest_match_that_came_last():
    assert followed([0, 1, 2, 0, 1, 2], max_n=3, min_n=1, most=2) == [0, 1], "after 0 1 2 came 0"
    assert followed([1, 4, 1, 5, 2, 1], max_n=4, min_n=1) == [5], "the last of two matches"
    assert followed([3, 1, 4, 2, 1, 5, 3, 1], max_n=2, min_n=1) == [4], "a longer match beats a later one"
    assert followed([3, 1, 4, 2, 1, 5, 3, 1], max_n=1, min_n=1) == [5]
    assert followed([1, 2, 3, 4], max_n=3, min_n=1) == []
    assert followed([7], max_n=3, min_n=1) == [], "a text of one token has nothing before it"
    assert followed([5, 5, 5], max_n=3, min_n=3) == []


def test_prompt_lookup_reads_on_into_its_own_drafts():
    assert followed([5, 5, 5], max_n=3, min_n=1, most=4) == [5, 5, 5, 5]
    assert followed([9, 0, 1, 2, 0, 1], max_n=2, min_n=1, most=7) == [2, 0, 1, 2, 0, 1, 2]


def test_prompt_lookup_equals_a_plain_search():
    rng = np.random.default_rng(0)
    plain: Any = causal_reference.by_lookup(VOCAB, max_n=3, min_n=2)
    for _ in range(200):
        text = rng.integers(0, VOCAB, int(rng.integers(1, 14))).tolist()
        assert followed(text, max_n=3, min_n=2, most=5) == plain(text, None, 5)[1]


def test_prompt_lookup_copies_a_period_for_as_long_as_it_holds():
    request = requests_of(prompt(0, 1, 2, 0, holes=3))
    outcome = decode(scripted(), INFO, spec(8, NGRAM), Sampling(temperature=0.0), request)[0]
    # One look-up: two drafts from the period of three and the bonus.
    assert outcome.tokens.tolist() == [1, 2, 0]
    assert (outcome.nfe, outcome.nfe_draft, outcome.proposed, outcome.accepted) == (1, 1, 2, 2)


def test_slots_with_fewer_drafts_have_fewer_rows():
    class Watched(TokenTable):
        def forward(self, rows):
            widths.append(sorted(rows.owner_N.bincount().tolist()))
            return super().forward(rows)

    widths: list[list[int]] = []
    # Equal prompts would run once.
    requests = requests_of(prompt(0, 1, 2, holes=1), prompt(1, 2, 0, holes=2), prompt(2, 0, 1, holes=4))
    speculate(requests, k=2, target=Watched(vocab_size=VOCAB, num_positions=LENGTH, seed=1))
    # The prompt of three, and none, one or two drafts.
    assert widths[0] == [3, 4, 5]


def test_what_the_target_never_says_is_never_drafted():
    info = token_info(VOCAB, suppressed=(1,))
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=12)
    expected = decode(table(), info, AR, Sampling(), requests)
    found = decode(table(), info, spec(3, MODEL), Sampling(), requests, drafter=blend(), trace=True)
    assert texts(found) == texts(expected)
    drafts = [token for o in found.values() for step in o.trace for token in step.proposed]
    assert len(drafts) > 50 and 1 not in drafts


def counted(outcomes):
    return sum(one.nfe for one in outcomes.values()), sum(one.accepted for one in outcomes.values())


def test_an_index_of_suffixes_keeps_the_texts_of_a_worker_also_when_it_is_cleared():
    requests = [one for one in toy_prompts(60, vocab_size=VOCAB, longest=LENGTH, seed=5) if (one.canvas < 0).sum() > 3]
    expected = texts(decode(table(), INFO, AR, Sampling(), requests))
    decoder = engine(table(), INFO, spec(8, SUFFIX), rows=3)
    first, second = run_all(decoder, requests), run_all(decoder, requests)
    decoder.admit(requests[:2])
    decoder.step()
    decoder.clear()
    third = run_all(decoder, requests)
    assert texts(first) == texts(second) == texts(third) == expected
    assert counted(third) <= counted(second) < (0.8 * counted(first)[0],)
    # A look-up at most an iteration, and no forward without an iteration.
    assert all(0 <= one.nfe_draft <= one.iterations == one.nfe for one in second.values())


def test_rows_draft_from_neighbours_that_are_still_at_work():
    """A sample that begins two steps after its twin has the words of that one before its own."""
    (request,) = requests_of(prompt(0, 1, holes=5))
    decoder = engine(table(), INFO, spec(4, SUFFIX), rows=2)
    decoder.admit([request])
    assert not decoder.step() and not decoder.step(), "the first is still at work"
    decoder.admit([replace(request, index=1)])
    outcomes = {outcome.index: outcome for _ in range(9) for outcome in decoder.step()}
    assert texts(outcomes)[0] == texts(outcomes)[1] and outcomes[1].nfe < outcomes[0].nfe


@pytest.mark.one_in(2)
@pytest.mark.parametrize("vocab_size", [2, 5])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_drafter_whose_vocabulary_is_padded_otherwise_still_drafts(vocab_size, acceptance):
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=13)
    drafter = TokenTable(vocab_size=vocab_size, num_positions=LENGTH, seed=3)
    found = speculate(requests, sampling=Sampling(acceptance=acceptance), model=drafter)
    assert all((o.tokens < VOCAB).all() for o in found.values())
    assert sum(o.accepted for o in found.values()) > 0
    if acceptance == "coupled":
        assert texts(found) == texts(decode(table(), INFO, AR, Sampling(), requests))


def test_a_drafter_with_a_shorter_context_stops_drafting_there():
    class Short(TokenTable):
        def forward(self, rows):
            assert int(rows.position_N.max()) < 4
            return super().forward(rows)

    requests = requests_of(prompt(0, holes=6), prompt(0, 1, 2, 1, 2, holes=2))
    short = replace(token_info(VOCAB), max_length=4)
    drafter = Short(vocab_size=VOCAB, num_positions=LENGTH, seed=1)
    found = decode(table(), INFO, spec(3, MODEL), Sampling(), requests, drafter=drafter, drafter_info=short)
    assert texts(found) == texts(decode(table(), INFO, AR, Sampling(), requests))
    # Positions 1 .. 4 can be drafted; the second prompt is longer than that already.
    assert found[0].proposed == found[0].accepted == 3 and found[1].nfe_draft == 0
