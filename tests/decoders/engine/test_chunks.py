"""Prompts in chunks beside samples that decode: the same bits under any budget of rows, and nobody waits for a long prompt."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from draftmill.decoders.base import HOLE, Outcome, Request
from draftmill.decoders.causal.settings import NgramDrafterSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.batch import Batch
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.model_runner import ModelRunner, Started
from draftmill.decoders.engine.scheduler import schedule_chunks
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_scorer
from tests.decoders.engine.test_prefix_cache import CASES, choices, infills, made, model, said
from tests.decoders.support import decoder_settings, engine, run_all, texts

AR = decoder_settings("autoregressive")
NGRAM = NgramDrafterSettings(kind="ngram", max_n=2, min_n=1)


def prompts(*lengths: int, new: int = 6, seed: int = 0, samples: int = 1) -> list[Request]:
    """Prompts of these lengths, the longer ones with a common beginning of 24 tokens; `samples` of each."""
    rng, found = np.random.default_rng(seed), list[Request]()
    head = rng.integers(10, 200, 24)
    for row, length in enumerate(lengths):
        tail = rng.integers(10, 200, length)
        canvas = np.concatenate([head[: max(length - 6, 0)], tail, np.full(new, HOLE)])
        canvas = (
            canvas[max(len(canvas) - length - new, 0) :] if length < 6 else np.append(canvas[:length], canvas[-new:])
        )
        for n in range(samples):
            key = nth_key(sample_key(seed, f"{row}"), n)
            found.append(Request(len(found), key, canvas.astype(np.int32)))
    return found


LENGTHS = (30, 1, 5, 33, 26, 9, 41)


def given(name: str) -> list[Request]:
    return infills(3) if CASES[name][0] == "asarm-tiny" else prompts(*LENGTHS, samples=2)


@cache
def whole(name: str, acceptance: str) -> tuple[dict[int, list], int]:
    """What is said without a budget, and the rows that it takes without common beginnings."""
    decoder = made(name, 4, None, acceptance=acceptance)
    found = said(run_all(decoder, given(name)))
    return found, decoder.stats.useful_rows + decoder.stats.prompt_rows_shared


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(99, soak=3)
@pytest.mark.slow
def test_texts_log_probabilities_and_counts_are_the_same_bits_under_any_budget(name, budget):
    expected, rows = whole(name, "coupled")
    decoder = made(name, 4, budget)
    assert said(run_all(decoder, given(name))) == expected
    # Every row of a prompt runs once or is taken over, in however many chunks.
    assert decoder.stats.useful_rows + decoder.stats.prompt_rows_shared == rows


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["speculative", "speculative, model", "specdiff", "assd", "s2d2"])
def test_drafts_that_are_judged_by_their_ratio_are_the_same_bits_too(name):
    expected, _ = whole(name, "rejection")
    assert said(run_all(made(name, 4, 7, acceptance="rejection"), given(name))) == expected


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_scores_of_given_texts_are_the_same_bits(budget):
    backbone, info = model("ar-tiny")

    def scored(prompt_rows: int | None) -> tuple[dict[int, list], int]:
        setup = Setup(
            backbone=backbone, info=info, sampling=Sampling(), max_rows=4, max_tokens=1 << 16, prompt_rows=prompt_rows
        )
        scorer = build_scorer(setup, AR, Estimate())
        outcomes = run_all(scorer, choices(2))
        assert {one.nfe for one in outcomes.values()} == {1}
        return said(outcomes), scorer.stats.useful_rows + scorer.stats.prompt_rows_shared

    assert scored(budget) == scored(None)


def watched(decoder, model: int = 0) -> list[list[tuple[int, int, int]]]:
    """Of each forward of a model, its samples: index, rows, and how many tokens were decided before it."""
    seen, start = list[list[tuple[int, int, int]]](), decoder.models[model].start

    def spied(b: Batch, **more):
        rows_B = np.bincount(b.rows.owner_N, minlength=len(b.rows.slots_G)).tolist()
        inside = {sample.slot: sample for sample in decoder.samples}
        some = [inside[slot] for slot in b.rows.slots_G.tolist()]
        seen.append([(one.request.index, rows, one.decided) for one, rows in zip(some, rows_B, strict=True)])
        return start(b, **more)

    decoder.models[model].start = spied
    return seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_a_forward_has_no_more_rows_of_prompts_than_the_budget(budget):
    decoder = made("autoregressive", 4, budget)
    seen = watched(decoder)
    run_all(decoder, prompts(*LENGTHS, samples=2))
    length_of = {request.index: len(request.canvas) - 6 for request in prompts(*LENGTHS, samples=2)}
    most = 0
    for forward in seen:
        in_prompts = sum(rows for index, rows, decided in forward if decided == length_of[index])
        assert in_prompts <= budget
        assert all(rows == 1 for index, rows, decided in forward if decided > length_of[index])
        most = max(most, in_prompts)
    assert most == budget


def test_prompts_that_join_others_keep_to_the_memory_of_a_forward():
    decoder = made("autoregressive", 8, None)
    decoder.plan = replace(decoder.plan, prompt_rows=40)
    decoder.admit(prompts(9, 9, 9, 9, 9, 9, new=30))
    while decoder.scheduler.line:
        decoder.step()
    seen = watched(decoder)
    decoder.admit([replace(request, index=request.index + 6) for request in prompts(97, 95, seed=5)])
    for _ in range(3):
        decoder.step()
    assert [len(forward) > 6 for forward in seen] == [True] * 3, "they join those that decode"
    assert max(sum(rows for _, rows, _ in forward) for forward in seen) == 6 + 40


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["autoregressive", "speculative, model", "multiblock_jacobi", "block_diffusion", "s2d2"]
)
def test_samples_that_decode_go_on_in_every_step_while_a_long_prompt_comes_in(name):
    decoder = made(name, 3, 8)
    one, two = prompts(9, 12, new=100)
    (long,) = prompts(97, seed=5)
    decoder.admit([one, two])
    while len(decoder.scheduler.line):
        decoder.step()
    decoder.admit([Request(2, long.key, long.canvas)])
    seen, steps = watched(decoder), 0
    while len(decoder.scheduler.line):
        before = {sample.request.index: sample.nfe for sample in decoder.samples}
        assert not decoder.step()
        after = {sample.request.index: sample.nfe for sample in decoder.samples}
        assert all(after[index] > before[index] for index in (0, 1))
        steps += 1
    assert steps >= 97 // 8
    assert all({0, 1} <= {index for index, _, _ in forward} for forward in seen)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.slow
def test_a_drafting_model_runs_a_long_prompt_in_chunks_too(acceptance):
    decoder = made("speculative, model", 3, 8, acceptance=acceptance)
    one, two = prompts(9, 12, new=110)
    long = Request(2, 5, prompts(97, seed=5)[0].canvas)
    decoder.admit([one, two])
    while len(decoder.scheduler.line):
        decoder.step()
    decoder.admit([long])
    drafting, verifying = watched(decoder, 1), watched(decoder)
    found = rest_of(decoder)
    of_long = [rows for forward in drafting for index, rows, _ in forward if index == 2]
    assert of_long[:13] == [8] * 12 + [1] and max(of_long[13:]) <= 4
    # In each step the others are verified.
    begun = next(
        number
        for number, forward in enumerate(verifying)
        if (2, True) in {(index, decided > 97) for index, _, decided in forward}
    )
    assert all({0, 1} <= {index for index, _, _ in forward} for forward in verifying[:begun])
    apart = made("speculative, model", 1, None, acceptance=acceptance)
    assert said(found) == said(run_all(apart, [one, two, long]))


def test_the_prompts_of_a_drafting_model_share_one_budget():
    decoder = made("speculative, model", 4, 16)
    drafting = watched(decoder, 1)
    # The target's columns are taken over, so all of them begin at once.
    run_all(decoder, prompts(30, samples=4))
    # Up to five rows are those of a sample that decodes.
    in_prompts = [sum(rows for _, rows, _ in forward if rows > 5) for forward in drafting]
    assert max(in_prompts) == 16


def test_a_window_is_drafted_with_one_wait(monkeypatch):
    seen, start, wait = list[str](), ModelRunner.start, Started.wait

    def started(self: ModelRunner, b, **more) -> Started:
        seen.append("verify" if self.is_target else "draft")
        return start(self, b, **more)

    def waited(self: Started):
        seen.append("read")
        return wait(self)

    monkeypatch.setattr(ModelRunner, "start", started)
    monkeypatch.setattr(Started, "wait", waited)
    decoder = made("speculative, model", 4, 64)
    decoder.admit(prompts(9, 12, new=12))
    decoder.step()
    assert seen[:5] == ["draft"] * 4 + ["read"] and seen[-2:] == ["verify", "read"]
    assert "draft" not in seen[5:]


def test_a_prompt_that_cannot_be_cut_runs_with_the_others_as_the_only_one_or_where_it_fits():
    rng, some = np.random.default_rng(2), list[Request]()
    for index, length in enumerate((20, 60, 16, 18, 40)):
        canvas = rng.integers(10, 200, length).astype(np.int32)
        canvas[rng.permutation(length)[: length // 2]] = HOLE
        some.append(Request(index, index, canvas))
    sizes = {request.index: int((request.canvas != HOLE).sum()) for request in some}
    assert list(sizes.values()) == [10, 30, 8, 9, 20]
    decoder = made("any_subset", 8, 24)
    seen = watched(decoder)
    decoder.admit(some)
    while decoder.active:
        decoder.step()
    begun = [[index for index, _, decided in forward if decided == sizes[index]] for forward in seen]
    assert [new for new in begun if new] == [[0], [1], [2, 3], [4]]
    # None of them has a forward of its own while others decode.
    inside = set[int]()
    for forward in seen:
        here = {index for index, _, _ in forward}
        assert inside - here <= begun_before(seen, forward), "a sample that decodes was left out"
        inside |= here


def begun_before(seen: list[list[tuple[int, int, int]]], forward: list[tuple[int, int, int]]) -> set[int]:
    """The samples that had ended before this forward: they take part in none that follows."""
    place = next(number for number, one in enumerate(seen) if one is forward)
    later = {index for one in seen[place:] for index, _, _ in one}
    return {index for one in seen[:place] for index, _, _ in one} - later


def alone(request: Request, name: str = "autoregressive") -> list:
    return said(run_all(made(name, 1, None), [request]))[request.index]


def rest_of(decoder) -> dict[int, Outcome]:
    found = dict[int, Outcome]()
    while decoder.active:
        found |= {outcome.index: outcome for outcome in decoder.step()}
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["autoregressive", "speculative, model", "block_diffusion"])
def test_slots_below_it_become_free_and_it_stays_where_it_is(name):
    short, other, long = *prompts(9, 12, new=12), Request(2, 7, prompts(190, seed=5)[0].canvas)
    decoder = made(name, 3, 4)
    decoder.admit([short, other, long])
    found, was_alone = dict[int, Outcome](), False
    while decoder.active:
        found |= {outcome.index: outcome for outcome in decoder.step()}
        if [sample.slot for sample in decoder.samples] == [2]:
            was_alone = was_alone or (0 < decoder.samples[0].cached < 180 and decoder.samples[0].nfe == 0)
    assert was_alone
    assert said(found) == {request.index: alone(request, name) for request in (short, other, long)}


def test_its_columns_stay_when_the_cache_grows():
    model("ar-tiny")[0].forget()
    long, longer = Request(0, 3, prompts(60)[0].canvas), Request(1, 4, prompts(200, seed=2)[0].canvas)
    decoder = made("autoregressive", 12, 8)
    decoder.admit([long])
    for _ in range(3):
        decoder.step()
    columns = decoder.backbone.cache.num_columns
    decoder.admit([longer, *(Request(2 + n, n, prompts(9)[0].canvas) for n in range(10))])
    assert decoder.backbone.cache.num_columns > columns and decoder.samples[0].cached == 24
    found = said(rest_of(decoder))
    assert (found[0], found[1]) == (alone(long), alone(longer))


def test_it_begins_again_after_a_failure_has_cleared_the_slots():
    short, long = prompts(9, 60)
    decoder = made("autoregressive", 2, 8)
    decoder.admit([short, long])
    decoder.step()
    start = decoder.target.start

    def fails(*_, **more):
        raise MemoryError

    decoder.target.start = fails
    with pytest.raises(MemoryError):
        decoder.step()
    decoder.target.start = start
    assert sorted(decoder.clear()) == [0, 1] and len(decoder.scheduler.line) == 0
    decoder.admit([long])
    assert said(rest_of(decoder))[1] == alone(long)


def test_a_chunk_of_a_prompt_that_is_not_finite_is_found_and_harms_no_other():
    """NaN in the columns of a half-run prompt makes its own text fail; the sample that shares its slots' forwards is fine."""
    short, long = prompts(9, 60, new=12)
    decoder = made("autoregressive", 2, 8)
    decoder.admit([short, long])
    for _ in range(3):
        decoder.step()
    slot = next(sample.slot for sample in decoder.samples if sample.request.index == 1)
    for layer in decoder.backbone.cache.layers_2SKWd:
        layer[:, slot, :, :4] = np.nan
    found = rest_of(decoder)
    assert found[1].error_kind == "nan_logits" and said(found)[0] == alone(short)
    decoder.clear()


def test_a_sample_takes_over_columns_as_soon_as_they_are_there():
    rng = np.random.default_rng(1)
    head, tail, end = rng.integers(10, 200, 32), rng.integers(10, 200, 64), np.full(6, HOLE)
    first = Request(0, 1, np.concatenate([head, tail, end]).astype(np.int32))
    second = Request(1, 2, np.concatenate([head, tail[::-1], end]).astype(np.int32))
    decoder = made("autoregressive", 2, 16)
    decoder.admit([first, second])
    starts = dict[int, int]()
    while decoder.active and len(starts) < 2:
        columns = {sample.request.index: sample.cached for sample in decoder.samples}
        decoder.step()
        for sample in decoder.samples:
            if sample.cached > columns.get(sample.request.index, 0):
                starts.setdefault(sample.request.index, columns[0])
    # The budget goes to the first prompt until it is in place, six steps; the columns are taken over before that.
    assert starts == {0: 0, 1: 32}
    assert (decoder.stats.prompt_rows_shared, decoder.stats.prompt_rows) == (0, 96)
    found = said(rest_of(decoder))
    assert found == {0: alone(first), 1: alone(second)}
    assert (decoder.stats.prompt_rows_shared, decoder.stats.prompt_rows) == (32, 2 * 96)


def test_the_chunks_of_a_prompt_are_one_evaluation_and_all_of_them_are_charged():
    short, long = Request(0, 0, prompts(9, new=30)[0].canvas), Request(1, 1, prompts(60, new=3)[0].canvas)
    decoder = made("autoregressive", 4, 10)
    decoder.target.clock.cut = lambda: [(0.0, 1.0), (0.0, 0.5)]
    decoder.admit([short])
    decoder.step()
    decoder.admit([long])
    found = rest_of(decoder)
    assert (found[0].nfe, found[1].nfe) == (30, 3)
    # Six forwards of ten rows, five of them chunks; their networks' seconds are those of the first forward.
    assert (found[0].prefill_s, found[1].prefill_s) == (1.0, 6.0)
    # The two samples share the forwards in which both have rows: eight of them.
    assert found[1].device_s == 8 * 1.5 / 2
    assert found[0].device_s + found[1].device_s == decoder.stats.forward_s == 30 * 1.5
    assert (found[0].batch_rows, found[1].batch_rows) == ((22 + 8 * 2) / 30, 2.0)
    assert decoder.stats.active_slot_steps == 22 + 8 * 2
    # Of four slots the first step counts one, since it is the first of all its samples.
    assert decoder.stats.slot_steps == 1 + 29 * 4


def test_samples_that_wait_for_the_budget_are_no_idle_slots():
    decoder = made("autoregressive", 3, 10)
    decoder.admit([Request(n, n, prompts(20, new=4, seed=n)[0].canvas) for n in range(3)])
    run = rest_of(decoder)
    assert len(run) == 3
    # The prompts run one after the other, in two chunks each: 1 + 1 + 2 + 2 + 3 + 3 of the slots that do not wait, and the rest.
    slots = [1, 1, 2, 2, 3, 3]
    assert decoder.stats.slot_steps == sum(slots) + 3 * (decoder.stats.steps - len(slots))


def test_lengths_chosen_by_time_learn_nothing_from_steps_with_prompts(monkeypatch):
    backbone, info = model("ar-tiny")
    settings = decoder_settings("speculative", k="auto", drafter=NGRAM)
    decoder = engine(backbone, info, settings, rows=4, max_tokens=1 << 16, prompt_rows=8, stops=Stops())
    seen, told = watched(decoder), list[bool]()
    monkeypatch.setattr(AutoLength, "note_step", lambda *given: told.append(given[-1] > 0))
    some = prompts(9, 60, 70, 40, 33, new=20)
    found = run_all(decoder, some)
    plain = made("autoregressive", 4, None, temperature=1.0)
    assert texts(found) == texts(run_all(plain, some))
    ends = {request.index: len(request.canvas) - 20 for request in some}
    has_prompts = [any(decided == ends[index] for index, _, decided in forward) for forward in seen]
    assert told == has_prompts
    # While others decode, every other step is one to learn from.
    beside = [
        any(decided > ends[index] for index, _, decided in forward) and has
        for forward, has in zip(seen, has_prompts, strict=True)
    ]
    assert sum(beside) > 5
    assert not any(one and two for one, two in pairwise(beside))


class Waiting:
    """A prompt of so many rows, some of them there."""

    def __init__(self, prompt: int, cached: int, scored: int = 0) -> None:
        self.prompt, self.cached, self.length, self.chunk, self.ask = prompt, cached, prompt + scored, 0, None


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("multiple", [1, 4, WHOLE])
def test_any_line_is_served_in_order_within_the_budget(multiple, scores):
    rng = np.random.default_rng(multiple)
    unit = max(multiple, 1)
    algorithm = Algorithm(
        decode=lambda sample: (_ for _ in ()),
        cut_multiple=multiple,
        scores=scores,
        reusable=lambda sample: sample.prompt if multiple == WHOLE else max(sample.prompt - 1, 0),
    )
    for _ in range(300):
        line: list = []
        for _ in range(int(rng.integers(1, 6))):
            prompt = int(rng.integers(1, 40))
            cached = 0 if multiple == WHOLE else int(rng.integers(0, prompt)) // unit * unit
            line.append(Waiting(prompt, cached, int(rng.integers(1, 9)) * scores))
        budget = int(rng.integers(1, 50))
        dealt = schedule_chunks(line, algorithm, budget)
        assert dealt == line[: len(dealt)] and dealt
        rows = [one.chunk or one.length - one.cached for one in dealt]
        uncut = 0 if dealt[0].chunk else rows[0]  # it runs whole since no more of it can run ahead
        assert sum(rows) <= budget or (len(dealt) == 1 and rows[0] <= max(unit, uncut))
        for one in dealt:
            assert one.chunk == 0 or (multiple != WHOLE and one.cached + one.chunk < one.prompt)
            assert (one.cached + one.chunk) % unit == 0 or not one.chunk
        # Nobody is left out who would have fitted, whole or in part.
        if len(dealt) < len(line):
            left, other = budget - sum(rows), line[len(dealt)]
            assert other.length - other.cached > left
            assert multiple == WHOLE or left < unit or other.cached + unit > other.prompt - 1


def test_memory_bounds_the_rows_of_prompts_too():
    decoder = made("autoregressive", 4, 50)
    decoder.plan = replace(decoder.plan, prompt_rows=6)
    seen, some = watched(decoder), prompts(30, 26)
    found = run_all(decoder, some)
    assert max(sum(rows for _, rows, decided in forward if decided in {30, 26}) for forward in seen) == 6
    assert said(found) == {request.index: alone(request) for request in some}
