"""Penalties, biases and bans: baselines have the law of transformers' processors, all lossless decoders give the same texts.

The reference runs `generation/logits_process.py` on the logits of the toy tables, token after token. Presence and frequency
penalties, which transformers lacks, are written as OpenAI defines them; bans in any order are written down a second time.
"""

from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from draftmill.decoders.base import HOLE, Request, RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.asks import NO_DRAFT, TARGET, Ask, Run, Span
from draftmill.decoders.engine.batch import Layout, Rule, pack
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.penalties import Penalties, PenaltyTracker
from draftmill.decoders.engine.samples import SlotTable
from draftmill.decoders.engine.shaping import _add_entries
from tests.decoders.constraints.test_laws import (
    CANVASES,
    DECODERS,
    LEFT_TO_RIGHT,
    LENGTH,
    LOSSY,
    VOCAB,
    decode_with,
    requests_of,
    setup,
    tables,
)
from tests.decoders.enumeration import law_of, total_variation
from tests.decoders.references.causal import PlainCausal
from tests.decoders.references.sampling import warp_of
from tests.decoders.support import texts, token_info

PENALTIES = {
    "repetition": Penalties(repetition=1.7),
    "reward": Penalties(repetition=0.6, presence=-0.4),
    "counted": Penalties(presence=0.8, frequency=0.5),
    "biases": Penalties(repetition=1.3, biases=((0, 1.5), (2, -0.7))),
    "one token less": Penalties(banned=((1,),)),
    "pairs": Penalties(ngram=2, frequency=0.2),
    "runs": Penalties(banned=((0, 1), (2, 2, 0), (1, 1))),
    "all": Penalties(1.2, 0.3, 0.1, 3, ((1, 0.9),), ((2, 0), (1, 2, 1))),
}
WARPS = {
    "plain": Sampling(),
    "min_p": Sampling(min_p=0.4),
    "all": Sampling(temperature=0.8, top_k=2, top_p=0.9, min_p=0.2),
    "nucleus": Sampling(top_p=0.8, min_p=0.3),
}
ALL = [(kind, name) for kind, decoders in DECODERS.items() for name in decoders]
LOSSLESS = [case for case in ALL if case[1] != "baseline"]


def processed(logits_V: Any, tokens: list[int], prompt: int, penalties: Penalties) -> Any:
    """The logits after transformers' processors, in its order, of a text of which `prompt` tokens were given."""
    ids_1L, scores_1V = torch.tensor([tokens]), logits_V.unsqueeze(0).clone()
    singles = [list(run) for run in penalties.banned if len(run) == 1]
    if penalties.biases:
        scores_1V = theirs.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in penalties.biases])(
            ids_1L, scores_1V
        )
    if penalties.repetition != 1.0:
        scores_1V = theirs.RepetitionPenaltyLogitsProcessor(penalties.repetition)(ids_1L, scores_1V)
    for token in range(VOCAB):
        count = tokens[prompt:].count(token)
        scores_1V[0, token] -= penalties.presence * (count > 0) + penalties.frequency * count
    before_1V = scores_1V
    if penalties.ngram:
        scores_1V = theirs.NoRepeatNGramLogitsProcessor(penalties.ngram)(ids_1L, scores_1V)
    runs = [list(run) for run in penalties.banned if len(run) > 1]
    if runs:
        scores_1V = theirs.NoBadWordsLogitsProcessor(runs)(ids_1L, scores_1V)
    if penalties.min_new:
        ends = torch.tensor(penalties.ends)
        scores_1V = theirs.MinNewTokensLengthLogitsProcessor(prompt, penalties.min_new, ends)(ids_1L, scores_1V)
    if singles:
        scores_1V = theirs.SuppressTokensLogitsProcessor([run[0] for run in singles])(ids_1L, scores_1V)
    if bool((scores_1V == -torch.inf).all()):  # transformers would draw from NaN; here the bans are lifted
        scores_1V = before_1V
        if singles:
            scores_1V = theirs.SuppressTokensLogitsProcessor([run[0] for run in singles])(ids_1L, scores_1V)
    return scores_1V


def warped(scores_1V: Any, sampling: Sampling) -> Any:
    """Probabilities after transformers' warpers, [V]."""
    warpers: list[Any] = [theirs.TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [theirs.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [theirs.TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    warpers += [theirs.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for warper in warpers:
        scores_1V = warper(torch.zeros(1, 0, dtype=torch.int64), scores_1V)
    return torch.softmax(scores_1V, -1)[0]


def causal_law(canvas: list[int], penalties: Penalties, sampling: Sampling) -> dict[tuple[int, ...], float]:
    model, holes = PlainCausal(copy(tables("causal")), length=LENGTH + 1, sampling=Sampling()), canvas.count(HOLE)
    prompt, law = canvas[: len(canvas) - holes], dict[tuple[int, ...], float]({(): 1.0})
    for _ in range(holes):
        longer = dict[tuple[int, ...], float]()
        for fill, mass in law.items():
            tokens = [*prompt, *fill]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tests.decoders.references.causal.log_law", lambda logits_1V, _: logits_1V)
                logits_V = model.law(tokens)
            chances = warped(processed(logits_V, tokens, len(prompt), penalties), sampling)
            longer |= {(*fill, token): mass * float(chances[token]) for token in range(VOCAB) if chances[token] > 0}
        law = longer
    return law


def own(request: Request, penalties: Penalties | None) -> Request:
    return replace(request, settings=RowSettings(penalties=penalties))


def plain_request(canvas: list[int], index: int = 0) -> Request:
    return Request(index, sample_key(0, str(index)), np.array(canvas, dtype=np.int32))


@pytest.mark.one_in(5, soak=3)
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", PENALTIES)
def test_a_causal_text_has_the_law_of_transformers_processors(name, warp):
    canvas, sampling = CANVASES["one hole"], WARPS[warp].model_copy(update={"acceptance": "rejection"})
    expected = causal_law(canvas, PENALTIES[name], sampling)
    request = own(plain_request(canvas), PENALTIES[name])
    law = law_of(setup("causal", sampling), DECODERS["causal"]["baseline"], [request], 0)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, expected) < 1e-7  # warpers of transformers sum in float32
    free = law_of(setup("causal", sampling), DECODERS["causal"]["baseline"], [own(request, None)], 0)
    assert total_variation(law, free) > 1e-3


def test_no_end_comes_before_its_time_as_in_transformers():
    canvas, penalties = [0, HOLE, HOLE, HOLE, HOLE], Penalties(min_new=2, ends=(2,))
    made, request = setup("causal", Sampling(acceptance="rejection"), stops=Stops((2,))), plain_request(canvas)
    law = law_of(made, DECODERS["causal"]["baseline"], [own(request, penalties)], 0)
    expected = dict[tuple[int, ...], float]()
    for fill, mass in causal_law(canvas, penalties, Sampling()).items():
        end = fill.index(2) + 1 if 2 in fill else len(fill)
        expected[fill[:end]] = expected.get(fill[:end], 0.0) + mass
    assert total_variation(law, expected) < 1e-7
    assert min(map(len, law)) == 3 and max(map(len, law)) == 4


def banned(token: int, position: int, token_at: dict[int, int], penalties: Penalties) -> bool:
    """Whether a token at a position makes a run that is banned, or that occurs twice."""
    filled = token_at | {position: token}

    def window(start: int, size: int) -> tuple[int, ...] | None:
        found = [filled.get(start + place) for place in range(size)]
        return None if None in found else tuple(found)  # type: ignore[arg-type]

    starts = range(-LENGTH, 2 * LENGTH)
    for run in penalties.banned:
        if any(start <= position < start + len(run) and window(start, len(run)) == run for start in starts):
            return True
    size = penalties.ngram
    around = [start for start in starts if start <= position < start + size and window(start, size)]
    return any(window(start, size) == window(other, size) for start in around for other in starts if other != start)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_row_that_knows_tokens_on_both_sides_draws_from_the_logits_written_down_here(name):
    penalties, rng = PENALTIES[name], np.random.default_rng(0)
    different = 0
    for _ in range(150):
        canvas = [int(token) for token in rng.integers(-1, VOCAB, LENGTH)]
        holes = [position for position, token in enumerate(canvas) if token == HOLE]
        if not holes:
            continue
        tracker = PenaltyTracker(penalties, canvas, token_info(VOCAB), in_order=False)
        rng.shuffle(holes)
        decided, drafted = dict[int, int](), dict[int, int]()
        given = [token for token in canvas if token != HOLE]
        for position in holes[1:]:
            (decided if rng.random() < 0.5 else drafted)[position] = int(rng.integers(VOCAB))
        for position, token in decided.items():
            tracker.decide(position, token)
        token_at = {position: token for position, token in enumerate(canvas) if token != HOLE} | decided | drafted
        logits_V = torch.from_numpy(rng.normal(size=VOCAB))
        news = [*decided.values(), *drafted.values()]
        plain = replace(penalties, ngram=0, banned=tuple(run for run in penalties.banned if len(run) == 1))
        expected_1V = processed(logits_V, [*given, *news], len(given), plain)
        bad = [token for token in range(VOCAB) if banned(token, holes[0], token_at, penalties)]
        if len(bad) < VOCAB:
            expected_1V[0, bad] = -torch.inf
        different += not torch.equal(expected_1V[0], logits_V)
        tokens, changes = tracker.entries(holes[0], list(drafted.items()))
        entries = torch.from_numpy(tokens.copy()).unsqueeze(1), torch.from_numpy(changes.copy()).unsqueeze(2)
        warp = replace(warp_of(1, VOCAB), token_ER=entries[0], change_3ER=entries[1])
        torch.testing.assert_close(
            warp.shape(logits_V.unsqueeze(0)), expected_1V, rtol=0, atol=1e-6
        )  # biases in float32
    assert different > 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("kind", "decoder"),
    [case for case in LOSSLESS if case[0] not in {"masked", "cached"} and case[1] not in {"jacobi", "several blocks"}],
)
def test_under_rejection_every_decoder_has_the_law_of_its_baseline(kind, decoder):
    sampling = Sampling(acceptance="rejection", min_p=0.05)
    for canvas in (
        [[0, HOLE, HOLE, HOLE]] if kind in LEFT_TO_RIGHT else [[0, HOLE, HOLE, HOLE], [HOLE, 1, HOLE, 2, HOLE]]
    ):
        request = own(plain_request(canvas), PENALTIES["all"])
        laws = [law_of(setup(kind, sampling), DECODERS[kind][which], [request], 0) for which in ("baseline", decoder)]
        assert sum(laws[1].values()) == pytest.approx(1.0, abs=1e-12)
        assert total_variation(*laws) < 1e-12


@pytest.mark.one_in(17, soak=3)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), WARPS["all"]], ids=str)
@pytest.mark.parametrize(("kind", "decoder"), LOSSLESS)
def test_coupled_every_decoder_gives_the_texts_of_its_baseline_in_mixed_batches(kind, decoder, sampling):
    each = [None, *PENALTIES.values()]
    requests = [own(request, each[request.index % len(each)]) for request in requests_of(kind, count=45)]
    expected = run(kind, "baseline", requests, sampling, rows=7)
    assert run(kind, decoder, requests, sampling, rows=4) == expected
    assert run(kind, "baseline", requests, sampling, rows=1) == expected
    assert run(kind, "baseline", [own(request, None) for request in requests], sampling, rows=7) != expected


def run(kind: str, name: str, requests: list[Request], sampling: Sampling, *, rows: int) -> Any:
    return texts(decode_with(setup(kind, sampling, rows=rows), DECODERS[kind][name], requests))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind in LOSSY for place in range(len(LOSSY[kind]))])
def test_decoders_that_reveal_several_tokens_at_once_keep_the_bans(kind, place):
    penalties = Penalties(banned=((0, 1), (1, 1), (2, 0)))  # whatever stands around a place, a token is left
    for request in requests_of(kind, count=40):
        outcome = decode_with(setup(kind, Sampling()), LOSSY[kind][place], [own(request, penalties)])[request.index]
        canvas, fill = request.canvas.tolist(), iter(outcome.tokens.tolist())
        text = [next(fill) if token == HOLE else token for token in canvas]
        for at, pair in enumerate(pairwise(text)):
            assert pair not in penalties.banned or HOLE not in canvas[at : at + 2]


def test_log_probabilities_are_those_of_the_model_itself():
    canvas, penalties = CANVASES["one hole"], PENALTIES["all"]
    outcome = decode_with(
        setup("causal", Sampling()), DECODERS["causal"]["baseline"], [own(plain_request(canvas), penalties)]
    )[0]
    model = PlainCausal(copy(tables("causal")), length=LENGTH + 1, sampling=Sampling())
    assert outcome.logprob == pytest.approx(model.logprob([0], outcome.tokens.tolist()), abs=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(("kind", "decoder"), [case for case in ALL if case[0] in {"causal", "any_subset"}])
def test_the_best_tokens_of_a_place_are_the_models_own_whatever_is_drawn(kind, decoder, acceptance):
    if acceptance == "rejection" and decoder in {"jacobi", "several blocks"}:
        return  # Jacobi decoding has no rejection rule
    each = [RowSettings(top_logprobs=2, penalties=PENALTIES["all"]), RowSettings(top_logprobs=20), RowSettings()]
    requests = requests_of(kind)
    asked = [replace(made, settings=replace(each[made.index % 3], token_logprobs=True)) for made in requests]
    sampling = Sampling(top_p=0.9, acceptance=acceptance)
    found = decode_with(setup(kind, sampling, rows=4), DECODERS[kind][decoder], asked)
    for made in asked:
        outcome, most = found[made.index], min(made.settings.top_logprobs, VOCAB)
        if not most:
            assert outcome.top_logprobs is None
            continue
        assert len(outcome.top_logprobs) == len(outcome.tokens) > 0
        for token, log_p, best in zip(outcome.tokens, outcome.token_logprobs, outcome.top_logprobs, strict=True):
            assert [one for one, _ in best] == [one for one, _ in sorted(best, key=lambda pair: -pair[1])]
            assert len(best) == most and dict(best).get(int(token), log_p) == pytest.approx(float(log_p), abs=1e-6)
            assert most < VOCAB or sum(np.exp(list(dict(best).values()))) == pytest.approx(1.0)


def test_what_is_sent_to_a_device_as_one_buffer_is_the_same():
    ask = Ask([1, 2], Span(2, 0, 0), Run(0, 2, 0, TARGET), [NO_DRAFT] * 2)
    samples: list[Any] = [SimpleNamespace(slot=0, tokens=[0] * 4, decided=0)]
    made: Any = pack(samples, [ask], SlotTable(Sampling(), 1), Layout(), Rule()).draws
    entries = [(np.array([3, 5]), np.arange(6.0).reshape(3, 2)), None]
    _add_entries(made, entries)
    sent = made.cut(torch.from_numpy(made.flat()))
    assert sent.token_ER.tolist() == made.token_ER.tolist() == [[3, 0], [5, 0]]
    assert (
        sent.change_3ER.tolist() == made.change_3ER.tolist() == [[[0, 0], [1, 0]], [[2, 1], [3, 1]], [[4, 0], [5, 0]]]
    )
