"""The samples of one row have one canvas: its prompt runs once, and every sample is what it is alone."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import HOLE, Outcome, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.support import decoder_settings, engine, run_all, texts

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
CAUSAL: dict[str, DecoderChoice] = {
    "autoregressive": decoder_settings("autoregressive"),
    "speculative": decoder_settings("speculative", k=3, drafter={"kind": "ngram", "max_n": 2, "min_n": 1}),
    "jacobi": decoder_settings("jacobi", block_size=4),
    "multiblock_jacobi": decoder_settings("multiblock_jacobi", block_size=4),
}
ANY_SUBSET: dict[str, DecoderChoice] = {
    "any_subset": decoder_settings("any_subset"),
    "assd": decoder_settings("assd", k=3),
}


@cache
def model(name: str) -> tuple[Any, Any]:
    return load_backbone(BUILTIN / name), inspect_model(BUILTIN / name)


def canvases(*, infill: bool) -> list[np.ndarray]:
    """Four canvases of 24 to 60 tokens; of a completion's prompts, two begin alike."""
    rng = np.random.default_rng(3)
    found = []
    for length in (60, 24, 41, 60):
        canvas = rng.integers(10, 200, length).astype(np.int32)
        if infill:
            canvas[rng.random(length) < 0.4] = HOLE
        else:
            canvas[-12:] = HOLE
        found.append(canvas)
    if not infill:
        found[3][:30] = found[0][:30]
    return found


def samples_of(some: list[np.ndarray], count: int) -> list[Request]:
    keys = [[nth_key(sample_key(0, f"row {row}"), n) for n in range(count)] for row in range(len(some))]
    rows = [(row, key) for row, own in enumerate(keys) for key in own]
    return [Request(index, key, some[row]) for index, (row, key) in enumerate(rows)]


@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("ar-tiny", one) for one in CAUSAL.values()] + [("asarm-tiny", one) for one in ANY_SUBSET.values()],
    ids=[*CAUSAL, *ANY_SUBSET],
)
@pytest.mark.parametrize("rows", [5, 12])
def test_samples_of_a_row_equal_the_same_samples_alone(name, settings, rows):
    backbone, info = model(name)
    requests = samples_of(canvases(infill=name == "asarm-tiny"), 3)
    setup = Setup(backbone=backbone, info=info, sampling=Sampling(temperature=0.9), max_rows=rows, max_tokens=1 << 16)
    together = run_all(build_decoder(setup, settings), requests)
    alone: dict[int, Outcome] = {}
    for request in requests:
        decoder = build_decoder(setup, settings)
        alone |= run_all(decoder, [request])
    assert texts(together) == texts(alone)
    for index, outcome in together.items():
        other = alone[index]
        assert (outcome.nfe, outcome.iterations, outcome.accept_hist) == (
            other.nfe,
            other.iterations,
            other.accept_hist,
        )
        assert outcome.logprob == other.logprob
    assert len({tuple(outcome.tokens.tolist()) for outcome in together.values()}) > len(requests) // 2


@pytest.mark.slow
def test_a_prompt_runs_once_where_its_columns_are_still_held_and_again_where_they_were_overwritten():
    backbone, info = model("ar-tiny")
    requests = samples_of(canvases(infill=False), 3)
    prompts = [int((request.canvas != HOLE).sum()) for request in requests[::3]]
    sampling = Sampling(temperature=0.9)

    def rows_run(max_rows: int, some: list[Request]) -> int:
        decoder = engine(backbone, info, CAUSAL["autoregressive"], sampling, rows=max_rows, max_tokens=1 << 16)
        run_all(decoder, some)
        return decoder.stats.useful_rows

    generated = 11 * len(requests)  # the row of a prompt's last token predicts the first of 12
    # The first and the last prompt begin with the same 30 tokens, which run once where both samples meet.
    assert rows_run(12, requests) == sum(prompts) - 30 + 2 * len(prompts) + generated
    # One by one, a sample finds its twin's columns in the slot; the last prompt's beginning was overwritten by others.
    assert rows_run(1, requests) == sum(prompts) + 2 * len(prompts) + generated
    # Slots that free up one by one: a sample finds its twin in its own or another slot, at whatever step it comes.
    assert sum(prompts) - 30 + 2 * len(prompts) <= rows_run(2, requests) - generated <= sum(prompts) + 2 * len(prompts)


def test_a_sample_s_key_is_its_row_s_and_its_number_s_alone():
    keys = {(row, n): nth_key(sample_key(0, f"{row}"), n) for row in range(50) for n in range(50)}
    assert len(set(keys.values())) == len(keys)
    assert all(keys[row, 0] == sample_key(0, f"{row}") for row in range(50))
