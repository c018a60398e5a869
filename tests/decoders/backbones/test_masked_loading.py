"""Checkpoints of the masked-diffusion families: names, configs, ids; what does not fit is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.families.table import FAMILIES as OFFERED
from draftmill.decoders.backbones.families.table import describe, find_family, masked_diffusion_families
from draftmill.decoders.settings import check_model
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.backbones.masked_models import (
    FAMILIES,
    PUBLIC,
    check_misfits,
    copy_changed,
    load,
    look_alone,
    random_canvas,
    without,
)
from tests.decoders.support import decoder_settings

SMALL = {"hidden_size": 768, "cond_dim": 128, "n_blocks": 12, "n_heads": 12, "length": 1024, "scale_by_sigma": True}
# A tensor of each family by the name that its checkpoints give it.
SOME = {
    "llada": "model.transformer.blocks.1.ff_out.weight",
    "llada_moe": "model.layers.1.self_attn.k_norm.weight",
    "dream": "model.layers.1.self_attn.k_proj.bias",
    "mdlm": "backbone.blocks.1.mlp.2.bias",
    "sedd": "output_layer.adaLN_modulation.weight",
}
TOKENS = {"<|endoftext|>": 88, "<|eot_id|>": 89, "<|im_end|>": 92, "<|mask|>": 91}


@pytest.mark.parametrize(
    ("config", "family", "millions", "mask", "length", "shift"),
    [
        (PUBLIC["LLADA_8B"], "llada", 8015.581, 126336, 4096, 0),
        (PUBLIC["LLADA_MOE_7B"], "llada_moe", 7356.881, 156895, 8192, 0),
        # The config's own length is that of the model which Dream was made from.
        (PUBLIC["DREAM_7B"], "dream", 7615.617, 151666, 2048, 1),
        (PUBLIC["MDLM_OWT"], "mdlm", 169.627, 50257, 1024, 0),
        ({"parameterization": "subs", "backbone": "dit", "model": SMALL}, "mdlm", 169.627, 50257, 1024, 0),
        (PUBLIC["SEDD_SMALL"], "sedd", 169.627, 50257, 1024, 0),
    ],
)
def test_public_configs_are_recognised_and_give_the_published_sizes(config, family, millions, mask, length, shift):
    found = find_family(config, "auto")
    info = describe(found, config, mask_id=None)
    assert (found.name, info.mask_id, info.max_length, info.shift) == (family, mask, length, shift)
    assert info.num_parameters / 1e6 == pytest.approx(millions, abs=1e-3)
    assert mask in info.suppressed
    if family in {"llada", "llada_moe", "dream"}:
        without = {key: value for key, value in config.items() if key != "mask_token_id"}
        assert describe(found, without, mask_id=None).mask_id == mask
        assert describe(found, config, mask_id=5).mask_id == 5
    else:
        with pytest.raises(ValueError, match=f"model.mask_id: 5 given, but .* {family!r} it is the last id, {mask}"):
            describe(found, config, mask_id=5)


def test_causal_rows_predict_the_next_position_too(tmp_path):
    save_random(tmp_path)
    assert inspect_model(tmp_path).shift == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_that_does_not_fit_is_called_what_the_checkpoint_calls_it(golden, tmp_path, family):
    name = SOME[family]
    stray = name.replace("1.", "7.") if "1." in name else name + "_2"
    check_misfits(golden / family, tmp_path, family, name, stray)


def test_all_tensors_of_the_checkpoints_are_used(golden):
    for family in FAMILIES:
        weights = load_file(golden / family / "model.safetensors")
        held = sum(tensor.numel() for name, tensor in weights.items() if "inv_freq" not in name)
        assert inspect_model(golden / family).num_parameters == held
        plain = load(golden / family, "float64")  # in float32 products are packed, which is no parameter
        assert sum(parameter.numel() for parameter in plain.model.parameters()) == held


def test_mdlm_is_read_as_the_hub_and_as_its_own_training_name_it(golden, tmp_path):
    nested = {
        "parameterization": "subs",
        "backbone": "dit",
        "diffusion": "absorbing_state",
        "vocab_size": 65,
        "model": {"hidden_size": 48, "cond_dim": 32, "n_blocks": 2, "n_heads": 4, "length": 16},
        **dict.fromkeys(("model_type", "hidden_dim", "cond_dim", "n_blocks", "n_heads", "model_length")),
    }

    def bare(tensors):
        return {name.removeprefix("backbone."): t for name, t in tensors.items() if not name.endswith("inv_freq")}

    folder = copy_changed(golden / "mdlm", tmp_path, config=nested, weights=bare)
    assert inspect_model(folder) == inspect_model(golden / "mdlm")
    canvas = random_canvas(11, seed=0)
    # Not to the bit: where a tensor lies in its file decides how it is aligned in memory.
    ours, hubs = look_alone(load(folder), canvas), look_alone(load(golden / "mdlm"), canvas)
    torch.testing.assert_close(ours, hubs, atol=1e-4, rtol=1e-4)


def test_a_tied_llada_takes_its_embeddings_as_output_layer(golden, tmp_path):
    head = "model.transformer.ff_out.weight"
    tied = copy_changed(golden / "llada", tmp_path / "tied", config={"weight_tying": True}, weights=without(head))
    backbone = load(tied)
    embeddings = load_file(tied / "model.safetensors")["model.transformer.wte.weight"]
    rows = torch.eye(embeddings.shape[1])
    torch.testing.assert_close(backbone.logits(rows), rows @ embeddings.T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"lacks the tensors {head}"):
        load(copy_changed(golden / "llada", tmp_path / "untied", weights=without(head)))


def write_tokenizer(folder, form):
    vocab = {f"t{index}": index for index in range(88)}
    added = [{"id": index, "content": token} for token, index in TOKENS.items()]
    if form == "fast":
        tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 92}))
        rest = {str(token["id"]): {"content": token["content"]} for token in added if token["id"] != 92}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rest}))


@pytest.mark.parametrize("form", ["fast", "slow"])
@pytest.mark.parametrize(("family", "mask", "turn_end"), [("llada", 90, 89), ("dream", 91, 92)])
def test_mask_and_ids_without_a_token_are_suppressed_and_a_turn_ends_a_text(
    golden, tmp_path, form, family, mask, turn_end
):
    folder = copy_changed(golden / family, tmp_path)
    assert inspect_model(folder).suppressed == (mask,)
    assert stop_ids(folder) == (88,)
    write_tokenizer(folder, form)
    assert inspect_model(folder).suppressed == tuple(sorted({mask, 90, 93, 94, 95}))
    assert stop_ids(folder) == (88, turn_end)


def test_a_decoder_that_a_family_does_not_run_is_refused_by_name(golden):
    assert set(FAMILIES) == set(masked_diffusion_families()) < set(OFFERED)
    for family in ("llada", "dream"):
        with pytest.raises(
            ValueError, match=f"'parallel' does not run on models of family '{family}'; allowed: stepwise,"
        ):
            check_model(decoder_settings("parallel"), inspect_model(golden / family))
    with pytest.raises(ValueError, match="'parallel' does not run on models of family 'mdlm'; allowed: ancestral"):
        check_model(decoder_settings("parallel"), inspect_model(golden / "mdlm"))
    with pytest.raises(
        ValueError,
        match=r"known families: d2f_dream, .*llada, .*qwen3, .*sedd, xlnet, and the causal models of transformers",
    ):
        find_family({"model_type": "clip"}, "auto")
