"""What all families promise of their checkpoints: every tensor is used, and one that does not fit is called by its own name."""

import pytest
import torch
from safetensors.torch import load_file

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.backbones.masked_models import copy_changed, load, without

# A tensor of each family by the name that its checkpoints give it, and one that is unknown to the family.
SOME = {
    "llada": ("model.transformer.blocks.1.ff_out.weight", "model.transformer.blocks.7.ff_out.weight"),
    "llada_moe": ("model.layers.1.self_attn.k_norm.weight", "model.layers.7.self_attn.k_norm.weight"),
    "dream": ("model.layers.1.self_attn.k_proj.bias", "model.layers.7.self_attn.k_proj.bias"),
    "mdlm": ("backbone.blocks.1.mlp.2.bias", "backbone.blocks.7.mlp.2.bias"),
    "sedd": ("output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.weight_2"),
    "sdar": ("model.layers.1.self_attn.q_norm.weight", "model.layers.9.self_attn.q_norm.weight"),
    "fast_dllm_v2": ("model.layers.1.self_attn.k_proj.bias", "model.layers.9.self_attn.k_proj.bias"),
    "llada2": ("model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.9.mlp.experts.7.up_proj.weight"),
    "nemotron": ("diffusion_head.weight", "encoder.layers.9.mlp.up_proj.weight"),
    "xlnet_asarm": ("lm_loss.bias", "extra"),
    "qwen2": ("model.layers.1.mlp.up_proj.weight", "model.layers.0.extra"),
}
NAMES = {"nemotron": "nemotron_labs_diffusion", "xlnet_asarm": "xlnet"}
USED = [family for family in SOME if family not in {"nemotron", "xlnet_asarm", "qwen2"}]
MASKS = {"fast_dllm_v2": 95, "llada2": 95}
"""Their golden configs don't name it."""


def inspect(folder, family):
    return inspect_model(folder, mask_id=MASKS.get(family))


@pytest.mark.parametrize("family", SOME)
def test_a_tensor_that_does_not_fit_is_called_what_the_checkpoint_calls_it(golden, tmp_path, family):
    source, (name, stray) = golden / family, SOME[family]
    if family == "qwen2":
        save_random(source := tmp_path)
    lost = copy_changed(source, tmp_path / "lost", weights=without(name))
    more = copy_changed(source, tmp_path / "more", weights=lambda tensors: tensors | {stray: torch.zeros(2)})
    bent = copy_changed(source, tmp_path / "bent", weights=lambda tensors: tensors | {name: torch.zeros(2)})
    for read in (lambda folder: inspect(folder, family), lambda folder: load_backbone(folder, device="cpu")):
        with pytest.raises(ValueError, match=f"family '{NAMES.get(family, family)}'.* lacks the tensors {name}$"):
            read(lost)
        with pytest.raises(ValueError, match=f"unknown to the family: {stray}$"):
            read(more)
        with pytest.raises(ValueError, match=rf"{name} has shape \(2,\), but config.json says"):
            read(bent)


@pytest.mark.parametrize("family", USED)
def test_all_tensors_of_a_golden_checkpoint_are_used(golden, family):
    weights = load_file(golden / family / "model.safetensors")
    held = sum(tensor.numel() for name, tensor in weights.items() if "inv_freq" not in name)
    plain = load(golden / family, "float64")  # in float32 products are packed, which is no parameter
    found = sum(parameter.numel() for parameter in plain.model.parameters())
    assert inspect(golden / family, family).num_parameters == found == held


OUTPUTS = {
    "llada": ("weight_tying", "model.transformer.ff_out.weight", "model.transformer.wte.weight"),
    "sdar": ("tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"),
    "fast_dllm_v2": ("tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("family", OUTPUTS)
def test_a_tied_checkpoint_takes_its_embeddings_as_output_layer(golden, tmp_path, family):
    key, head, embeddings = OUTPUTS[family]
    tied = copy_changed(golden / family, tmp_path / "tied", config={key: True}, weights=without(head))
    backbone, table = load(tied), load_file(tied / "model.safetensors")[embeddings]
    rows = torch.eye(table.shape[1])
    torch.testing.assert_close(backbone.logits(rows), rows @ table.T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"lacks the tensors {head}"):
        load(copy_changed(golden / family, tmp_path / "untied", weights=without(head)))
