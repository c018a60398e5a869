"""The model that ships with the project: speculative text equals sequential text over every setting that users turn."""

import itertools
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.registry import find_heads
from tests.decoders.support import decode, decoder_settings, texts

FOLDER = Path(draftmill.decoders.builtin.__path__[0]) / "asarm-tiny"
VARIANTS: list[dict[str, Any]] = [
    {},
    {"drafter": "ngram"},
    {"fused": "rows"},
    {"fused": "rows", "rows": "ends"},
]
WARPS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def model():
    backbone = load_backbone(FOLDER, device="cpu")
    return backbone, inspect_model(FOLDER), find_heads(decoder_settings("assd"), FOLDER, backbone)


@pytest.fixture(scope="module")
def requests():
    """Seventy ragged windows of real source, from 6 to 24 tokens, 20 to 100 % masked."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    rng = np.random.default_rng(0)
    made = []
    for index in range(70):
        start, length = rng.integers(0, len(ids) - 40), rng.integers(6, 25)
        canvas = ids[start : start + length].copy()
        canvas[rng.random(length) < rng.choice([0.2, 0.5, 0.95, 1.0])] = -1
        made.append(Request(index, sample_key(0, str(index)), canvas))
    return made


@pytest.fixture(scope="module")
def baseline(model, requests):
    """Sequential text under each warp, computed once."""
    backbone, info, _ = model
    return [
        texts(decode(backbone, info, decoder_settings("any_subset"), Sampling(**warp), requests, rows=32))
        for warp in WARPS
    ]


@pytest.mark.one_in(17, soak=3)
@pytest.mark.parametrize("rows", [1, 3, 16, 64])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_speculative_text_is_sequential_text_token_for_token(model, requests, baseline, variant, rows):
    backbone, info, heads = model
    # Small batches see fewer samples; over the cases each k meets each warp and each batch size.
    samples = requests[: {1: 6, 3: 10, 16: 24}.get(rows, 70)]
    ks = range(1, 9) if rows in (3, 16) else (2, 5)
    for k, (number, warp) in zip(ks, itertools.cycle(enumerate(WARPS)), strict=False):
        shuffled = [samples[i] for i in np.random.default_rng(k).permutation(len(samples))]
        settings = decoder_settings("assd", k=k, **variant)
        found = texts(decode(backbone, info, settings, Sampling(**warp), shuffled, rows=rows, heads=heads))
        assert found == {request.index: baseline[number][request.index] for request in samples}


@pytest.mark.slow
def test_the_draft_head_saves_forwards_and_changes_no_text(model, requests, baseline):
    backbone, info, heads = model
    assert heads is not None, "the builtin model ships with a draft head"
    spent = {}
    for name, head in (("with", heads), ("without", None)):
        outcomes = decode(
            backbone, info, decoder_settings("assd", k=5, fused="rows"), Sampling(), requests, rows=32, heads=head
        )
        assert texts(outcomes) == baseline[0]
        spent[name] = sum(outcome.nfe for outcome in outcomes.values())
    assert spent["with"] < spent["without"]
