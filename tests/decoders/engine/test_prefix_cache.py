"""Prompts that begin alike run once: the same bits as without, from whichever slot the columns come."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import HOLE, Outcome, Request, RowSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.decoders.engine.algorithm import WHOLE
from draftmill.decoders.engine.scheduler import PrefixCache
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, build_scorer
from tests.decoders.shipped import Case, facts, loaded, setup_of
from tests.decoders.support import decoder_settings, run_all
from tests.device import steps

NAMES = (
    *("autoregressive", "speculative", "speculative, model", "jacobi", "multiblock_jacobi", "any_subset"),
    *("assd", "assd, fused", "block_diffusion", "s2d2", "s2d2, fused"),
)
CAUSAL_BLOCKS = decoder_settings("block_diffusion", block_size=4, causal_cache=True, fused=True)
CASES: dict[str, Case] = {name: steps.CASES[name] for name in NAMES}
CASES["block_diffusion, causal"] = "block-tiny", CAUSAL_BLOCKS
CASES["specdiff"] = "ar-tiny", steps.CASES["specdiff"][1] | {"steps": 2}
COUNTS = (
    "finish",
    "nfe",
    "nfe_draft",
    "iterations",
    "proposed",
    "accepted",
    "accept_hist",
    "nfe_kinds",
    "logprob",
    "trace",
)


def model(name: str) -> tuple[Any, Any]:
    return loaded(name), facts(name)


def shots(
    rows: int, *, new: int, samples: int = 1, seed: int = 0, vocab_size: int = 200, log_ps: bool = True, long: int = 53
) -> list[Request]:
    """Questions after one of two long beginnings, some of them equal but for their last token."""
    rng, made = np.random.default_rng(seed), list[Request]()
    heads = [rng.integers(10, vocab_size, length) for length in (long, long - 16)]
    questions = [rng.integers(10, vocab_size, int(rng.integers(3, 20))) for _ in range(rows)]
    for row in range(rows):
        question = questions[row] if row % 3 else np.append(questions[row - 1][:-1], 9)
        canvas = np.concatenate([heads[row % 4 == 1], question, np.full(new, HOLE)]).astype(np.int32)
        settings = RowSettings(token_logprobs=log_ps)
        keys = [nth_key(sample_key(seed, f"{row}"), n) for n in range(samples)]
        made += [Request(row * samples + n, key, canvas, settings=settings) for n, key in enumerate(keys)]
    return made


def infills(rows: int, *, samples: int = 2) -> list[Request]:
    """Canvases with holes anywhere, and some that have the same given tokens in the same places and other tokens behind them."""
    rng, made = np.random.default_rng(1), list[Request]()
    for row in range(rows):
        canvas = rng.integers(10, 200, int(rng.integers(20, 50))).astype(np.int32)
        canvas[rng.random(len(canvas)) < 0.4] = HOLE
        longer = np.concatenate([canvas, np.full(3, HOLE, dtype=np.int32)])
        for n in range(samples):
            made.append(Request(2 * row * samples + n, nth_key(sample_key(0, f"{row}"), n), canvas))
            made.append(Request((2 * row + 1) * samples + n, nth_key(sample_key(1, f"{row}"), n), longer))
    return made


def made(name: str, rows: int, budget: int | None = None, **sampling: Any) -> Any:
    """A decoder of a case without a draft head, whose forwards have no more rows of prompts than the budget."""
    warp = Sampling.model_validate({"temperature": 0.9} | sampling)
    more: dict[str, Any] = {"max_tokens": 1 << 16, "trace": True, "prompt_rows": budget, "heads": None}
    return build_decoder(*setup_of(CASES[name], warp, rows, **more))


def decoder_of(name: str, rows: int, *, shares: bool, **sampling: Any) -> Any:
    return switched(made(name, rows, **sampling), shares=shares)


def switched(decoder: Any, *, shares: bool) -> Any:
    """A decoder whose samples take over columns, or none does."""
    if not shares:
        decoder.algorithm = decoder.scheduler.algorithm = replace(decoder.algorithm, reusable=lambda sample: 0)
    return decoder


def said(outcomes: dict[int, Outcome]) -> dict[int, list[Any]]:
    def numbers(found: Any) -> Any:
        return None if found is None else found.tolist()

    return {
        index: [numbers(one.tokens), numbers(one.token_logprobs), *(getattr(one, name) for name in COUNTS)]
        for index, one in outcomes.items()
    }


@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_texts_counts_and_log_probabilities_are_the_same_bits_as_without(name, rows):
    folder, _ = CASES[name]
    some = infills(5) if folder == "asarm-tiny" else shots(10, new=12, samples=2, log_ps=folder == "ar-tiny")
    plain, sharing = (decoder_of(name, rows, shares=shares) for shares in (False, True))
    assert said(run_all(sharing, some)) == said(run_all(plain, some))
    assert plain.stats.prompt_rows == plain.stats.prompt_rows_shared == 0
    prompts, shared = sharing.stats.prompt_rows, sharing.stats.prompt_rows_shared
    assert 0.4 * prompts < shared < prompts
    # What was taken over was not run, and nothing else was left out.
    assert plain.stats.useful_rows - sharing.stats.useful_rows == shared


def choices(contexts: int, *, ends: int = 4) -> list[Request]:
    """Five examples before each question, and several ends of each question to score, as evaluations of choices have them."""
    rng, made = np.random.default_rng(4), list[Request]()
    examples = rng.integers(10, 200, 150)
    for context in range(contexts):
        question = rng.integers(10, 200, int(rng.integers(15, 30)))
        for end in range(ends):
            tokens = np.concatenate([examples, question, rng.integers(10, 200, int(rng.integers(1, 5)))])
            index = context * ends + end
            made.append(Request(index, index, tokens.astype(np.int32), score_from=len(examples) + len(question)))
    return made


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_scores_of_choices_have_the_same_bits_and_run_a_fraction_of_the_rows(rows):
    backbone, info = model("ar-tiny")
    setup = Setup(backbone=backbone, info=info, sampling=Sampling(), max_rows=rows, max_tokens=1 << 16)
    settings, some = decoder_settings("autoregressive"), choices(8)
    plain, sharing = (switched(build_scorer(setup, settings, Estimate()), shares=shares) for shares in (False, True))
    assert said(run_all(sharing, some)) == said(run_all(plain, some))
    saved = plain.stats.useful_rows / sharing.stats.useful_rows
    # The examples run once, each question about once: its ends follow each other.
    assert saved > 3
    assert sharing.stats.prompt_rows_shared > 0.75 * sharing.stats.prompt_rows


@pytest.mark.parametrize("rows", [1, 4])
def test_scores_of_an_any_subset_model_share_what_is_given(rows):
    backbone, info = model("asarm-tiny")
    rng, some = np.random.default_rng(5), list[Request]()
    for row in range(4):
        tokens, scored = rng.integers(10, 200, 30), np.sort(rng.permutation(30)[:6])
        for other in range(3):
            tokens = tokens.copy()
            tokens[scored] = rng.integers(10, 200, 6)
            some.append(Request(3 * row + other, 0, tokens.astype(np.int32), scored=scored))
    setup = Setup(backbone=backbone, info=info, sampling=Sampling(), max_rows=rows, max_tokens=1 << 16)
    settings = decoder_settings("any_subset")
    plain, sharing = (switched(build_scorer(setup, settings, Estimate()), shares=shares) for shares in (False, True))
    assert said(run_all(sharing, some)) == said(run_all(plain, some))
    assert sharing.stats.prompt_rows_shared == 2 * 4 * 24


def rows_of(decoder: Any, requests: list[Request]) -> int:
    before = decoder.stats.useful_rows
    run_all(decoder, requests)
    return decoder.stats.useful_rows - before


def completion(*prompt: np.ndarray, index: int = 0, new: int = 1) -> Request:
    canvas = np.concatenate([*prompt, np.full(new, HOLE)]).astype(np.int32)
    return Request(index, sample_key(0, f"{index}"), canvas)


def pieces(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.integers(10, 200, length) for length in lengths]


def test_what_a_sample_that_has_left_wrote_is_used_until_it_is_overwritten():
    head, one, two, other = pieces(40, 8, 9, 60)
    decoder = decoder_of("autoregressive", 1, shares=True)
    assert rows_of(decoder, [completion(head, one)]) == 48
    assert rows_of(decoder, [completion(head, two)]) == 9
    assert rows_of(decoder, [completion(head, two)]) == 1, "the last row predicts, so it always runs"
    assert rows_of(decoder, [completion(other)]) == 60
    assert rows_of(decoder, [completion(head, one)]) == 48


def test_samples_that_come_together_wait_for_the_first_of_them():
    head, *ends = pieces(40, 8, 9, 10, 11)
    decoder = decoder_of("autoregressive", 8, shares=True)
    some = [completion(head, end, index=index) for index, end in enumerate(ends)]
    assert rows_of(decoder, some) == 40 + 8 + 9 + 10 + 11
    assert decoder.stats.steps == 2
    assert (decoder.stats.prompt_rows, decoder.stats.prompt_rows_shared) == (4 * 40 + 38, 3 * 40)


def test_a_short_beginning_is_not_worth_a_step_of_waiting():
    head, *ends = pieces(9, 30, 31, 32)
    decoder = decoder_of("autoregressive", 8, shares=True)
    assert rows_of(decoder, [completion(head, end, index=index) for index, end in enumerate(ends)]) == 3 * 9 + 93
    assert decoder.stats.steps == 1


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_a_slot_that_is_not_finite_is_wiped_and_nothing_is_taken_from_it(name):
    """What is hidden weighs 0, but 0 times NaN is NaN: neither a copy nor a leftover of such a slot may be used."""
    head, one, two, three = pieces(40, 8, 9, 10)
    if name == "any_subset":  # The whole prompt is taken over, or nothing of it.
        one = two = three = one[:0]
    broken, *others = (completion(head, end, index=n, new=6) for n, end in enumerate((one, two, three)))
    alone = {one.index: said(run_all(decoder_of(name, 1, shares=False), [one])) for one in others}
    decoder = decoder_of(name, 2, shares=True)
    decoder.admit([broken])
    decoder.step()
    for layer in decoder.backbone.cache.layers_2SKWd:
        layer[:, 0, :, len(head) - 1 :] = torch.nan
    (failed,) = decoder.step()
    assert failed.error_kind == "nan_logits"
    before = decoder.stats.prompt_rows_shared
    # The first one comes into the wiped slot, the second one copies from there.
    decoder.admit(others[:1])
    outcomes = {outcome.index: outcome for outcome in decoder.step()}
    assert decoder.stats.prompt_rows_shared == before
    decoder.admit(others[1:])
    while decoder.active:
        outcomes |= {outcome.index: outcome for outcome in decoder.step()}
    assert decoder.stats.prompt_rows_shared > before
    assert {index: said({index: outcomes[index]}) for index in alone} == alone
    decoder.clear()


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_a_slot_that_is_not_finite_is_wiped_before_columns_are_copied_into_it(name):
    head, two = pieces(40, 9)
    first = completion(head, np.full(12, HOLE))
    second = completion(two, np.full(12, HOLE), index=1)
    third = completion(head, np.full(12, HOLE), index=2)
    (alone,) = said(run_all(decoder_of(name, 1, shares=False), [third])).values()
    decoder = decoder_of(name, 2, shares=True)
    decoder.admit([first])
    decoder.step()
    decoder.admit([second])
    decoder.step()
    for layer in decoder.backbone.cache.layers_2SKWd:
        layer[:, 1] = torch.nan
    found = {outcome.index: outcome for outcome in decoder.step()}
    assert found[1].error_kind == "nan_logits" and len(found) == 1
    decoder.admit([third])
    before = decoder.stats.prompt_rows_shared
    while 2 not in found:
        found |= {outcome.index: outcome for outcome in decoder.step()}
    assert decoder.stats.prompt_rows_shared > before
    assert said(found)[2] == alone
    decoder.clear()


def test_a_cleared_decoder_has_forgotten_all_columns():
    head, one = pieces(40, 8)
    decoder = decoder_of("autoregressive", 2, shares=True)
    decoder.admit([completion(head, one, new=5)])
    decoder.step()
    decoder.clear()
    assert rows_of(decoder, [completion(head, one)]) == 48


@pytest.mark.parametrize("multiple", [1, 4, WHOLE])
def test_the_table_finds_what_a_plain_search_finds(multiple):
    rng, num_slots = np.random.default_rng(multiple), 5
    for _ in range(60):
        table, plain = PrefixCache(multiple), dict[int, tuple[list[int], int]]()
        table.resize(num_slots, 12)
        for _ in range(12):
            slot, prompt = int(rng.integers(num_slots)), rng.integers(0, 2, int(rng.integers(2, 13)))
            most = len(prompt) if multiple == WHOLE else len(prompt) - 1
            left = taken(multiple, prompt.tolist(), most, *plain.get(slot, ([], 0)))
            assert table.insert(slot, prompt, most) == left
            plain[slot] = prompt.tolist(), left
            best = max((taken(multiple, prompt.tolist(), most, *plain[one]) for one in plain if one != slot), default=0)
            columns, source = table.find(slot, most)
            assert columns == best
            assert not best or best == taken(multiple, prompt.tolist(), most, *plain[source])
            match int(rng.integers(3)):
                case 0:
                    table.note_held(slot, len(prompt))
                    plain[slot] = prompt.tolist(), len(prompt)
                case 1:
                    table.forget(slot)
                    plain[slot] = prompt.tolist(), 0


def taken(multiple: int, prompt: list[int], most: int, other: list[int], held: int) -> int:
    common = next(
        (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other))
    )
    common = min(common, most, held)
    if multiple == WHOLE:
        return common if prompt == other and held == len(prompt) else 0
    return common - common % multiple


def test_a_prompt_that_runs_now_is_pending_and_those_that_differ_at_once_are_not():
    table = PrefixCache(1)
    table.resize(3, 8)
    for slot, prompt in enumerate(([1, 2, 3, 4], [1, 2, 3, 5], [6, 2, 3, 4])):
        table.insert(slot, np.array(prompt), 3)
    assert table.find_pending(1, 3, [0]) == (3, 0)
    assert table.find_pending(2, 3, [0, 1]) == (0, -1) and table.find_pending(0, 3, []) == (0, -1)
    assert table.find(1, 3) == (0, -1)
    table.note_held(0, 2)
    assert table.find(1, 3) == (2, 0)


def test_a_cache_that_shrinks_keeps_what_fits():
    table = PrefixCache(1)
    table.resize(2, 8)
    for slot, length in enumerate((8, 4)):
        table.insert(slot, np.arange(1, length + 1), length - 1)
        table.note_held(slot, length)
    table.resize(3, 6)
    table.insert(2, np.arange(1, 6), 4)
    assert table.find(2, 4) == (4, 1), "the first prompt was cut off"
    table.resize(1, 6)
    assert table.find(0, 4) == (0, -1)
