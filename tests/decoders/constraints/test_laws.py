"""What decoders draw under constraints: the sequential law among texts that match, and the same texts by all lossless decoders.

The law is written down a second time by brute force: a token may come if any text that matches begins so (in any order: has these
tokens in these places). The expressions forbid most texts, and a control breaks the automaton.
"""

import re
from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftmill.decoders.base import HOLE, JOB_SETTINGS, ModelInfo, Request, RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.constraints.automaton import Automaton, Vocabulary, automaton_of
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.enumeration import fills, law_of, total_variation
from tests.decoders.references.any_subset import PlainModel
from tests.decoders.references.causal import PlainCausal
from tests.decoders.references.table import TableBackbone
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, run_all, texts, toy_heads

VOCAB, MASK, LENGTH = 3, 3, 5
SPELLED = [b"a", b"b", b"c", None]
EXPRESSION = "(ab|ba|cc?)*"
REJECTION = Sampling(acceptance="rejection")
MASKED, LEFT_TO_RIGHT = {"masked", "cached", "blocks", "masks"}, {"causal", "blocks", "masks"}
WARPS = [Sampling(temperature=0.0), Sampling(temperature=0.8), Sampling(top_p=0.7), Sampling(top_k=2)]


@cache
def automaton(expression: str = EXPRESSION, vocab_size: int = VOCAB) -> Automaton:
    return automaton_of(expression, Vocabulary(SPELLED[:vocab_size]))


def matches(tokens, expression: str = EXPRESSION) -> bool:
    return re.fullmatch(expression, "".join("abc"[token] for token in tokens)) is not None


def setup(kind: str, sampling: Sampling, *, rows: int = 1, stops: Stops | None = None) -> Setup:
    more: dict = {}
    if kind == "any_subset":
        info = ModelInfo("table", VOCAB, None, None, "any_subset", 0)
        more = {"backbone": copy(tables("any_subset")), "heads": toy_heads(VOCAB)}
    elif kind == "causal":
        info = ModelInfo("token_table", VOCAB, None, None, "causal", 0)
        more = {"backbone": copy(tables("causal")), "drafter": copy(tables("drafter")), "drafter_info": info}
    else:
        family = {"blocks": "blocks", "masks": "causal"}.get(kind, "masked")
        info = ModelInfo("table", VOCAB + 1, MASK, None, family, 0, (MASK,))  # type: ignore[arg-type]
        more = {"backbone": copy(tables("masked"))}
    return Setup(
        **more, info=info, sampling=sampling, max_rows=rows, max_tokens=1 << 20, stops=stops, has_constraints=True
    )


@cache
def tables(kind: str):
    if kind == "any_subset":
        return TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=5)
    return TokenTable(
        vocab_size=VOCAB + (kind == "masked"), num_positions=LENGTH + 1, seed=6 if kind == "drafter" else 5
    )


def request(
    kind: str, canvas: list[int], index: int = 0, *, ends: tuple[int, ...] = (), expression: str = EXPRESSION
) -> Request:
    holes = sum(token == HOLE and (not place or canvas[place - 1] != HOLE) for place, token in enumerate(canvas))
    made = automaton(expression, VOCAB + (kind in MASKED))
    settings = RowSettings(constraint=Constraint((made,) * holes, ends))
    return Request(index, sample_key(0, str(index)), np.array(canvas, dtype=np.int32), settings=settings)


def filled(canvas: list[int], fill: tuple[int, ...]) -> list[list[int]]:
    rest, holes = iter(fill), list[list[int]]()
    for place, token in enumerate(canvas):
        if token != HOLE:
            continue
        if not place or canvas[place - 1] != HOLE:
            holes.append([])
        holes[-1].append(next(rest))
    return holes


CANVASES = {"one hole": [0, HOLE, HOLE, HOLE, HOLE], "two holes": [HOLE, HOLE, 1, HOLE, HOLE], "four": [HOLE] * 4 + [2]}
SHORT = [[0, HOLE, HOLE, HOLE], [HOLE, HOLE, 1, HOLE]]
DECODERS: dict[str, dict] = {
    "any_subset": {
        "baseline": decoder_settings("any_subset"),
        "assd": decoder_settings("assd", k=3),
        "assd, n-grams": decoder_settings("assd", k=2, drafter="ngram"),
        "assd, one pass": decoder_settings("assd", k=2, fused="rows"),
        "assd, two rows": decoder_settings("assd", k=3, fused="rows", rows="ends"),
    },
    "causal": {
        "baseline": decoder_settings("autoregressive"),
        "n-grams": decoder_settings("speculative", k=2, drafter={"kind": "ngram", "max_n": 2, "min_n": 1}),
        "model": decoder_settings("speculative", k=2, drafter={"kind": "model", "path": "drafter"}),
        "jacobi": decoder_settings("jacobi", block_size=3),
        "several blocks": decoder_settings("multiblock_jacobi", block_size=2, blocks=2),
    },
    "masks": {
        "baseline": decoder_settings("autoregressive"),
        "masks": decoder_settings("speculative", k=2, drafter={"kind": "masks"}),
    },
    "masked": {
        "baseline": decoder_settings("stepwise"),
        "ssd": decoder_settings("ssd", draft_length=2),
        "ssd, mixed": decoder_settings("ssd", draft_length=3, tree="mixed"),
    },
    "cached": {
        "baseline": decoder_settings("stepwise", cache="dual_strict", refresh=2, block_length=2),
        "ssd": decoder_settings("ssd", draft_length=2, cache="dual_strict", refresh=2, block_length=2),
    },
    "blocks": {
        "baseline": decoder_settings("block_diffusion", block_size=1, causal_cache=True),
        "s2d2": decoder_settings("s2d2", block_size=3, causal_cache=True, causal_draft=True),
        "s2d2, fused": decoder_settings("s2d2", block_size=3, causal_cache=True, fused=True),
    },
}
CASES = [(kind, name) for kind, decoders in DECODERS.items() for name in decoders]
JUDGING = [
    (kind, name)
    for kind, name in CASES
    if kind in {"any_subset", "causal", "blocks", "masks"} and name not in {"baseline", "jacobi", "several blocks"}
]
LOSSY: dict[str, list] = {
    "any_subset": [decoder_settings("parallel")],
    "masked": [
        decoder_settings("stepwise", tokens_per_step=3),
        decoder_settings("threshold", tau=0.2),
        decoder_settings("factor", factor=4.0),
    ],
    "blocks": [
        decoder_settings("block_diffusion", block_size=3, schedule="dynamic", tau=0.2),
        decoder_settings("s2d2", block_size=3),
    ],
}


def conditionals(kind: str, canvas: list[int]) -> dict[tuple[int, ...], float]:
    """The law of filling from left to right: at each hole the model's distribution among tokens that a good text has there."""
    order = sorted(range(len(canvas)), key=lambda place: canvas[place] == HOLE)
    prompt, law = len(canvas) - canvas.count(HOLE), dict[tuple[int, ...], float]()
    good = [fill for fill in fills(VOCAB, canvas.count(HOLE)) if all(map(matches, filled(canvas, fill)))]
    for fill in good:
        tokens, mass = [canvas[position] for position in order[:prompt]], 1.0
        for count, token in enumerate(fill):
            if kind == "causal":
                causal = PlainCausal(copy(tables(kind)), length=LENGTH + 1, sampling=Sampling())
                log_V = causal.law(tokens)
            else:
                more: dict = {"sampling": Sampling(), "suppressed": ()}
                plain = PlainModel(copy(tables(kind)), order=order, num_prompt=prompt, **more)
                log_V = plain.law(plain.hidden(tokens, [(prompt + count, prompt + count)])[0])
            allowed = {other[count] for other in good if other[:count] == fill[:count]}
            mass *= float(log_V[token].exp()) / sum(float(log_V[other].exp()) for other in allowed)
            tokens.append(token)
        law[fill] = mass
    return law


@pytest.mark.parametrize(
    ("kind", "canvas"), [*(("any_subset", canvas) for canvas in CANVASES.values()), ("causal", CANVASES["one hole"])]
)
def test_the_baseline_has_the_law_of_the_model_among_what_can_still_match(kind, canvas):
    law = law_of(setup(kind, REJECTION), DECODERS[kind]["baseline"], [request(kind, canvas)], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, conditionals(kind, canvas)) < 1e-12
    assert len(law) < 0.5 * VOCAB ** canvas.count(HOLE)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "name"), JUDGING)
def test_under_rejection_every_decoder_has_the_law_of_its_baseline(kind, name):
    for canvas in SHORT if kind == "any_subset" else SHORT[:1]:
        laws = [
            law_of(setup(kind, REJECTION), DECODERS[kind][which], [request(kind, canvas)], 0)
            for which in ("baseline", name)
        ]
        assert sum(laws[1].values()) == pytest.approx(1.0, abs=1e-12)
        assert total_variation(*laws) < 1e-12


def requests_of(
    kind: str, *, count: int = 24, ends: tuple[int, ...] = (), expression: str = EXPRESSION
) -> list[Request]:
    rng, made = np.random.default_rng(1), list[Request]()
    while len(made) < count:
        length, tokens = int(rng.integers(2, LENGTH + 1)), rng.integers(0, VOCAB, LENGTH)
        prompt = int(rng.integers(1, length))
        canvas = [HOLE if place >= prompt else int(tokens[place]) for place in range(length)]
        if kind not in LEFT_TO_RIGHT:
            canvas = [HOLE if rng.random() < 0.7 else int(token) for token in tokens]
        candidate = request(kind, canvas, len(made), ends=ends, expression=expression)
        constraint = candidate.settings.constraint
        holes = [len(hole) for hole in filled(canvas, (0,) * canvas.count(HOLE))]
        if holes and constraint is not None and constraint.problem(holes) is None:
            made.append(candidate)
    return made


@pytest.mark.one_in(5, soak=3)
@pytest.mark.parametrize("sampling", WARPS, ids=str)
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1] != "baseline"])
def test_coupled_every_decoder_gives_the_texts_of_its_baseline_and_all_match(kind, name, sampling):
    requests = requests_of(kind)
    expected = run(kind, "baseline", requests, sampling, rows=7)
    assert run(kind, name, requests, sampling, rows=3) == expected
    for made in requests:
        canvas = made.canvas.tolist()
        assert all(map(matches, filled(canvas, tuple(expected[made.index]))))
    free = [Request(made.index, made.key, made.canvas) for made in requests]
    assert run(kind, "baseline", free, sampling, rows=7) != expected, "the model does not do it by itself"


def run(kind: str, name: str, requests: list[Request], sampling: Sampling, *, rows: int, **more):
    made = setup(kind, sampling, rows=rows, **more)
    return texts(decode_with(made, DECODERS[kind][name], requests))


def decode_with(made: Setup, settings, requests: list[Request]):
    return run_all(build_decoder(made, settings), requests)


@pytest.mark.parametrize("kind", ["causal", "masked", "blocks"])
def test_a_text_may_end_early_where_it_matches_and_is_never_cut_short(kind):
    """The token c ends texts. Whatever the limit, what is before the end matches."""
    expression, ends = "(ab|ba)+", (2,)
    requests, ended = requests_of(kind, count=40, ends=ends, expression=expression), 0
    if kind == "masked":
        holes = [np.flatnonzero(made.canvas == HOLE) for made in requests]
        requests = [
            made
            for made, places in zip(requests, holes, strict=True)
            if 1 < len(places) < len(made.canvas) and places[0] == len(made.canvas) - len(places)
        ]
    assert len(requests) > 5
    for name, settings in DECODERS[kind].items():
        made = setup(kind, Sampling(), rows=5, stops=Stops(ends))
        outcomes = decode_with(made, settings, requests)
        for outcome in outcomes.values():
            tokens = outcome.tokens.tolist()
            ended += tokens[-1] == 2
            assert matches(tokens[:-1] if tokens[-1] == 2 else tokens, expression), name
    assert ended


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "settings"), [(kind, each) for kind, all_of in LOSSY.items() for each in all_of])
def test_decoders_that_reveal_several_tokens_at_once_keep_the_constraint(kind, settings):
    requests, committed = requests_of(kind, count=40), 0
    for made in requests:
        outcome = decode_with(setup(kind, Sampling()), settings, [made])[made.index]
        canvas = made.canvas.tolist()
        assert all(map(matches, filled(canvas, tuple(outcome.tokens.tolist()))))
        committed = max(committed, len(outcome.accept_hist) - 1)
    assert committed > 1, "some step decided several tokens"


def test_a_draft_head_drafts_for_samples_without_a_constraint_alone():
    """Its drafts would know nothing of the constraint."""
    bound, settings = requests_of("blocks"), DECODERS["blocks"]["s2d2, fused"]
    free = [replace(made, index=len(bound) + made.index, settings=JOB_SETTINGS) for made in bound]
    headed, bare = (
        decode_with(replace(setup("blocks", Sampling(), rows=5), heads=heads), settings, bound + free)
        for heads in (toy_heads(VOCAB + 1), None)
    )
    assert texts(headed) == texts(bare)
    same = [(headed[index].nfe, headed[index].accepted) == (bare[index].nfe, bare[index].accepted) for index in bare]
    by_index = dict(zip(bare, same, strict=True))
    assert all(by_index[made.index] for made in bound) and not all(by_index[made.index] for made in free)


@pytest.mark.slow
def test_samples_with_and_without_a_constraint_share_a_batch_and_do_not_notice():
    for kind, decoders in DECODERS.items():
        bound = requests_of(kind)
        free = [Request(made.index + 100, made.key + 1, made.canvas) for made in bound]
        mixed = [each for pair in zip(bound, free, strict=True) for each in pair]
        for name in decoders:
            alone = run(kind, name, bound, Sampling(), rows=1) | run(kind, name, free, Sampling(), rows=1)
            assert run(kind, name, mixed, Sampling(), rows=5) == alone


def test_log_probabilities_are_those_of_the_model_itself():
    """The text of a constrained sample, scored without one."""
    kind, canvas = "causal", CANVASES["one hole"]
    made = request(kind, canvas)
    outcome = decode_with(setup(kind, Sampling()), DECODERS[kind]["baseline"], [made])[0]
    model = PlainCausal(copy(tables(kind)), length=LENGTH + 1, sampling=Sampling())
    assert outcome.logprob == pytest.approx(model.logprob([0], outcome.tokens.tolist()), abs=1e-9)


def test_without_the_automaton_the_same_requests_do_not_match(monkeypatch):
    """The control: an automaton that allows every token lets other texts pass, which fail their rows."""
    requests = requests_of("any_subset")
    monkeypatch.setattr(Automaton, "between", lambda self, before_S, after_S: np.ones(self.vocab_size, dtype=np.bool_))
    outcomes = decode_with(setup("any_subset", Sampling(), rows=3), DECODERS["any_subset"]["assd"], requests)
    assert {outcome.error_kind for outcome in outcomes.values()} == {None, "bad_constraint"}


def test_a_length_that_no_text_has_is_refused_before_decoding():
    constraint = Constraint((automaton("(aa)+"),))
    assert constraint.problem([3]) == "no text of exactly 3 tokens matches it (hole 0)"
    assert constraint.problem([4]) is None
    ending = Constraint((automaton("aaa+b"),), ends=(2,))
    assert ending.problem([3]) == "the shortest text that matches it has 4 tokens, but 3 may be generated"
    assert ending.problem([9]) is None
