"""`ssd` against `stepwise`: token for token and reveal for reveal, and never more forwards."""

import itertools

import numpy as np
import pytest

from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.masked.ssd import grow_tree, walk
from tests.decoders.masked.ssd_support import decode, reveals, same
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import Pair, decoder_settings, engine, run_all, toy_requests

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
    settings = decoder_settings("ssd", draft_length=3)
    decoder = engine(table(), table_info(), settings, SAMPLINGS["greedy"], rows=rows)
    outcomes = run_all(decoder, toy_requests(20, vocab_size=VOCAB - 1, longest=POSITIONS, share=0.8))
    assert decoder.stats.verified == sum(outcome.nfe + outcome.proposed for outcome in outcomes.values())
    assert decoder.stats.committed == sum(len(outcome.tokens) for outcome in outcomes.values())
    assert decoder.stats.steps < sum(outcome.nfe for outcome in outcomes.values()) or rows == 1


def test_room_counts_the_columns_of_all_nodes():
    settings = decoder_settings("ssd", draft_length=3, tree="mixed")
    decoder = engine(table(), table_info(), settings, SAMPLINGS["greedy"], rows=9, max_tokens=6 * 7 * 2)
    assert decoder.columns(7) == 6 * 7
    assert decoder.room(7) == 2


def completions(count, *, seed):
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        canvas = np.full(POSITIONS, -1, dtype=np.int32)
        prompt = int(rng.integers(0, 5))
        canvas[:prompt] = rng.integers(0, VOCAB - 1, prompt)
        requests.append(Request(index, sample_key(seed, str(index)), canvas))
    return requests


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


def test_ssd_has_no_rule_of_rejection():
    settings = decoder_settings("ssd")
    with pytest.raises(
        ValueError, match=r"sampling\.acceptance: 'rejection' needs the probabilities of a draft, and decoder 'ssd' has"
    ):
        settings.check_sampling(Sampling(acceptance="rejection"))
