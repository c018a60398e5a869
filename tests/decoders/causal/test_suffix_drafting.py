"""With `drafter: suffix`, a row's text does not depend on the texts in the index, nor on which rows put them there."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import HOLE, Outcome, Request
from draftmill.decoders.causal.settings import SuffixDrafterSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import nth_key, sample_key
from tests.decoders.support import decoder_settings, engine, run_all

FOLDER = Path(draftmill.decoders.builtin.__path__[0]) / "ar-tiny"
SUFFIX = SuffixDrafterSettings(kind="suffix", max_spec_factor=2.0)
FORGETFUL = SuffixDrafterSettings(kind="suffix", max_spec_factor=2.0, max_tokens=1 << 10)
BASELINE = decoder_settings("autoregressive")
SETTINGS = [
    decoder_settings("speculative", k=4, drafter=SUFFIX),
    decoder_settings("speculative", k=8, drafter=FORGETFUL),
    decoder_settings("speculative", k="auto", drafter=SUFFIX),
]
CASES = [*((number, 1.0) for number in range(len(SETTINGS))), (0, 0.0)]


@cache
def model() -> tuple:
    return load_backbone(FOLDER, device="cpu"), inspect_model(FOLDER)


@cache
def requests() -> list[Request]:
    """Pieces of one file that overlap, two samples of each: 18 completions."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    rng, made = np.random.default_rng(0), list[Request]()
    for row in range(9):
        start, length = 3000 + 11 * row, int(rng.integers(20, 44))
        canvas = ids[start : start + length].copy()
        canvas[-int(rng.integers(1, 17)) :] = HOLE
        made += [Request(2 * row + n, nth_key(sample_key(0, f"{row}"), n), canvas) for n in range(2)]
    return made


def built(settings: DecoderChoice, temperature: float, rows: int):
    backbone, info = model()
    sampling = Sampling(temperature=temperature)
    return engine(backbone, info, settings, sampling, rows=rows, max_tokens=1 << 16)


@cache
def baseline(temperature: float) -> dict[int, Outcome]:
    return run_all(built(BASELINE, temperature, 8), requests())


def said(outcomes: dict[int, Outcome]) -> dict[int, tuple[list[int], str, float | None]]:
    return {index: (one.tokens.tolist(), one.finish, one.logprob) for index, one in outcomes.items()}


def forwards(outcomes: dict[int, Outcome]) -> int:
    return sum(outcome.nfe for outcome in outcomes.values())


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize(("number", "temperature"), CASES)
def test_a_text_does_not_depend_on_the_order_of_rows_the_index_or_the_workers(number, temperature):
    settings, some = SETTINGS[number], requests()
    expected = said(baseline(temperature))
    shuffled = [some[i] for i in np.random.default_rng(number).permutation(len(some))]
    decoder = built(settings, temperature, 5)
    assert said(run_all(decoder, shuffled)) == expected
    # Again, with an index that holds all of these texts; and by three workers, each with an index of its own.
    assert said(run_all(decoder, some)) == expected
    shares = [run_all(built(settings, temperature, 3), shuffled[worker::3]) for worker in range(3)]
    assert said(shares[0] | shares[1] | shares[2]) == expected


@pytest.mark.slow
def test_an_index_that_holds_the_texts_saves_most_forwards():
    decoder = built(SETTINGS[0], 1.0, 5)
    first, second = run_all(decoder, requests()), run_all(decoder, requests())
    holes = sum(len(outcome.tokens) for outcome in first.values())
    assert forwards(first) < holes and forwards(second) < 0.5 * forwards(first)
    # A look-up at most an iteration, and no forward without an iteration.
    for outcome in second.values():
        assert 0 <= outcome.nfe_draft <= outcome.iterations == outcome.nfe
        assert outcome.accepted <= outcome.proposed
        assert outcome.accepted + outcome.iterations == len(outcome.tokens)


def test_rows_draft_from_neighbours_that_are_still_at_work():
    """A sample that begins two steps after its twin has the words of that one before its own."""
    request, greedy = max(requests(), key=lambda one: int((one.canvas == HOLE).sum())), 0.0
    alone = run_all(built(SETTINGS[0], greedy, 1), [request])
    decoder = built(SETTINGS[0], greedy, 2)
    decoder.admit([request])
    for _ in range(2):
        assert not decoder.step(), "the first is still at work"
    decoder.admit([Request(99, request.key, request.canvas)])
    outcomes: dict[int, Outcome] = {}
    while decoder.active:
        outcomes |= {outcome.index: outcome for outcome in decoder.step()}
    assert outcomes[99].tokens.tolist() == alone[request.index].tokens.tolist()
    assert outcomes[99].accepted > 0 and outcomes[99].nfe < alone[request.index].nfe


def test_a_decoder_that_was_cleared_keeps_its_index_and_gives_the_same_texts():
    decoder = built(SETTINGS[0], 1.0, 4)
    decoder.admit(requests()[:4])
    decoder.step()
    decoder.clear()
    assert said(run_all(decoder, requests())) == said(baseline(1.0))
