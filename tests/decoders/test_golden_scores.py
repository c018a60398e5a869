"""Scores against what the public code of each family computed: densities of ASSD, and log-probabilities under given masks."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders import estimates
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.draws.schedule import NOISE_EPS
from draftmill.decoders.estimates import Mask
from tests.decoders.support import decoder_settings, score
from tests.golden_data import read_arrays, read_json

MASKS: dict[int, tuple[Any, float]] = {}
"""The mask of each text by its key, over its scored tokens, and the share that it stands for."""


@dataclass(frozen=True)
class Given:
    """In place of random masks: one for each text, with weight 1."""

    key: int
    number: int
    places_L: Any
    kind: str
    samples: int
    enumerated = True
    num_masks = 1

    def mask(self, draw: int) -> Mask:
        hidden, share = MASKS[self.key]
        return Mask(np.asarray(hidden)[self.places_L], 1.0, share)


@pytest.fixture
def given_masks(monkeypatch):
    MASKS.clear()
    monkeypatch.setattr(estimates, "MaskedGroup", Given)
    return MASKS


def loaded(folder, mask_id=None, **changes):
    """The checkpoint; the public code gives the mask a probability, so nothing is suppressed here."""
    info = replace(inspect_model(folder, mask_id=mask_id), **changes)
    return load_backbone(folder, device="cpu"), info


def texts_of(canvases, mask_id, masks, *, share=None):
    """A text for each canvas (some token in place of each mask), all of whose tokens are scored."""
    rng, requests = np.random.default_rng(0), []
    for index, canvas in enumerate(canvases):
        hidden = np.asarray(canvas) == mask_id
        tokens = np.where(hidden, rng.integers(0, mask_id, len(canvas)), canvas).astype(np.int32)
        masks[index] = (hidden, hidden.mean() if share is None else share[index])
        requests.append(Request(index, index, tokens, score_from=0))
    return requests


def check(outcomes, requests, masks, laws):
    """Each text's score is the sum over its masks of the public code's log-probabilities."""
    assert sum(int(hidden.sum()) for hidden, _ in masks.values()) > 20
    for request in requests:
        hidden = np.flatnonzero(masks[request.index][0])
        expected = sum(float(laws[request.index][place, request.canvas[place]]) for place in hidden)
        assert outcomes[request.index].logprob == pytest.approx(expected, abs=1e-4 * max(1, len(hidden)))


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_masked_tokens_have_the_public_codes_log_probabilities(golden, given_masks, family):
    folder = golden / family
    cases, arrays = read_json(folder / "cases.json"), read_arrays(folder / "arrays.safetensors")
    backbone, info = loaded(folder, suppressed=())
    canvases, laws = [], []
    for case in cases["logits"]:
        if "attention_mask" in case:
            continue  # a batch with padding, which no canvas here has
        ids = arrays[case["input_ids"]["array"]]
        logits = arrays[case["logits" if family == "llada" else "logits_unshifted"]["array"]]
        if info.shift:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
        canvases += ids.tolist()
        laws += list(logits.double().log_softmax(-1))
    requests = texts_of(canvases, info.mask_id, given_masks)
    check(score(backbone, info, decoder_settings("stepwise"), requests, rows=4), requests, given_masks, laws)


@pytest.mark.parametrize(("family", "called"), [("mdlm", "log_probs"), ("sedd", "score")])
def test_tokens_have_the_public_codes_log_probabilities_at_their_time(golden, given_masks, family, called):
    folder = golden / family
    cases, arrays = read_json(folder / "cases.json"), read_arrays(folder / "laws.safetensors")
    backbone, info = loaded(folder)
    canvases, laws, shares = [], [], []
    for case in cases[called]:
        canvases += arrays[case["x"]["array"]].tolist()
        if family == "mdlm":
            laws += list(arrays[case["no_time_cond"]["subs_log_probs"]["array"]])
            continue
        shares += [time * (1 - NOISE_EPS) for time in case["t"]]
        # Given that a mask is revealed, its token's probability is proportional to the score of the token.
        laws += list(arrays[case["log_score"]["array"]][..., : info.mask_id].double().log_softmax(-1))
    requests = texts_of(canvases, info.mask_id, given_masks, share=shares or None)
    check(score(backbone, info, decoder_settings("ancestral"), requests, rows=4), requests, given_masks, laws)


def test_sdar_blocks_have_the_log_probabilities_of_the_public_codes_training(golden, given_masks):
    folder = golden / "sdar"
    case = read_json(folder / "train_layout.json")
    arrays = read_arrays(folder / "train_layout.safetensors")
    backbone, info = loaded(folder, suppressed=())
    settings = decoder_settings("block_diffusion", block_size=case["block_size"])
    lengths = case["sample_lengths"]
    clean, hidden = (torch.tensor(case[name]).split(lengths) for name in ("clean_ids", "masked"))
    nats = arrays["train.ce"].split([int(one.sum()) for one in hidden])
    requests = []
    for index, (ids, masked) in enumerate(zip(clean, hidden, strict=True)):
        given_masks[index] = (masked.bool().numpy(), 1.0)
        requests.append(Request(index, index, ids.numpy().astype(np.int32), score_from=0))
    outcomes = score(backbone, info, settings, requests)
    for index, expected in enumerate(nats):
        assert outcomes[index].logprob == pytest.approx(-float(expected.sum()), abs=1e-3)


@pytest.mark.parametrize(
    ("family", "name"), [("s2d2", "equals_block_size_1_greedy"), ("fast_dllm_v2", "equals_ar_greedy")]
)
def test_texts_of_the_public_code_are_greedy_where_it_was(golden, family, name):
    folder = golden / family
    public = read_json(folder / "cases.json")
    told = [
        case for case in public["cases"] if case.get("verifier_randomness") == "onehot" and case.get(name) is not None
    ]
    backbone, info = loaded(folder, 95, suppressed=())
    settings = decoder_settings("block_diffusion", block_size=1)
    requests = [
        Request(index, index, np.asarray(case["output"], dtype=np.int32), score_from=len(case["prompt"]))
        for index, case in enumerate(told)
    ]
    outcomes = score(backbone, info, settings, requests, rows=16)
    assert [outcomes[index].is_greedy for index in range(len(told))] == [case[name] for case in told]
    assert {case[name] for case in told} == {True, False}


def test_densities_of_any_subset_models_are_those_of_the_public_code(golden):
    folder = golden / "xlnet_asarm"
    cases = read_json(folder / "cases.json")["cases"]
    backbone, info = loaded(folder, suppressed=())
    requests: list[Request] = []
    expected = []
    for case in cases:
        if case["order_to_pos"][case["start"] :] != sorted(case["masked_in_order"]):
            continue  # a shuffled order, which the decoders don't have
        for density in case["oracle"]:
            scored = np.asarray(case["masked_in_order"])
            requests.append(Request(len(requests), 0, np.asarray(density["sequence"], dtype=np.int32), scored=scored))
            expected.append(density)
    outcomes = score(backbone, info, decoder_settings("any_subset"), requests, rows=4)
    assert len(requests) >= 8
    for index, density in enumerate(expected):
        assert outcomes[index].token_logprobs == pytest.approx(density["token_log_density"], abs=1e-4)
        assert outcomes[index].logprob == pytest.approx(density["total_log_density"], abs=1e-3)


def test_the_joint_of_any_subset_models_is_that_of_the_public_code(golden):
    folder = golden / "xlnet_asarm"
    joint = read_json(folder / "cases.json")["joint"]
    expected = read_arrays(folder / "arrays.safetensors")[joint["exact_joint"]["array"]]
    backbone, info = loaded(folder / "joint_model", suppressed=())
    scored, requests = np.asarray(joint["masked_in_order"]), []
    fills = np.random.default_rng(0).integers(0, expected.shape[0], (60, len(scored)))
    for index, fill in enumerate(fills):
        canvas = np.asarray(joint["input_ids"], dtype=np.int32)
        canvas[scored] = fill
        requests.append(Request(index, index, canvas, scored=scored))
    outcomes = score(backbone, info, decoder_settings("any_subset"), requests, rows=16)
    for index, fill in enumerate(fills):
        assert outcomes[index].logprob == pytest.approx(float(expected[tuple(fill)].log()), abs=1e-3)
