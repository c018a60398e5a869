"""What varies between public checkpoints of XLNet, and of the families of which transformers has no class.

Every variation computes what the network of plain_networks.py does, or is refused by name.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from tests.decoders.backbones import plain_networks
from tests.decoders.backbones.causal_models import random_tokens
from tests.decoders.backbones.config_changes import GONE, change_config
from tests.decoders.backbones.masked_models import load

# ---- XLNet -----------------------------------------------------------------------------------------------------------

XLNET = {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
DEFAULTS = ("d_head", "clamp_len", "layer_norm_eps", "ff_activation", "attn_type", "bi_data", "tie_word_embeddings")


def save_xlnet(folder, **changes):
    torch.manual_seed(0)
    transformers.XLNetLMHeadModel(transformers.XLNetConfig(**(XLNET | changes))).save_pretrained(folder)


def test_fields_that_an_xlnet_leaves_out_have_the_values_of_transformers(tmp_path):
    save_xlnet(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, dict.fromkeys(DEFAULTS, GONE))
    check = find_family(full, "auto").shape
    assert check(json.loads((tmp_path / "config.json").read_text())) == check(full)
    load_backbone(tmp_path, device="cpu")


def test_an_untied_xlnet_needs_its_output_layer(tmp_path):
    save_xlnet(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_loss.weight")
    backbone = load_backbone(tmp_path, device="cpu")
    assert isinstance(backbone, XLNetBackbone)
    torch.testing.assert_close(backbone.output_VD, head)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks the tensors lm_loss\.weight"):
        inspect_model(tmp_path)


# ---- families of which transformers knows nothing --------------------------------------------------------------------

PLAIN: dict[str, list[dict]] = {
    "llada": [
        {"n_kv_heads": 1, "embedding_size": None},
        {"n_kv_heads": None, "mlp_hidden_size": None, "mlp_ratio": 3},
        {"n_kv_heads": 2, "weight_tying": True, "rope_theta": 100.0, "rms_norm_eps": 1e-2},
        {"embedding_size": 104},
    ],
    "llada2": [
        {"n_group": 1, "topk_group": 1, "num_shared_experts": 2, "num_key_value_heads": 4},
        {"num_shared_experts": 0, "first_k_dense_replace": 0, "num_experts_per_tok": 1}
        | {"partial_rotary_factor": 1.0, "rotary_dim": None},
        {"first_k_dense_replace": 2, "routed_scaling_factor": 1.0, "topk_group": 4}
        | {"partial_rotary_factor": 0.25, "rotary_dim": 4},
    ],
    "mdlm": [
        {"n_heads": 1, "time_conditioning": True},
        {"cond_dim": 33, "n_heads": 8, "time_conditioning": True},
        {"n_blocks": 3},
    ],
}
OWN: dict[str, dict] = {"llada2": {"mask_token_id": 90}, "mdlm": {"model_length": 64}}
SIGMA = 0.7


def save_plain(folder, config):
    """Random weights under the names that the family says; norms near one."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in find_family(config, "auto").weight_shapes(config).items():
        noise = 0.3 * torch.randn(*shape, generator=generator)
        weights[name] = 1 + noise if "norm" in name or "ln_f" in name else noise
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "change"), [(family, change) for family in PLAIN for change in PLAIN[family]])
def test_logits_are_those_of_the_plain_network(golden, tmp_path, family, change):
    config = json.loads((golden / family / "config.json").read_text()) | OWN.get(family, {}) | change
    weights = save_plain(tmp_path, config)
    backbone, tokens = load(tmp_path, "float64"), torch.tensor(random_tokens(20, seed=5))
    backbone.allocate(1, len(tokens))
    places = torch.arange(len(tokens))
    sight = torch.zeros(1, len(tokens), dtype=torch.int64), torch.full((1, len(tokens)), len(tokens))
    sigma_G = torch.full((1,), SIGMA, dtype=torch.float64)
    rows = token_rows([0], [len(tokens)], tokens, places, places, sight, sigma_G=sigma_G)
    sigma = [SIGMA if config["time_conditioning"] else 0.0] if family == "mdlm" else []
    expected = getattr(plain_networks, "ddit" if family == "mdlm" else family)(weights, config, tokens, *sigma)
    # Norms and angles of the rotary network are float32 in every dtype.
    tolerance = 1e-9 if family == "mdlm" else 1e-4
    torch.testing.assert_close(backbone.logits(backbone.forward(rows)), expected, atol=tolerance, rtol=tolerance)


def test_a_mask_that_is_null_is_the_public_one():
    for family, mask in (("llada", 126336), ("dream", 151666)):
        assert find_family({"model_type": family}, family).mask_id({"mask_token_id": None}) == mask


def test_a_llada2_may_keep_its_rotation_in_rope_parameters(golden):
    llada2 = json.loads((golden / "llada2" / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5}
    newer = {key: value for key, value in llada2.items() if key not in rope} | {"rope_parameters": rope}
    check = find_family(llada2, "auto").shape
    assert check(newer) == check(llada2)
