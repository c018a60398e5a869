"""Requests with settings of their own, beside others in one batch: each comes out as in a job that has them for all."""

from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftmill.decoders.base import RowSettings
from draftmill.decoders.causal.settings import SpeculativeSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import NeverStops, Stops
from tests.decoders.causal.jacobi_settings import jacobi, multi
from tests.decoders.masked import diffusion_tables, test_ancestral, test_ssd
from tests.decoders.references.table import TableBackbone
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import (
    Pair,
    decoder_settings,
    engine,
    run_all,
    table_info,
    token_info,
    toy_heads,
    toy_prompts,
    toy_requests,
)

VOCAB, LENGTH = 3, 7
OWN = [
    RowSettings(),
    RowSettings(temperature=0.0),
    RowSettings(temperature=0.8),
    RowSettings(temperature=1.7, top_p=0.6),
    RowSettings(top_p=0.5),
    RowSettings(top_p=1.0),
    RowSettings(temperature=0.0, top_p=0.4),
]
JOBS = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.9, top_k=2, top_p=0.7)]
CAUSAL: dict = {
    "autoregressive": decoder_settings("autoregressive"),
    "lookup": decoder_settings("speculative", k=3, drafter={"kind": "ngram", "max_n": 2, "min_n": 1}),
    "model": decoder_settings("speculative", k=3, drafter={"kind": "model", "path": "drafter"}),
    "auto": decoder_settings("speculative", k="auto", drafter={"kind": "model", "path": "drafter"}),
    "jacobi": jacobi(3),
    "running": jacobi(4, "running"),
    "multi": multi(2, 2, ratio=0.85, verify=3, pool=3),
}
RATIOS = ["autoregressive", "lookup", "model"]


@cache
def _made(seed):
    return TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=seed)


def target():
    return copy(_made(1))


def drafter():
    """A model that agrees with the target now and then: it has half of its logits from it."""
    made = copy(_made(2))
    made.table_PXV = (made.table_PXV + _made(1).table_PXV) / 2
    return made


def check(make, requests, sampling, *, rows=5):
    """Each row of a mixed batch is the row of a job with its settings; all of them are met, and they matter."""
    rng = np.random.default_rng(3)
    mixed = [replace(request, settings=OWN[rng.integers(len(OWN))]) for request in requests]
    found = run_all(make(sampling, rows), mixed)
    common = run_all(make(sampling, rows), requests)
    differ = 0
    for own in OWN:
        mine = [request for request in requests if mixed[request.index].settings == own]
        assert mine
        own_values = {name: getattr(own, name) for name in ("temperature", "top_p") if getattr(own, name) is not None}
        for index, outcome in run_all(make(sampling.model_copy(update=own_values), rows), mine).items():
            assert found[index].tokens.tolist() == outcome.tokens.tolist()
            assert found[index].logprob == outcome.logprob
            assert found[index].finish == outcome.finish
            differ += common[index].tokens.tolist() != outcome.tokens.tolist()
    assert differ, "settings that change nothing prove nothing"


def causal(settings):
    def make(sampling, rows):
        more = {"drafter": drafter()} if isinstance(settings, SpeculativeSettings) else {}
        return engine(target(), token_info(VOCAB), settings, sampling, rows=rows, stops=Stops(ids=(2,)), **more)

    return make


def diffusing(order):
    tables = diffusion_tables
    more = {"drafter_info": tables.mask_info()}
    return lambda sampling, rows: engine(
        tables.target(), tables.TARGET_INFO, tables.specdiff(3, 2, order=order), sampling, rows=rows,
        drafter=tables.drafter(), **more,
    )  # fmt: skip


def any_subset(kind, **settings):
    heads = toy_heads(4) if kind == "assd" and "drafter" not in settings else None
    made = decoder_settings(kind, **settings)
    return lambda sampling, rows: engine(
        TableBackbone(vocab_size=4, num_positions=6, seed=1), table_info(4), made, sampling, rows=rows, heads=heads
    )


def masked(kind, **settings):
    made = decoder_settings(kind, **settings)
    return lambda sampling, rows: engine(test_ssd.table(), test_ssd.table_info(), made, sampling, rows=rows)


def ancestral(predictor):
    tables = test_ancestral
    return lambda sampling, rows: tables.decoder(tables.settings_of(4, predictor), sampling, rows=rows)


REJECTING = [job.model_copy(update={"acceptance": "rejection"}) for job in JOBS]
PROMPTS = toy_prompts(70, vocab_size=VOCAB, longest=LENGTH, seed=5)
CANVASES = toy_requests(60, vocab_size=4, longest=7, seed=2)
MANY = toy_requests(120, vocab_size=3, longest=6, seed=2)
SHORT = toy_requests(60, vocab_size=4, longest=6, seed=2)
ALIKE: dict = {
    **{f"causal, {kind}": (causal(one), PROMPTS, JOBS[1:]) for kind, one in CAUSAL.items()},
    **{f"causal by ratios, {kind}": (causal(CAUSAL[kind]), PROMPTS, REJECTING[1:]) for kind in RATIOS},
    **{f"specdiff, {one}": (diffusing(one), PROMPTS, JOBS[2:]) for one in ("left_to_right", "native")},
    "any_subset": (any_subset("any_subset"), SHORT, [JOBS[2], REJECTING[2]]),
    "parallel": (any_subset("parallel"), SHORT, [JOBS[2], REJECTING[2]]),
    "assd": (any_subset("assd", k=3), SHORT, [JOBS[2], REJECTING[2]]),
    "assd, ngram": (any_subset("assd", k=3, drafter="ngram"), SHORT, [JOBS[2], REJECTING[2]]),
    "assd, fused": (any_subset("assd", k=3, fused="rows"), SHORT, [JOBS[2], REJECTING[2]]),
    "stepwise, blocks": (masked("stepwise", block_length=2), CANVASES, JOBS[1:]),
    "stepwise": (masked("stepwise", steps=2), CANVASES, JOBS[1:]),
    "threshold": (masked("threshold", tau=0.4), CANVASES, JOBS[1:]),
    "ssd": (masked("ssd", draft_length=2), CANVASES, JOBS[1:]),
    **{f"ancestral, {one}": (ancestral(one), MANY, JOBS[:1]) for one in test_ancestral.PREDICTORS},
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ALIKE)
def test_a_row_with_its_own_sampling_is_that_of_a_job_with_it(name):
    make, requests, jobs = ALIKE[name]
    for sampling in jobs:
        check(make, requests, sampling)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", CAUSAL)
def test_a_row_ends_at_its_own_stop_strings_and_at_no_others(kind):
    requests = toy_prompts(70, vocab_size=VOCAB, longest=LENGTH, seed=5)
    own = [None, Pair(0, 1), Pair(1, 2), NeverStops()]
    common = Pair(2, 0)

    def decoded(stop, mine):
        more = {"drafter": drafter()} if isinstance(CAUSAL[kind], SpeculativeSettings) else {}
        made = engine(target(), token_info(VOCAB), CAUSAL[kind], rows=5, stops=Stops(text=stop), **more)
        return run_all(made, mine)

    mixed = [replace(r, settings=RowSettings(stop_text=own[i % 4])) for i, r in enumerate(requests)]
    for job in (common, None):
        found, stopped = decoded(job, mixed), 0
        for number, stop in enumerate(own):
            expected = decoded(job if stop is None else stop, requests[number::4])
            for index, outcome in expected.items():
                assert found[index].tokens.tolist() == outcome.tokens.tolist()
                assert found[index].finish == outcome.finish
                stopped += outcome.finish == "stop"
        assert stopped > 2


def test_a_masked_row_ends_at_its_own_stop_string():
    tables = test_ssd
    requests = toy_prompts(40, vocab_size=tables.VOCAB, longest=tables.POSITIONS, seed=5)

    def decoded(stop, mine):
        info = replace(tables.table_info(), kind="masked")
        settings = decoder_settings("stepwise", block_length=2)
        return run_all(engine(tables.table(), info, settings, rows=5, stops=Stops(text=stop)), mine)

    mixed = [replace(r, settings=RowSettings(stop_text=Pair(0, 1))) if i % 2 else r for i, r in enumerate(requests)]
    found, whole, ended = decoded(None, mixed), decoded(None, requests), decoded(Pair(0, 1), requests)
    for index, outcome in found.items():
        assert outcome.tokens.tolist() == (ended if index % 2 else whole)[index].tokens.tolist()
    assert sum(outcome.finish == "stop" for outcome in found.values()) > 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CAUSAL)
def test_the_log_probabilities_of_a_row_that_asks_are_those_of_its_tokens(kind):
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH, seed=7)
    asking = [replace(r, settings=RowSettings(token_logprobs=r.index % 3 != 0)) for r in requests]
    found = run_all(causal(CAUSAL[kind])(Sampling(temperature=0.7), 5), asking)
    alone = run_all(
        causal(CAUSAL["autoregressive"])(Sampling(temperature=0.7), 1),
        [replace(r, settings=RowSettings(token_logprobs=True)) for r in requests],
    )
    for index, outcome in found.items():
        if index % 3 == 0:
            assert outcome.token_logprobs is None
            continue
        scores = outcome.token_logprobs
        assert scores.dtype == np.float32 and len(scores) == len(outcome.tokens)
        assert scores.tolist() == alone[index].token_logprobs.tolist()
        assert float(scores.sum()) == pytest.approx(outcome.logprob, abs=1e-5)


@pytest.mark.parametrize(
    "settings", [decoder_settings("any_subset"), decoder_settings("assd", k=3)], ids=["any_subset", "assd"]
)
def test_those_of_an_any_subset_model_stand_in_the_order_of_the_canvas(settings):
    backbone, own = TableBackbone(vocab_size=4, num_positions=6, seed=1), RowSettings(token_logprobs=True)
    made = engine(backbone, table_info(4), settings, rows=4)
    for request in toy_requests(30, vocab_size=4, longest=6, seed=2):
        holes = np.flatnonzero(request.canvas < 0)
        backwards = replace(request, hole_order=holes[::-1].copy(), settings=own)
        (whole,) = run_all(made, [backwards]).values()
        if len(holes) == 0:
            assert whole.token_logprobs is None
            continue
        assert float(whole.token_logprobs.sum()) == pytest.approx(whole.logprob, abs=1e-5)
        # The leftmost hole comes last, when all the others are filled.
        canvas = request.canvas.copy()
        canvas[holes[1:]] = whole.tokens[1:]
        (last,) = run_all(made, [replace(request, canvas=canvas, settings=own)]).values()
        assert last.token_logprobs.tolist() == whole.token_logprobs[:1].tolist()
