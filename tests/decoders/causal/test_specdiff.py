"""Speculative diffusion decoding: the sequential text whatever the diffusion model drafts, and every count by the reference."""

from copy import copy
from functools import partial

import numpy as np
import pytest
import torch

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.ends import Stops
from tests.decoders.causal.test_speculative import as_sequential, check_runs, cut_places
from tests.decoders.masked.diffusion_tables import (
    LENGTH,
    MASK,
    TARGET_INFO,
    VOCAB,
    drafter,
    faithful,
    mask_info,
    specdiff,
    target,
)
from tests.decoders.references import causal as causal_reference
from tests.decoders.references.causal import PlainCausal, PlainMasked, by_diffusion
from tests.decoders.references.choosers import rule_of
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode, decoder_settings, random_lengths, texts, toy_heads, toy_prompts

AR = decoder_settings("autoregressive")
WARPS = [{"temperature": 0.0}, {"temperature": 0.8}, {}, {"temperature": 0.8, "top_p": 0.8}, {"top_k": 2}]
ORDERS = ("left_to_right", "native")
HEADED = pytest.mark.parametrize("heads", [None, toy_heads(VOCAB + 1, seed=4)], ids=["bare", "headed"])
"""Without a draft head, and with one that changes every draft."""
ORDERED = pytest.mark.parametrize(
    ("order", "heads"),
    [*((order, None) for order in ORDERS), ("left_to_right", toy_heads(VOCAB + 1))],
    ids=[*ORDERS, "headed"],
)
"""Both orders, and a head, which drafts from left to right."""


def run(requests, settings, sampling=Sampling(), *, model=None, info=None, **more):  # noqa: B008
    more = {"drafter": model or drafter(), "drafter_info": info or mask_info(), **more}
    return decode(target(), TARGET_INFO, settings, sampling, requests, **more)


def sequential(requests, sampling=Sampling(), **more):  # noqa: B008
    return decode(target(), TARGET_INFO, AR, sampling, requests, **more)


@pytest.mark.one_in(17, soak=2)
@HEADED
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_coupled_text_is_the_autoregressive_text(warp, steps, heads):
    requests, sampling = toy_prompts(30, vocab_size=VOCAB, longest=LENGTH, seed=2), Sampling(**warp)
    expected = sequential(requests, sampling, rows=5)
    for gamma, rows, order in [(1, 3, 0), (2, 16, 1), (3, 1, 0), (4, 16, 0), (5, 3, 1), (5, 16, 0), ("auto", 3, 0)]:
        shuffled = [requests[i] for i in np.random.default_rng(rows).permutation(len(requests))]
        settings = specdiff(gamma, steps, order=ORDERS[order if heads is None else 0])
        found = run(shuffled, settings, sampling, rows=rows, heads=heads)
        as_sequential(found, expected)
        assert all(outcome.nfe_draft <= steps * outcome.iterations for outcome in found.values())


@ORDERED
def test_whatever_lengths_are_chosen_the_text_is_the_autoregressive_one(order, heads, monkeypatch):
    monkeypatch.setattr(AutoLength, "__call__", random_lengths)
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH, seed=9)
    found = run(requests, specdiff("auto", order=order), rows=5, heads=heads)
    assert texts(found) == texts(sequential(requests))
    assert sum(outcome.accepted for outcome in found.values()) > 5


def by_reference(request, settings, sampling, *, tail=None, heads=None, stop=lambda generated: False):
    model = PlainCausal(target(), length=len(request.canvas), sampling=sampling)

    def shuffled(decided, count):
        positions = np.arange(decided, decided + count)
        return np.argsort(keys.uniforms(request.key, positions, keys.ORDER, draw=decided)).tolist()

    arrange = shuffled if settings.order == "native" else None
    plain = PlainMasked(drafter(), mask_id=MASK, sampling=sampling, tail=tail)
    head = None if heads is None else heads.markov
    draft = by_diffusion(plain, gamma=settings.gamma, steps=settings.steps, arrange=arrange, head=head)
    tokens, chunk = request.canvas[request.canvas >= 0].tolist(), -(-settings.gamma // settings.steps)
    rule = rule_of(request.key, sampling)
    calls = lambda drafts: -(-drafts // chunk)  # noqa: E731
    return causal_reference.speculative(model, tokens, rule, k=settings.gamma, draft=draft, stop=stop, calls=calls)


@pytest.mark.one_in(11, soak=7)
@ORDERED
@pytest.mark.parametrize("window", ["short", "full"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(("gamma", "steps"), [(1, 1), (3, 2), (4, 1), (5, 2), (4, 9)])
def test_the_batched_decoder_gives_the_reference_tokens_and_counts(order, heads, window, acceptance, gamma, steps):
    sampling = Sampling(acceptance=acceptance, temperature=0.9)
    settings = specdiff(gamma, steps, order=order, window=window)
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=3)
    outcomes = run(requests, settings, sampling, rows=7, info=mask_info(max_length=LENGTH), heads=heads)
    tail = LENGTH if window == "full" else None
    plain = partial(by_reference, settings=settings, sampling=sampling, tail=tail, heads=heads)
    check_runs(outcomes, requests, plain)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_stop_id_cuts_an_accepted_run_where_it_stands(acceptance):
    sampling, settings = Sampling(acceptance=acceptance), specdiff(4)
    requests = toy_prompts(80, vocab_size=VOCAB, longest=LENGTH, seed=4)
    outcomes = run(requests, settings, sampling, stops=Stops(ids=(2,)))
    assert cut_places(outcomes, requests, partial(by_reference, settings=settings, sampling=sampling)) >= {1, 2, 3}


@HEADED
def test_a_shifted_drafter_is_read_from_the_row_before(heads):
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=5)
    shifted = drafter()
    shifted.table_PXV = shifted.table_PXV.roll(-1, 0)
    for acceptance in ("coupled", "rejection"):
        sampling = Sampling(acceptance=acceptance)
        more = {"heads": heads, "trace": True}
        plain = run(requests, specdiff(4), sampling, **more)
        found = run(requests, specdiff(4), sampling, model=shifted, info=mask_info(shift=1), **more)
        assert texts(found) == texts(plain)
        assert {i: o.trace for i, o in found.items()} == {i: o.trace for i, o in plain.items()}


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_drafter_that_knows_the_target_accepts_everything_one_mask_at_a_time(acceptance):
    requests = [r for r in toy_prompts(60, vocab_size=VOCAB, longest=5, seed=6) if (r.canvas < 0).sum() == 4]
    assert len(requests) >= 3
    known = {"drafter": faithful(), "drafter_info": mask_info()}
    sampling = Sampling(acceptance=acceptance)
    found = decode(target(length=5), TARGET_INFO, specdiff(3, 3), sampling, requests, **known)
    for outcome in found.values():
        assert (outcome.nfe, outcome.nfe_draft, outcome.accepted, outcome.accept_hist) == (1, 3, 3, [0] * 4 + [1])
    at_once = decode(target(length=5), TARGET_INFO, specdiff(3, 1), sampling, requests, **known)
    assert sum(o.accepted for o in at_once.values()) < sum(o.accepted for o in found.values())


def test_what_neither_says_is_never_drafted_the_mask_included():
    info = ModelInfo("token_table", VOCAB, None, None, TARGET_INFO.kind, 0, (1,))
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=12)
    more = {"drafter": drafter(), "drafter_info": mask_info(), "trace": True}
    found = decode(target(), info, specdiff(4), Sampling(), requests, **more)
    drafts = {token for o in found.values() for step in o.trace for token in step.proposed}
    assert drafts == {0, 2}
    # The drafter's mask is a token of the target.
    inner = mask_info(mask_id=2, vocab_size=VOCAB)
    model = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=8)
    found = run(requests, specdiff(4), model=model, info=inner, trace=True)
    drafts = {token for o in found.values() for step in o.trace for token in step.proposed}
    assert drafts == {0, 1} and any(2 in o.tokens for o in found.values())
    assert texts(found) == texts(sequential(requests))


@pytest.mark.parametrize("heads", [None, toy_heads(VOCAB)], ids=["bare", "headed"])
def test_a_token_that_the_drafter_does_not_know_reads_as_a_mask(heads):
    """The target says 0 .. 3, the drafter only 0 .. 2 and a mask with the target's last id."""
    info = ModelInfo("token_table", VOCAB + 1, None, None, TARGET_INFO.kind, 0)
    wide = TokenTable(vocab_size=VOCAB + 1, num_positions=LENGTH, seed=1)
    narrow = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
    requests = toy_prompts(40, vocab_size=VOCAB + 1, longest=LENGTH, seed=13)
    known = mask_info(mask_id=2, vocab_size=VOCAB)
    for acceptance in ("coupled", "rejection"):
        sampling = Sampling(acceptance=acceptance)
        found = decode(wide, info, specdiff(3), sampling, requests, drafter=narrow, drafter_info=known, heads=heads)
        assert sum(o.accepted for o in found.values()) > 5 and any(3 in o.tokens for o in found.values())
        if acceptance == "coupled":
            assert texts(found) == texts(decode(copy(wide), info, AR, sampling, requests))


class Watched(TokenTable):
    """Notes every forward: the length of each window, and its noise."""

    seen: list[tuple[int, float]]

    def forward(self, rows):
        length_B = rows.owner_N.bincount()
        self.seen += zip(length_B.tolist(), rows.sigma_G.tolist(), strict=True)
        share_B = rows.owner_N[rows.token_N == MASK].bincount(minlength=len(length_B)) / length_B
        assert torch.allclose(-torch.expm1(-rows.sigma_G), share_B.double().clamp(max=0.999), atol=1e-6)
        return super().forward(rows)


@pytest.mark.parametrize("window", ["short", "full"])
def test_a_text_longer_than_the_drafters_window_is_seen_by_its_end(window):
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH, seed=14)
    model = Watched(vocab_size=VOCAB + 1, num_positions=LENGTH, seed=3)
    model.seen = []
    found = run(requests, specdiff(5, window=window), model=model, info=mask_info(max_length=4), rows=6)
    lengths = {length for length, _ in model.seen}
    assert lengths == ({4} if window == "full" else {2, 3, 4}), (
        "three drafts at most, and one token of the text at least"
    )
    assert texts(found) == texts(sequential(requests))
    assert max(len(o.accept_hist) for o in found.values()) <= 5


def test_a_full_window_needs_to_know_its_length():
    with pytest.raises(ValueError, match=r"decoder\.window: 'full'.*allowed: short"):
        run([], specdiff(3, window="full"))


def test_auto_lengths_need_coupled_acceptance():
    with pytest.raises(ValueError, match=r"decoder\.gamma: 'auto'.*a number"):
        run(toy_prompts(1, vocab_size=VOCAB, longest=3), specdiff("auto"), Sampling(acceptance="rejection"))
