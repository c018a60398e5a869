"""Probes beside samples that decode: exact answers, and nobody's text changes."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import HOLE, Request, RowSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, build_scorer
from tests.decoders.backbones.masked_models import load, look_alone
from tests.decoders.references.table import TableBackbone
from tests.decoders.support import decoder_settings, engine, run_all, table_info, toy_heads, toy_requests

VOCAB, LENGTH = 3, 6
ANY_SUBSET = {
    "any_subset": decoder_settings("any_subset"),
    "assd": decoder_settings("assd", k=3),
    "n-gram": decoder_settings("assd", k=3, drafter="ngram"),
    "rows": decoder_settings("assd", k=3, fused="rows"),
}


def setup(acceptance: str = "coupled") -> Setup:
    backbone = TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=5)
    sampling = Sampling.model_validate({"temperature": 0.8, "top_p": 0.9, "acceptance": acceptance})
    made = Setup(
        backbone=copy(backbone),
        info=table_info(VOCAB),
        sampling=sampling,
        max_rows=6,
        max_tokens=999,
        heads=toy_heads(VOCAB),
    )
    return made


def probes(count: int, first: int) -> list[Request]:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, int(rng.integers(2, LENGTH + 1))).astype(np.int32) for _ in range(count)]
    starts = [int(rng.integers(0, len(text))) for text in texts]
    return [
        Request(first + n, n, text, score_from=start, probe=True)
        for n, (text, start) in enumerate(zip(texts, starts, strict=True))
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ANY_SUBSET)
def test_a_probe_is_the_exact_score_and_its_neighbours_texts_are_what_they_are_alone(name, acceptance):
    settings = ANY_SUBSET[name]
    texts, asked = toy_requests(12, vocab_size=VOCAB, longest=LENGTH, share=0.6), probes(12, 100)
    mixed = [request for pair in zip(texts, asked, strict=True) for request in pair]
    outcomes = run_all(build_decoder(setup(acceptance), settings), mixed)
    alone = run_all(build_decoder(setup(acceptance), settings), texts)
    scores = run_all(
        build_scorer(setup(), decoder_settings("any_subset"), Estimate()),
        [replace(request, probe=False) for request in asked],
    )
    for request in texts:
        assert outcomes[request.index].tokens.tolist() == alone[request.index].tokens.tolist()
        assert outcomes[request.index].logprob == alone[request.index].logprob
    for request in asked:
        found = outcomes[request.index]
        assert found.logprob == pytest.approx(scores[request.index].logprob, abs=1e-12)
        assert (found.nfe, len(found.tokens), found.proposed, found.iterations) == (1, 0, 0, 0)


def test_rows_in_parts_score_what_they_are_asked_for_under_the_rejection_rule():
    """Where logits are made in parts, tokens of rows that are not given are drawn in each part."""
    whole, cut = (build_decoder(setup("rejection"), ANY_SUBSET["assd"]) for _ in range(2))
    cut.target.parts = lambda num_rows, **_: [slice(row, row + 1) for row in range(max(num_rows, 1))]  # type: ignore[attr-defined]
    requests = [*toy_requests(6, vocab_size=VOCAB, longest=LENGTH, share=0.6), *probes(6, 100)]
    expected = run_all(whole, requests)
    for index, outcome in run_all(cut, requests).items():
        assert outcome.tokens.tolist() == expected[index].tokens.tolist()
        assert outcome.logprob == pytest.approx(expected[index].logprob, abs=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [
        decoder_settings("stepwise", cache="dual_strict", block_length=2),
        decoder_settings("threshold", confidence="margin"),
        decoder_settings("ssd", draft_length=2),
        decoder_settings("ssd", draft_length=2, cache="dual_strict", block_length=2, tree="mixed"),
        decoder_settings("ssd", draft_length=2, cache="prefix", block_length=2),
    ],
    ids=lambda settings: f"{settings.kind}, {settings.cache}",
)
def test_a_masked_models_probe_is_the_mean_confidence_of_the_masks_it_names(golden, settings):
    backbone = load(golden / "llada")
    info = inspect_model(golden / "llada")

    def built():
        return engine(backbone, info, settings, rows=3)

    rng = np.random.default_rng(0)
    canvases = [rng.integers(0, 60, 12).astype(np.int32) for _ in range(4)]
    for number, canvas in enumerate(canvases):
        canvas[2 : 4 + number] = HOLE
        canvas[9] = HOLE
    texts = [Request(n, n, canvas) for n, canvas in enumerate(canvases)]
    certain = RowSettings(temperature=0.0)
    asked = [
        Request(10 + n, n, canvas, settings=certain, probe=True, scored=np.arange(2, 4 + n, dtype=np.int64))
        for n, canvas in enumerate(canvases)
    ]
    decoder = built()
    outcomes = run_all(decoder, [request for pair in zip(texts, asked, strict=True) for request in pair])
    alone = run_all(built(), texts)
    for request in texts:
        found, other = outcomes[request.index], alone[request.index]
        assert (found.tokens.tolist(), found.nfe, found.logprob) == (other.tokens.tolist(), other.nfe, other.logprob)
    for number, canvas in enumerate(canvases):
        hidden = look_alone(backbone, np.where(canvas == HOLE, info.mask_id or 0, canvas).tolist())
        logits = backbone.logits(hidden).double()
        logits[:, list(info.suppressed)] = -torch.inf
        law = torch.softmax(logits, dim=-1)
        expected = float(law[2 : 4 + number].max(-1).values.mean())
        assert np.exp(outcomes[10 + number].logprob) == pytest.approx(expected, rel=1e-5)
        assert outcomes[10 + number].nfe == 1
