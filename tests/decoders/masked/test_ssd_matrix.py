"""`ssd` is `stepwise`, reveal for reveal, whatever the settings: every value of each meets every value of every other."""

import numpy as np
import pytest

from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.masked.ssd_support import decode, same
from tests.decoders.masked.test_self_speculative import SAMPLINGS
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, pairwise

CACHES = [
    *(("none", None), ("dual_strict", None), ("dual_strict", 1), ("dual_strict", 2), ("dual_strict", 5)),
    *(("dual_strict", 8), ("prefix", None), ("prefix", 3)),
]
# Where masks stand: everywhere, behind a prompt, at random, in two spans.
HOLES = ("all", "behind", "anywhere", "spans")
FACTORS = {
    "draft_length": list(range(1, 9)),
    "cache": CACHES,
    "block_length": [1, 2, 3, 8, None],
    "holes": HOLES,
    "sampling": list(SAMPLINGS),
    "rows": [1, 3, 16],
    "tree": ["chain", "mixed"],
    "confidence": ["top1", "margin", "entropy", "random"],
}


def canvas_of(holes, length, vocab_size, rng):
    canvas = rng.integers(0, vocab_size, length).astype(np.int32)
    places = np.arange(length)
    match holes:
        case "all":
            canvas[:] = -1
        case "behind":
            canvas[length // 3 :] = -1
        case "anywhere":
            canvas[rng.random(length) < 0.7] = -1
        case "spans":
            canvas[(places % 5 > 1) & (places != length // 2)] = -1
    return canvas


def requests_of(case, *, count, lengths, vocab_size, seed):
    rng = np.random.default_rng(seed)
    return [
        Request(index, sample_key(seed, str(index)), canvas_of(case["holes"], int(length), vocab_size, rng))
        for index, length in enumerate(rng.choice(lengths, count))
    ]


def check(case, backbone, info, requests):
    """How many forwards were saved."""
    cache, refresh = case["cache"]
    shared = {
        "block_length": case["block_length"],
        "confidence": case["confidence"],
        "cache": cache,
        "refresh": refresh,
    }
    sampling = SAMPLINGS[case["sampling"]]
    base = decoder_settings("stepwise", **shared)
    expected = decode(backbone, info, base, sampling, requests, rows=2)
    settings = decoder_settings("ssd", draft_length=case["draft_length"], tree=case["tree"], **shared)
    outcomes = decode(backbone, info, settings, sampling, requests, rows=case["rows"])
    same(outcomes, expected)
    return sum(expected[index].nfe - outcomes[index].nfe for index in expected)


@pytest.mark.slow
def test_on_an_exact_model_whose_every_context_says_something_else():
    models = [TokenTable(vocab_size=4, num_positions=7, seed=seed, spread=1.5) for seed in range(2)]
    saved = 0
    for number, case in enumerate(pairwise(FACTORS | {"shift": [0, 1]})):
        info = ModelInfo("table", 4, 3, None, "masked", 0, (3,), case["shift"])
        requests = requests_of(case, count=5, lengths=range(1, 8), vocab_size=3, seed=number)
        saved += check(case, models[number % 2], info, requests)
    assert saved > 0
