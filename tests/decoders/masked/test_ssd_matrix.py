"""`ssd` is `stepwise`, reveal for reveal: every value of each setting meets every value of every other, and random ones.

`make soak` plays 40 times as many cases.
"""

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.masked.ssd import Predictions
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.ssd_support import decode, reveals, same
from tests.decoders.masked.test_self_speculative import SAMPLINGS
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, pairwise
from tests.runs.jobs_of_tests import soak

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


ANY_CACHE = ["none", "prefix", "dual_strict", "dual_relaxed"]
WORDS, LONGEST = 4, 24


class Hashed(TokenTable):
    """Every context has logits of its own, but for collisions, however long the canvas is."""

    def __init__(self, seed: int) -> None:
        super().__init__(vocab_size=WORDS + 1, num_positions=1, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.num_positions, self._size = LONGEST, 1 << 10
        self.table_PXV = 1.5 * torch.randn(LONGEST, self._size, WORDS + 1, generator=generator, dtype=torch.float64)
        self._code_PV = torch.randint(0, self._size, (LONGEST, WORDS + 1), generator=generator)

    def _context(self, slots_N: torch.Tensor, visible_NW: torch.Tensor) -> torch.Tensor:
        width = visible_NW.shape[1]
        positions_NW, tokens_NW = self.positions_SW[slots_N, :width], self.tokens_SW[slots_N, :width]
        held_NP = torch.zeros(len(slots_N), LONGEST, dtype=torch.int64)
        held_NP.scatter_add_(1, positions_NW, visible_NW.to(torch.int64))
        assert int(held_NP.max()) <= 1, "a row sees two columns of one position"
        return (self._code_PV[positions_NW, tokens_NW] * visible_NW).sum(1) % self._size


def shared_settings(rng: np.random.Generator) -> dict:
    cache = str(rng.choice(ANY_CACHE))
    return {
        "cache": cache,
        "refresh": None if cache == "none" or rng.random() < 0.4 else int(rng.integers(1, 13)),
        "block_length": None if rng.random() < 0.1 else int(rng.integers(1, 7)),
        "confidence": str(rng.choice(["top1", "margin", "entropy", "random"])),
        "draws": str(rng.choice(["fresh", "kept"])),
    }


def random_requests(rng: np.random.Generator, *, count: int, words: int) -> list[Request]:
    requests = []
    for index in range(count):
        canvas = rng.integers(0, words, int(rng.integers(2, LONGEST + 1))).astype(np.int32)
        canvas[rng.random(len(canvas)) < rng.choice([0.2, 0.5, 0.9])] = -1
        requests.append(Request(index, int(rng.integers(1 << 40)), canvas))
    return requests


def check_random(rng: np.random.Generator, backbone, info: ModelInfo, *, count: int, words: int) -> None:
    """One case: in a batch, and beside the baseline alone. What is lossy has no baseline but itself, alone."""
    shared, requests = shared_settings(rng), random_requests(rng, count=count, words=words)
    is_lossy = shared["cache"] == "dual_relaxed"
    tree = rng.choice(["chain", "mixed"])
    settings = decoder_settings("ssd", draft_length=int(rng.integers(1, 9)), tree=tree, **shared)
    sampling = Sampling(temperature=float(rng.choice([0.0, 0.8, 1.0])))
    found = decode(backbone, info, settings, sampling, requests, rows=int(rng.integers(1, 6)))
    base = settings if is_lossy else decoder_settings("stepwise", **shared)
    expected = decode(backbone, info, base, sampling, requests, rows=1)
    if not is_lossy:
        same(found, expected)
    for index, outcome in found.items():
        assert outcome.error_kind is None and len(outcome.tokens) == (requests[index].canvas < 0).sum()
        assert reveals(outcome) == reveals(expected[index]), settings
        assert outcome.logprob == expected[index].logprob, settings


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, *soak(range(1, 41))])
def test_no_canvas_and_no_settings_fail_and_the_text_is_that_of_stepwise(chunk):
    torch.manual_seed(chunk)
    info = ModelInfo("table", WORDS + 1, WORDS, None, "masked", 0, (WORDS,))
    for case in range(30):
        rng = np.random.default_rng([chunk, case])
        check_random(rng, Hashed(case % 4), info, count=6, words=WORDS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("chunk", [0, *soak(range(1, 41))])
def test_on_the_public_architectures_every_bit_is_that_of_stepwise(golden, family, chunk):
    torch.manual_seed(chunk)
    backbone, info = load(golden / family), inspect_model(golden / family)
    assert backbone.exact
    for case in range(2):
        check_random(np.random.default_rng([chunk, case]), backbone, info, count=3, words=80)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", range(3))
def test_any_guesses_give_the_text_of_stepwise(monkeypatch, chunk):
    """Drafts in any order, some with other tokens: branches meet that no prediction would make."""
    guess = Predictions.next

    def badly(self, s, earlier, last_block, gone):
        likely, rng = guess(self, s, earlier, last_block, gone), np.random.default_rng([s.decided, len(gone)])
        drafts = [likely[index] for index in rng.permutation(len(likely))]
        return [(place, token if rng.random() < 0.6 else int(rng.integers(WORDS))) for place, token in drafts]

    monkeypatch.setattr(Predictions, "next", badly)
    info = ModelInfo("table", WORDS + 1, WORDS, None, "masked", 0, (WORDS,))
    for case in range(12):
        check_random(np.random.default_rng([9, chunk, case]), Hashed(case % 4), info, count=4, words=WORDS)


@pytest.mark.parametrize(
    "life",
    [
        {"cache": "dual_strict", "refresh": 10},
        {"cache": "dual_relaxed", "refresh": 10},
        {"cache": "dual_relaxed", "refresh": None},
    ],
)
def test_drafts_may_cross_into_a_block_far_away(life):
    """The node behind the crossing sees the text before, between and behind two blocks, and each block where it was run."""
    settings = decoder_settings("ssd", draft_length=2, block_length=3, **life)
    info = ModelInfo("table", WORDS + 1, WORDS, None, "masked", 0, (WORDS,))
    canvas = np.array([1, 2, -1, -1, 3, 1, 2, 0, -1, 3, -1, 0], dtype=np.int32)
    base = settings
    if life["cache"] == "dual_strict":
        base = decoder_settings("stepwise", block_length=3, **life)
    for seed in range(3):
        requests = [Request(0, 0, canvas)]
        found = decode(Hashed(seed), info, settings, Sampling(), requests, rows=1)
        expected = decode(Hashed(seed), info, base, Sampling(), requests, rows=1)
        assert found[0].error_kind is None and reveals(found[0]) == reveals(expected[0])
