"""Our two-stream attention against transformers' XLNetLMHeadModel on random weights, and its cache against itself."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import XLNetConfig, XLNetLMHeadModel

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.xlnet import xlnet_rules
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.samples import decoding_order
from tests.decoders.references.any_subset import PlainModel
from tests.decoders.support import decode, decoder_settings, texts, toy_heads, toy_requests

ASSD = decoder_settings("assd", k=3)

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 24,
    "n_layer": 3,
    "n_head": 3,
    "d_inner": 40,
    "ff_activation": "gelu",
}


def save_random(folder, *, seed=0, std=0.25, **changes):
    torch.manual_seed(seed)
    config = XLNetConfig(**(SMALL | {"attn_type": "bi"} | changes))
    model = XLNetLMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def theirs(model, tokens, order, num_prompt, queries):
    """Logits of (rank, limit) queries by transformers' own masks; tokens in rank order, unknown ones as 0."""
    length = len(order)
    rank = torch.empty(length, dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(length)
    known = torch.zeros(length, dtype=torch.int64)
    known[torch.tensor(order[: len(tokens)])] = torch.tensor(tokens)
    rows = []
    for query, limit in queries:
        seen = torch.where(rank < limit, rank, length)
        mask = (rank[:, None] <= seen[None, :]) | (seen[None, :] >= limit)
        prompt = rank < num_prompt
        mask[prompt[:, None] & prompt[None, :]] = False
        mapping = torch.zeros(1, 1, length)
        mapping[0, 0, order[query]] = 1.0
        # Only the query's own row of the mask tells what it sees.
        mask[order[query]] = seen >= limit
        with torch.no_grad():
            logits = model(known[None], perm_mask=mask[None].float(), target_mapping=mapping, use_mems=False).logits
        rows.append(logits[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes",
    [{}, {"ff_activation": "relu"}, {"clamp_len": 4}, {"n_head": 2, "n_layer": 1}, {"untie_r": False}],
    ids=str,
)
@pytest.mark.slow
def test_logits_agree_with_transformers_to_1e_5(tmp_path, changes):
    model = save_random(tmp_path, **changes)
    backbone: Any = load_backbone(tmp_path, device="cpu")
    rng = np.random.default_rng(0)
    for length, num_prompt in ((1, 1), (9, 4), (17, 1), (40, 20)):
        order = rng.permutation(length).tolist()
        tokens = rng.integers(0, 61, length).tolist()
        plain = PlainModel(backbone, order=order, num_prompt=num_prompt, sampling=Sampling())
        ranks = range(num_prompt, length)
        queries = [(rank, rank) for rank in ranks] + [(rank, num_prompt) for rank in ranks]
        queries += [(rank, max(num_prompt, rank - 3)) for rank in ranks]
        if not queries:
            continue
        ours = backbone.logits(plain.hidden(tokens, queries))
        torch.testing.assert_close(ours, theirs(model, tokens, order, num_prompt, queries), atol=1e-5, rtol=1e-5)


def test_the_first_query_of_an_empty_prompt_sees_nothing(tmp_path):
    save_random(tmp_path)
    backbone: Any = load_backbone(tmp_path, device="cpu")
    plain = PlainModel(backbone, order=[2, 0, 1], num_prompt=0, sampling=Sampling())
    blind = plain.hidden([], [(0, 0)])
    # The same whatever stands in the columns it must not see.
    for tokens in ([3], [3, 9], [5, 60, 1]):
        torch.testing.assert_close(plain.hidden(tokens, [(0, 0)]), blind, atol=1e-6, rtol=1e-6)
        seen = plain.hidden(tokens, [(1, 1)])
        assert not torch.allclose(seen, plain.hidden([tokens[0] + 1], [(1, 1)]), atol=1e-3)
    assert torch.isfinite(blind).all()


def random_requests(count, vocab_size, *, longest=24, seed=0):
    requests = toy_requests(count, vocab_size=vocab_size, longest=longest, seed=seed)
    allowed = [np.where(r.canvas == 6, 7, r.canvas).astype(np.int32) for r in requests]
    return [Request(r.index, r.key, canvas) for r, canvas in zip(requests, allowed, strict=True)]


SPECULATIVE: list[dict[str, Any]] = [
    {},
    {"drafter": "ngram"},
    {"fused": "rows"},
    {"fused": "rows", "rows": "ends"},
]


def test_the_shape_rules_hold_on_this_machine():
    rules = xlnet_rules((24, 24, 40, 61), 3, torch.float32, torch.get_num_threads())
    assert rules.exact, "no rule makes float32 rows independent of their batch on this machine"


@pytest.mark.slow
def test_every_decoder_gives_the_sequential_text_bit_by_bit_in_any_batch(tmp_path):
    save_random(tmp_path)
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, device="cpu")
    heads = toy_heads(24).float()
    requests = random_requests(24, 61)
    expected = decode(backbone, info, decoder_settings("any_subset"), Sampling(), requests, rows=16)
    alone = decode(backbone, info, decoder_settings("any_subset"), Sampling(), requests, rows=1)
    assert texts(alone) == texts(expected)
    assert all(alone[i].logprob == expected[i].logprob for i in expected)
    for settings in SPECULATIVE:
        by_rows = [
            decode(
                backbone, info, decoder_settings("assd", k=4, **settings), Sampling(), requests, rows=rows, heads=heads
            )
            for rows in (1, 3, 16)
        ]
        for found in by_rows:
            assert texts(found) == texts(expected)
            assert all(found[i].nfe == by_rows[0][i].nfe for i in expected)
            # The sum of the same numbers, in another order.
            assert all(found[i].logprob == pytest.approx(expected[i].logprob, abs=1e-9) for i in expected)


@pytest.mark.slow
def test_float64_gives_the_same_text_in_any_batch(tmp_path):
    # Double precision sums in an order that depends on the batch here; the differences stay far below any decision.
    save_random(tmp_path)
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, device="cpu", dtype="float64")
    requests = random_requests(24, 61)
    expected = decode(backbone, info, decoder_settings("any_subset"), Sampling(), requests, rows=16)
    for settings in SPECULATIVE:
        decoder = decoder_settings("assd", k=4, **settings)
        found = decode(backbone, info, decoder, Sampling(), requests, rows=3, heads=toy_heads(24))
        assert texts(found) == texts(expected)


def test_a_worker_reuses_slots_of_longer_samples_without_a_trace(tmp_path):
    save_random(tmp_path)
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, device="cpu")
    longer, shorter = random_requests(10, 61, longest=90, seed=1), random_requests(10, 61, longest=9, seed=2)
    shorter = [Request(r.index + 10, r.key, r.canvas) for r in shorter]
    settings = decoder_settings("assd", k=3, fused="rows")
    after = decode(backbone, info, settings, Sampling(), longer + shorter, rows=2)
    fresh = decode(load_backbone(tmp_path, device="cpu"), info, settings, Sampling(), shorter, rows=2)
    assert {i: after[i].tokens.tolist() for i in fresh} == texts(fresh)


def test_the_mask_is_never_generated(tmp_path):
    model = save_random(tmp_path)
    with torch.no_grad():
        model.lm_loss.bias[6] = 50.0
    model.save_pretrained(tmp_path, safe_serialization=True)
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, device="cpu")
    requests = random_requests(20, 61)
    for settings in (
        decoder_settings("any_subset"),
        decoder_settings("parallel"),
        decoder_settings("assd"),
        decoder_settings("assd", fused="rows"),
    ):
        for acceptance in ("coupled", "rejection"):
            outcomes = decode(backbone, info, settings, Sampling(acceptance=acceptance), requests)
            assert all(6 not in outcome.tokens for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("lm_loss.bias"), "lacks the tensors lm_loss.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unknown to the family: extra"),
        (lambda weights: weights.update({"lm_loss.bias": torch.zeros(3)}), "lm_loss.bias has shape"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, damage, message):
    from safetensors.torch import load_file

    save_random(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    for load in (inspect_model, load_backbone):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "clip"},
            "model.family: config.json has model_type 'clip'; known families: d2f_dream, .*fast_dllm_v2, .*xlnet",
        ),
        ({"attn_type": "uni"}, "attn_type = 'uni'"),
        ({"bi_data": True}, "bi_data = True"),
        ({"ff_activation": "swish"}, "ff_activation = 'swish'"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(tmp_path, change, message):
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        inspect_model(tmp_path)


def test_damaged_or_missing_weights_are_a_clear_error(tmp_path):
    save_random(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        inspect_model(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="only safetensors checkpoints are read"):
        inspect_model(tmp_path)


def test_an_order_is_prompt_first_then_holes_from_left_to_right():
    order, num_prompt = decoding_order(np.array([-1, 5, -1, 6], dtype=np.int32))
    assert (order.tolist(), num_prompt) == ([1, 3, 0, 2], 2)


def test_a_sample_of_numbers_that_are_none_leaves_nothing_to_the_next_in_its_slot(tmp_path):
    save_random(tmp_path)
    info = inspect_model(tmp_path)
    healthy = toy_requests(12, vocab_size=60, longest=12, seed=3)
    expected = texts(decode(load_backbone(tmp_path, dtype="float64"), info, ASSD, Sampling(), healthy))
    backbone: Any = load_backbone(tmp_path, dtype="float64")
    backbone.embedding_VD = backbone.embedding_VD.clone()
    backbone.embedding_VD[60] = torch.nan
    sick = [Request(100 + i, 100 + i, np.array([60, -1, 60, -1, -1] * 4, dtype=np.int32)) for i in range(4)]
    mixed = [request for pair in zip(sick, healthy, strict=False) for request in pair] + healthy[4:]
    outcomes = decode(backbone, info, ASSD, Sampling(), mixed, rows=2)
    assert [outcomes[request.index].error_kind for request in sick] == ["nan_logits"] * 4
    assert {index: tokens for index, tokens in texts(outcomes).items() if index < 100} == expected
