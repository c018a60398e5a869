"""Our two-stream attention against transformers' XLNetLMHeadModel on random weights, and its cache against itself."""

import numpy as np
import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.xlnet import xlnet_rules
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.samples import decoding_order
from tests.decoders.backbones.masked_models import check_misfits
from tests.decoders.references.any_subset import PlainModel

SMALL: dict = {
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
    backbone = load_backbone(tmp_path, device="cpu")
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
    backbone = load_backbone(tmp_path, device="cpu")
    plain = PlainModel(backbone, order=[2, 0, 1], num_prompt=0, sampling=Sampling())
    blind = plain.hidden([], [(0, 0)])
    # The same whatever stands in the columns it must not see.
    for tokens in ([3], [3, 9], [5, 60, 1]):
        torch.testing.assert_close(plain.hidden(tokens, [(0, 0)]), blind, atol=1e-6, rtol=1e-6)
        seen = plain.hidden(tokens, [(1, 1)])
        assert not torch.allclose(seen, plain.hidden([tokens[0] + 1], [(1, 1)]), atol=1e-3)
    assert torch.isfinite(blind).all()


def test_the_shape_rules_hold_on_this_machine():
    rules = xlnet_rules((24, 24, 40, 61), 3, torch.float32, torch.get_num_threads())
    assert rules.exact, "no rule makes float32 rows independent of their batch on this machine"


def test_a_tensor_that_does_not_fit_is_named(golden, tmp_path):
    check_misfits(golden / "xlnet_asarm", tmp_path, "xlnet", "lm_loss.bias", "extra")


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
