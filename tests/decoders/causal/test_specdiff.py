"""Speculative diffusion decoding: the sequential text and law whatever is drafted, every count, and the Markov draft head."""

import json
import time
from copy import copy
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftmill.decoders.backbones.heads.markov import DraftHeads, MarkovHead, load_heads
from draftmill.decoders.backbones.invariance import rows_exact
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.registry import find_heads
from tests.decoders.backbones.masked_models import load
from tests.decoders.causal.test_speculative import as_sequential, check_runs, cut_places
from tests.decoders.masked.diffusion_tables import (
    LENGTH,
    MASK,
    PLACE,
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
from tests.decoders.support import (
    decode,
    decoder_settings,
    engine,
    run_all,
    texts,
    toy_heads,
    toy_prompts,
)

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


WIDTH = VOCAB + 1


def test_the_seconds_of_the_head_are_those_of_the_drafters_forwards(monkeypatch):
    slow_s, calls = 0.002, []

    def slow(self, hidden_RD, **_):
        calls.append(len(hidden_RD))
        time.sleep(slow_s)
        return hidden_RD

    monkeypatch.setattr(MarkovHead, "forward", slow)
    requests = toy_prompts(12, vocab_size=VOCAB, longest=LENGTH, seed=8)
    decoder = engine(
        target(),
        TARGET_INFO,
        specdiff(3, 1),
        rows=3,
        max_tokens=99,
        drafter=drafter(),
        drafter_info=mask_info(),
        heads=toy_heads(WIDTH),
    )
    outcomes = run_all(decoder, requests)
    assert sum(o.device_s for o in outcomes.values()) == pytest.approx(decoder.stats.forward_s)
    assert decoder.stats.forward_s > slow_s * len(calls) > 0
    assert sum(calls) == sum(o.proposed for o in outcomes.values()), "one row for each draft, no more"


def save(folder, heads, *, dtype=torch.float16, **config):
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in heads.state_dict().items()}
    save_file(weights, folder / "draft_head.safetensors")
    (folder / "draft_head.json").write_text(json.dumps(heads.sizes() | config))
    return folder


def test_a_file_holds_the_heads_that_it_names(tmp_path):
    heads = DraftHeads(width=8, markov_hidden=6)
    alone = load_heads(save(tmp_path / "one", heads, kind="specdiff"), "specdiff")
    assert alone is not None
    assert torch.equal(alone.markov.up.weight, heads.markov.up.weight.half().float())
    assert load_heads(tmp_path) is None


def test_a_head_with_an_infinite_weight_is_refused(tmp_path):
    heads = DraftHeads(width=8, markov_hidden=6)
    heads.markov.up.weight.data[2, 3] = -torch.inf
    with pytest.raises(
        ValueError, match=r"decoder\.head: .*draft_head\.safetensors: markov\.up\.weight has weights that"
    ):
        load_heads(save(tmp_path / "head", heads))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "draft_head.json: it has kind = none; supported: 'specdiff'"),
        ({"width": "8"}, r"draft_head.json: it has width = '8'; allowed: whole numbers >= 1"),
        ({"kind": "specdiff", "markov_hidden": 5}, r"does not fit .*markov"),
        ({"kind": "specdiff", "depth": 2}, "it has depth; allowed: kind, width, markov_hidden"),
    ],
)
def test_a_head_of_another_kind_or_size_is_refused(tmp_path, config, message):
    folder = save(tmp_path / "head", DraftHeads(width=8, markov_hidden=6), **config)
    with pytest.raises(ValueError, match=r"(?s)decoder\.head: .*" + message):
        load_heads(folder, "specdiff")


def test_the_drafters_own_head_is_found_and_a_named_one_goes_before_it(tmp_path):
    own = save(tmp_path / "own", DraftHeads(width=WIDTH, markov_hidden=5), kind="specdiff")
    other = save(tmp_path / "other", DraftHeads(width=WIDTH, markov_hidden=7), kind="specdiff")
    wide = save(tmp_path / "wide", DraftHeads(width=9, markov_hidden=7), kind="specdiff")
    (tmp_path / "bare").mkdir()

    def found(head, folder=own, **more):
        heads = find_heads(decoder_settings("specdiff", drafter=PLACE, head=str(head), **more), folder, drafter())
        return None if heads is None else heads.sizes()["markov_hidden"]

    assert (found("auto"), found(other), found("none")) == (5, 7, None)
    assert found("auto", tmp_path / "bare") is None
    assert found("auto", order="native") is None
    with pytest.raises(ValueError, match=r"decoder\.head: .*bare has no draft_head\.json and draft_head\.safetensors"):
        found(tmp_path / "bare")
    with pytest.raises(ValueError, match=rf"decoder\.head: made for models of width 9, but this model has {WIDTH}"):
        found(wide)
    with pytest.raises(ValueError, match="kind = 'specdiff'; supported: 'assd', none"):
        find_heads(decoder_settings("assd"), own, drafter())


def test_a_row_of_a_real_drafters_head_keeps_its_bits_in_any_company(golden, tmp_path):
    backbone = load(golden / "llada")
    heads = DraftHeads(width=backbone.width, markov_hidden=32).requires_grad_(False)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    settings = decoder_settings("specdiff", drafter=PLACE, head=str(save(tmp_path, heads, kind="specdiff")))
    found, stored = find_heads(settings, tmp_path, backbone), load_heads(tmp_path, "specdiff")
    assert found is not None and stored is not None

    def corrected(head, rows_RD):
        one_R = torch.ones(len(rows_RD), dtype=torch.int64)
        places = {"prev_distance_R": one_R, "before_distance_R": one_R, "num_unseen_R": 2 * one_R}
        with torch.no_grad():
            return head(rows_RD, prev_RD=rows_RD.flip(1), before_RD=-rows_RD, **places)

    rows_RD = torch.randn(300, backbone.width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(corrected(found.markov, rows_RD), corrected(stored.markov, rows_RD))
    if backbone.rules.exact:
        assert rows_exact(lambda rows: corrected(found.markov, rows), rows_RD, backbone.min_rows)


def test_the_native_order_has_no_head():
    assert decoder_settings("specdiff", drafter=PLACE, order="native", head="none").head == "none"
    with pytest.raises(ValueError, match=r"decoder\.head: 'heads/mine'.*'native'.*allowed with it: auto, none"):
        decoder_settings("specdiff", drafter=PLACE, order="native", head="heads/mine")
