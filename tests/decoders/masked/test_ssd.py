"""`ssd` against `stepwise`: token for token and reveal for reveal, in random settings, in fewer forwards.

`make soak` plays 40 times as many cases.
"""

import itertools

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.masked.ssd import Predictions, grow_tree, walk
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.ssd_support import decode, reveals, same
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import Pair, decoder_settings, engine, prompts, run_all, toy_requests
from tests.runs.jobs_of_tests import soak

VOCAB, POSITIONS = 4, 7
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.8),
    "nucleus": Sampling(top_p=0.7),
}


def table(seed=0, spread=1.5):
    return TokenTable(vocab_size=VOCAB, num_positions=POSITIONS, seed=seed, spread=spread)


def table_info(shift=0):
    return ModelInfo("table", VOCAB, VOCAB - 1, None, "masked", 0, (VOCAB - 1,), shift)


def scripted(seed=0):
    """A model that never changes its mind: what it says of a position depends on nothing else."""
    model = table(seed)
    model.table_PXV[:] = model.table_PXV[:, :1]
    return model


def masks_only(length):
    return Request(0, 7, np.full(length, -1, dtype=np.int32))


@pytest.mark.one_in(5, soak=2)
@pytest.mark.parametrize("block_length", [None, 1, 3])
@pytest.mark.parametrize("draft_length", range(1, 9))
def test_a_model_that_keeps_its_mind_gives_all_drafts_and_one_token_more(draft_length, block_length):
    """The bound of the paper, N / (N + 1) fewer forwards, plus the one forward that drafts first; which also gives a token."""
    settings = decoder_settings("ssd", block_length=block_length, draft_length=draft_length)
    for length in (1, 4, POSITIONS):
        requests = [masks_only(length)]
        (outcome,) = decode(scripted(), table_info(), settings, SAMPLINGS["sampled"], requests, rows=1).values()
        assert outcome.nfe == 1 + -(-(length - 1) // (draft_length + 1))
        assert outcome.accepted == length - outcome.nfe
        assert outcome.proposed >= outcome.accepted


@pytest.mark.parametrize("cache", ["prefix", "dual_strict"])
@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_a_refresh_costs_a_cached_block_no_forward_of_its_own(draft_length, cache):
    """Better than the plain scheme, whose refresh runs the root alone: 1 + ceil(3 / (N + 1)) forwards for each block of four.
    Only the first block has one more, which drafts."""
    settings = decoder_settings("ssd", block_length=3, draft_length=draft_length, cache=cache)
    (outcome,) = decode(scripted(), table_info(), settings, SAMPLINGS["greedy"], [masks_only(6)], rows=1).values()
    assert outcome.nfe == 1 + -(-2 // (draft_length + 1)) + -(-3 // (draft_length + 1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft_length", [1, 2, 3])
@pytest.mark.parametrize(("block_length", "refresh"), [(None, 3), (2, 3), (3, 4), (7, 2), (2, 7)])
def test_drafts_end_at_a_refresh_and_not_at_a_block_before_it(block_length, refresh, draft_length):
    """Between two refreshes every forward gives all drafts and one token more; only the very first has none."""
    settings = decoder_settings(
        "ssd", block_length=block_length, draft_length=draft_length, cache="dual_strict", refresh=refresh
    )
    (outcome,) = decode(
        scripted(), table_info(), settings, SAMPLINGS["greedy"], [masks_only(POSITIONS)], rows=1
    ).values()
    spans = [min(refresh, POSITIONS - first) for first in range(0, POSITIONS, refresh)]
    assert outcome.nfe == 1 + sum(-(-(span - (at == 0)) // (draft_length + 1)) for at, span in enumerate(spans))


def test_the_mixed_tree_gets_further_where_two_drafts_came_in_the_wrong_order():
    totals = {}
    for tree in ("chain", "mixed"):
        settings = decoder_settings("ssd", block_length=None, draft_length=4, tree=tree)
        outcomes = decode(
            table(3, spread=1.0),
            table_info(),
            settings,
            SAMPLINGS["greedy"],
            toy_requests(60, vocab_size=VOCAB - 1, longest=POSITIONS, seed=8, share=1.0),
            rows=16,
        )
        totals[tree] = sum(outcome.nfe for outcome in outcomes.values())
    assert totals["mixed"] < totals["chain"]


@pytest.mark.parametrize("chosen", list(itertools.permutations([3, 1, 4])))
def test_a_mixed_tree_is_walked_in_whatever_order_its_drafts_come(chosen):
    """Two orders of the same drafts meet in one canvas, and the walk goes on from there."""
    drafts, holes = [(3, 0), (1, 1), (4, 2)], [1, 3, 4, 6]

    def likely(gone):
        return [draft for draft in drafts if draft not in gone]

    nodes = grow_tree(holes, likely, 7, 3, mixed=True)
    assert len({node.drafts for node in nodes}) == len(nodes) == 8, "every set of drafts"
    assert all(len(node.drafts - nodes[node.before].drafts) == 1 for node in nodes[1:])
    tokens, picks = dict(drafts), []
    for node in nodes:
        place = next((place for place in chosen if (place, tokens[place]) not in node.drafts), 6)
        picks.append([[(-1.0, place, tokens.get(place, 0), 0.0)]])
    news, last = walk(nodes, picks)
    assert [place for _, place, *_ in news] == [*chosen, 6]
    assert nodes[last].drafts == set(drafts)
    chain = grow_tree(holes, likely, 2, 2, mixed=False)
    assert [sorted(node.gone) for node in chain] == [[], [1], [0, 1]]


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_sequence_forwards_are_counted(rows):
    decoder = engine(table(), table_info(), decoder_settings("ssd", draft_length=3), SAMPLINGS["greedy"], rows=rows)
    requests = toy_requests(20, vocab_size=VOCAB - 1, longest=POSITIONS, share=0.8)
    outcomes = run_all(decoder, requests)
    counted = sum((one.nfe + one.proposed) * len(requests[index].canvas) for index, one in outcomes.items())
    assert decoder.stats.useful_rows == counted
    assert decoder.stats.committed == sum(len(outcome.tokens) for outcome in outcomes.values())
    assert decoder.stats.steps < sum(outcome.nfe for outcome in outcomes.values()) or rows == 1


def test_room_counts_the_columns_of_all_nodes():
    settings = decoder_settings("ssd", draft_length=3, tree="mixed")
    decoder = engine(table(), table_info(), settings, SAMPLINGS["greedy"], rows=9, max_tokens=6 * 7 * 2)
    assert decoder.columns(7) == 6 * 7
    assert decoder.room(7) == 2


def completions(count, *, seed):
    lengths = np.random.default_rng(seed).integers(0, 5, count)
    return prompts([(length, POSITIONS) for length in lengths], vocab_size=VOCAB - 1, seed=seed)


def cut(tokens, stops):
    """Where a finished completion ends: after the first end token, or after a stop string that comes before it."""
    eos = next((place for place, token in enumerate(tokens) if token in stops.ids), len(tokens))
    keep = stops.text.find(tokens[:eos], 0) if stops.text else None
    if keep is not None:
        return tokens[:keep], "stop"
    return tokens[: eos + 1], "eos" if eos < len(tokens) else "length"


@pytest.mark.one_in(7)
@pytest.mark.parametrize("stops", [Stops(ids=(1,)), Stops(text=Pair(2, 0)), Stops(ids=(1,), text=Pair(2, 0))])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_a_completion_ends_where_all_before_its_end_is_revealed(stops, sampling):
    requests, model, seen = completions(40, seed=4), table(4), set()
    for block_length in (2, None):
        base = decoder_settings("stepwise", block_length=block_length)
        whole = decode(model, table_info(), base, SAMPLINGS[sampling], requests, rows=4)
        ended = decode(model, table_info(), base, SAMPLINGS[sampling], requests, rows=4, stops=stops)
        for index, outcome in ended.items():
            assert (outcome.tokens.tolist(), outcome.finish) == cut(whole[index].tokens.tolist(), stops)
            assert reveals(outcome) == reveals(whole[index])[: len(reveals(outcome))]
            seen |= {outcome.finish}
        assert sum(outcome.nfe for outcome in ended.values()) < sum(outcome.nfe for outcome in whole.values())
        settings = decoder_settings("ssd", block_length=block_length, draft_length=4)
        same(
            decode(model, table_info(), settings, SAMPLINGS[sampling], requests, rows=4, stops=stops),
            ended,
        )
    assert len(seen) >= 2


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
        positions_NW, tokens_NW = self._seen(slots_N, visible_NW)
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
    sampling = SAMPLINGS[str(rng.choice(list(SAMPLINGS)))]
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
    for case in range(30):
        rng = np.random.default_rng([chunk, case])
        info = ModelInfo("table", WORDS + 1, WORDS, None, "masked", 0, (WORDS,), case // 4 % 2)
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
