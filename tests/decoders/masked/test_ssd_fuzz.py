"""`ssd` on random canvases with random settings: it never fails, and is `stepwise` to the bit wherever it is lossless.

`make soak` plays 40 times as many cases.
"""

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.masked.ssd import Predictions
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.ssd_support import decode, reveals, same
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings
from tests.runs.jobs_of_tests import soak

CACHES = ["none", "prefix", "dual_strict", "dual_relaxed"]
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
    cache = str(rng.choice(CACHES))
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


def check(rng: np.random.Generator, backbone, info: ModelInfo, *, count: int, words: int) -> None:
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
        check(rng, Hashed(case % 4), info, count=6, words=WORDS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("chunk", [0, *soak(range(1, 41))])
def test_on_the_public_architectures_every_bit_is_that_of_stepwise(golden, family, chunk):
    torch.manual_seed(chunk)
    backbone, info = load(golden / family), inspect_model(golden / family)
    assert backbone.exact
    for case in range(2):
        check(np.random.default_rng([chunk, case]), backbone, info, count=3, words=80)


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
        check(np.random.default_rng([9, chunk, case]), Hashed(case % 4), info, count=4, words=WORDS)


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
