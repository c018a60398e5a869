"""NaN fails the sample that made it, at once, and ends with it: its neighbours and the next one in its slot are as without it."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import ModelInfo, Outcome, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.registry import find_heads
from draftmill.decoders.settings import DecoderSettings
from tests.decoders.shipped import BUILTIN, Case
from tests.decoders.support import decode, decoder_settings, engine, run_all, texts
from tests.device.steps import CASES

CAUSAL, ANY = decoder_settings("autoregressive"), decoder_settings("any_subset")
BROKEN, LENGTH = 77, 24


def request(index, first, length, prompt):
    canvas = np.arange(first, first + length, dtype=np.int32)
    canvas[prompt:] = -1
    return Request(index, 100 + index, canvas)


def broken_model(name: str) -> tuple[Any, ModelInfo]:
    backbone: Any = load_backbone(BUILTIN / name, dtype="float32", device="cpu")
    # The output layer may share these weights, and stays as it is.
    broken = backbone.embedding_VD.clone()
    broken[BROKEN] = torch.nan
    if hasattr(backbone, "model"):
        backbone.base.word_embeddings.weight = torch.nn.Parameter(broken, requires_grad=False)
    else:
        backbone.embedding_VD = broken
    return backbone, inspect_model(BUILTIN / name)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "settings"), [("ar-tiny", CAUSAL), ("asarm-tiny", ANY)])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_sample_is_decoded_alike_after_one_that_left_nan_in_its_slot(name, settings, rows):
    backbone, info = broken_model(name)
    bad = [request(index, BROKEN - 3, LENGTH, 12) for index in range(rows)]
    good = [request(rows + index, 200 + 20 * index, LENGTH - 4, 6) for index in range(rows)]
    found = decode(backbone, info, settings, Sampling(temperature=0.0), [*bad, *good], rows=rows)
    assert [found[one.index].error_kind for one in bad] == ["nan_logits"] * rows
    assert [found[one.index].error_kind for one in good] == [None] * rows
    fresh, _ = broken_model(name)
    alone = decode(fresh, info, settings, Sampling(temperature=0.0), good, rows=rows)
    assert texts(alone) == {one.index: texts(found)[one.index] for one in good}


NAMES = (
    *("autoregressive", "speculative", "any_subset", "assd", "assd, n-gram", "assd, fused", "stepwise"),
    *("stepwise, cached", "ssd", "ssd, cached", "block_diffusion", "s2d2"),
)
EVERY: dict[str, Case] = {name: CASES[name] for name in NAMES}
EVERY["assd, ends"] = "asarm-tiny", {"kind": "assd", "k": 3, "fused": "rows", "rows": "ends"}


def engine_of(backbone: Any, info: ModelInfo, settings: Any, **more: Any) -> Any:
    stops = None if info.family in ("any_subset", "masked") else Stops()
    sampling = more.pop("sampling", Sampling(temperature=0.9))
    return engine(backbone, info, settings, sampling, rows=3, max_tokens=1 << 16, stops=stops, **more)


@pytest.mark.one_in(11)
@pytest.mark.parametrize(
    ("name", "acceptance"),
    [
        *((name, "coupled") for name in EVERY),
        *((name, "rejection") for name in EVERY if name.startswith(("spec", "assd"))),
    ],
)
def test_one_sample_with_nan_fails_in_its_first_step_and_the_others_are_as_without_it(name, acceptance):
    folder, settings = EVERY[name][0], TypeAdapter(DecoderSettings).validate_python(EVERY[name][1])
    backbone, info = broken_model(folder)
    more: dict[str, Any] = {"sampling": Sampling(temperature=0.9, acceptance=acceptance)}
    if hasattr(settings, "head"):
        more["heads"] = find_heads(settings, BUILTIN / folder, backbone)
    others = [request(1 + index, 200 + 20 * index, LENGTH, 12) for index in range(4)]
    expected = run_all(engine_of(backbone, info, settings, **more), others)
    engine = engine_of(backbone, info, settings, **more)
    engine.admit([others[0], request(0, BROKEN - 3, LENGTH, 12), others[1]])
    # Of a block model's prompt nothing is told: it runs before the first draft.
    steps = 2 if folder == "block-tiny" else 1
    assert steps == 1 or not engine.step()
    (failed,) = engine.step()
    assert (failed.index, failed.error_kind, failed.nfe, failed.tokens.tolist()) == (0, "nan_logits", steps, [])
    # A neighbour goes on, another sample comes into the slot.
    engine.admit(others[2:3])
    found = dict[int, Outcome]()
    while engine.active:
        found |= {one.index: one for one in engine.step()}
    found |= run_all(engine, others[3:])
    # A text that draws the broken token itself fails, too.
    assert sum(one.error_kind is None for one in expected.values()) >= 2
    assert texts(found) == texts(expected)
    assert {index: one.error_kind for index, one in found.items()} == {
        index: one.error_kind for index, one in expected.items()
    }


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["autoregressive", "any_subset", "stepwise", "block_diffusion"])
def test_a_sample_whose_output_layer_breaks_later_fails_in_that_step(name, monkeypatch):
    """The hidden states are fine: what is told of the rows is not."""
    folder, settings = EVERY[name][0], TypeAdapter(DecoderSettings).validate_python(EVERY[name][1])
    backbone, info = broken_model(folder)
    some = [request(index, 200 + 20 * index, LENGTH, 12) for index in range(2)]
    expected = texts(run_all(engine_of(backbone, info, settings), some))
    engine, logits = engine_of(backbone, info, settings), backbone.logits
    engine.admit(some)
    while engine.samples[1].nfe < 2:
        assert not engine.step()
    start = engine.target.start

    def breaks(b, **more):
        first = int(b.draws.sampled_B[0])  # the sampled rows of the first sample come first

        def broken(hidden_RD):
            found = logits(hidden_RD).clone()
            found[first:] = torch.nan
            return found

        with monkeypatch.context() as during:
            during.setattr(backbone, "logits", broken)
            return start(b, **more)

    monkeypatch.setattr(engine.target, "start", breaks)
    (failed,) = engine.step()
    assert (failed.index, failed.error_kind) == (1, "nan_logits") and failed.nfe == 3
    monkeypatch.setattr(engine.target, "start", start)
    found = dict[int, Outcome]()
    while engine.active:
        found |= {one.index: one for one in engine.step()}
    assert texts(found) == {0: expected[0]}


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_drafting_model_with_nan_costs_drafts_and_no_text(acceptance):
    backbone = load_backbone(BUILTIN / "ar-tiny", dtype="float32", device="cpu")
    info = inspect_model(BUILTIN / "ar-tiny")
    drafter, drafter_info = broken_model("ar-micro")
    settings = decoder_settings("speculative", k=3, drafter={"kind": "model", "path": "ar-micro"})
    bad, good = request(0, BROKEN - 3, LENGTH, 12), request(1, 200, LENGTH, 12)
    sampling = Sampling(temperature=0.9, acceptance=acceptance)
    engine = engine_of(backbone, info, settings, sampling=sampling, drafter=drafter, drafter_info=drafter_info)
    found = run_all(engine, [bad, good, request(2, 220, LENGTH, 12), request(3, 240, LENGTH, 12)])
    assert all((one.error_kind is None and len(one.tokens) == 12) or one.finish == "eos" for one in found.values())
    assert found[0].accepted <= found[1].accepted and found[1].accepted > 0
    if acceptance == "coupled":
        plain = engine_of(backbone, info, CAUSAL, sampling=sampling)
        assert texts(run_all(plain, [bad, good])) == {index: texts(found)[index] for index in (0, 1)}
