"""A config.json of which no family can make what it asks for is refused by field, value and what is supported."""

import pytest

from draftmill.decoders.backbones.checkpoint import inspect_model
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.backbones.config_changes import TYPES, YARN, change_config, old_rope
from tests.decoders.backbones.masked_models import copy_changed
from tests.decoders.backbones.test_block_families import GIVEN


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen2", {"hidden_act": "swoosh"}, "swoosh"),
        ("qwen2", {"hidden_size": "wide"}, "hidden_size"),
        ("qwen2", {"num_key_value_heads": 3}, "4 heads and 3 key heads do not divide"),
        ("qwen2", {"vocab_size": 0}, "vocab_size = 0; allowed: whole numbers >= 1"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("qwen2", {"quantization_config": {"quant_method": "hqq"}}, "quant_method = 'hqq'; supported: gptq"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        ("llama", {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, "nonsense"),
        ("gpt2", {"add_cross_attention": True}, "it has an encoder"),
        ("gpt2", {"draftmill": {"max_length": 65}}, "draftmill.max_length = 65; the model's positions end at 64"),
        ("gpt_neo", {"num_layers": 4}, "family 'gpt_neo': .*num_layers"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0; allowed: whole numbers >= 1"),
        ("qwen2-sliding", {"sliding_window": -1}, "sliding_window = -1; allowed"),
        ("qwen2", {"layer_types": TYPES}, "layer_types holds sliding_attention, but sliding_window is null"),
        ("gpt_neo", {"window_size": 0}, r"windows of .*0, 0\) positions; supported: numbers >= 1"),
        ("llama", {"rope_scaling": {"type": "yarn", "beta_fast": "x"} | YARN}, "beta_fast = 'x'; allowed: numbers > 0"),
        ("llama", {"rope_scaling": {"type": "longrope"} | YARN}, "rope type 'longrope'|short_factor"),
        (
            "qwen3",
            old_rope({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
            "whole heads are rotated",
        ),
        ("llama", {"num_attention_heads": 0}, "family 'llama': it has num_attention_heads = 0"),
        ("gpt2", {"draftmill": [64]}, r"draftmill = \[64\]; allowed: an object"),
        ("gpt2", {"draftmill": {"max_length": "64"}}, "max_length = '64'; allowed: whole numbers >= 1"),
        ("llama", {"max_position_embeddings": 10**12}, "texts of 1,000,000,000,000 tokens; allowed: up to"),
        (
            "xlnet_asarm",
            {"model_type": "clip"},
            "model.family: config.json has model_type 'clip'; known families: d2f_dream, .*fast_dllm_v2, .*xlnet",
        ),
        ("xlnet_asarm", {"attn_type": "uni"}, "attn_type = 'uni'"),
        ("xlnet_asarm", {"bi_data": True}, "bi_data = true"),
        ("xlnet_asarm", {"ff_activation": "swish"}, "ff_activation = 'swish'"),
        ("xlnet_asarm", {"d_head": 16}, "n_head = 4, d_head = 16"),
        ("xlnet_asarm", {"clamp_len": 2.5}, "clamp_len = 2.5; allowed: whole numbers"),
        ("xlnet_asarm", {"layer_norm_eps": "tiny"}, "layer_norm_eps = 'tiny'; allowed: numbers"),
        ("xlnet_asarm", {"n_layer": None}, "n_layer = none; allowed: whole numbers >= 1"),
        ("llada", {"block_type": "sequential"}, "family 'llada': it has block_type = 'sequential'; supported: 'llama'"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias = true; supported: false"),
        ("llada", {"alibi": True}, "alibi = true"),
        ("llada", {"d_model": None}, "d_model"),
        ("llada", {"n_kv_heads": 3}, "4 heads and 3 key heads do not divide"),
        ("llada", {"mask_token_id": 96}, r"model.mask_id: 96 is outside the vocabulary; allowed: 0 .. 95"),
        ("llada_moe", {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size = 32; supported: none"),
        ("llada_moe", {"qk_layernorm": False}, "qk_layernorm = false; supported: true"),
        (
            "llada_moe",
            {"norm_topk_prob": True},
            "family 'llada_moe': it has norm_topk_prob = true; supported: false, none",
        ),
        ("llada_moe", {"moe_layer_freq": [1, 0]}, "moe_layer_freq has not one entry for each of the 3 layers"),
        ("llada_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 of 6 experts"),
        ("llada_moe", {"expert_intermediate_size": None}, "expert_intermediate_size"),
        ("dream", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window = true; supported: false"),
        ("dream", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("mdlm", {"cond_dim": None}, "family 'mdlm': it has cond_dim = none; allowed: whole numbers >= 1"),
        ("mdlm", {"n_heads": 5}, "width 48 does not give 5 heads of even width"),
        ("mdlm", {"parameterization": "d3pm"}, "parameterization = 'd3pm'; supported: 'subs'"),
        ("sedd", {"graph": {"type": "uniform"}}, "family 'sedd': it has graph.type = 'uniform'; supported: 'absorb'"),
        ("sedd", {"noise": {"type": "geometric"}}, "noise.type = 'geometric'"),
        ("sedd", {"noise": None}, "no sections noise"),
        ("sedd", {"model": {"type": "ddit", "hidden_size": 48, "scale_by_sigma": False}}, "scale_by_sigma = false"),
        ("sedd", {"tokens": 0}, "tokens = 0; allowed"),
        ("llada", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling = {"type": "linear"'),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv = 8.0; supported: none"),
        ("llada", {"n_heads": 0}, "family 'llada'"),
        ("llada", {"mask_token_id": "60"}, "mask_token_id = '60'; allowed: whole numbers >= 0"),
        (
            "llada2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn'; supported: 'default'",
        ),
        ("llada2", {"rope_parameters": {"rope_theta": 77.0}}, "rope_theta = 600000, but 77.0 in rope_parameters"),
        ("llada2", {"using_split_qkv_in_self_attention": True}, "using_split_qkv_in_self_attention = true"),
        ("mdlm", {"time_conditioning": "False"}, "time_conditioning = 'False'"),
        (
            "mdlm",
            {"noise": {"type": "cosine"}, "time_conditioning": True},
            "noise.type = 'cosine'; supported: 'loglinear'",
        ),
        ("sdar", {"use_sliding_window": True}, "family 'sdar': it has use_sliding_window = true; supported: false"),
        ("sdar", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("sdar", {"block_size": 0}, "block_size = 0; allowed: whole numbers >= 1"),
        ("sdar", {"mask_token_id": 96}, r"model.mask_id: 96 is outside the vocabulary; allowed: 0 .. 95"),
        ("sdar", {"mask_token_id": "<|MASK|>"}, "mask_token_id = '<|MASK|>'; allowed: whole numbers >= 0"),
        ("sdar", {"num_key_value_heads": 3}, "4 heads and 3 key heads do not divide"),
        ("sdar", {"quantization_config": {"bits": 4}}, "quant_method = None; supported: gptq, awq"),
        ("fast_dllm_v2", {"bd_size": "8"}, "bd_size = '8'; allowed"),
        ("fast_dllm_v2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window = true"),
        (
            "nemotron",
            {"sliding_window": 8},
            "family 'nemotron_labs_diffusion': it has sliding_window = 8; supported: none",
        ),
        ("nemotron", {"tie_word_embeddings": True}, "tie_word_embeddings = true; supported: false"),
        ("nemotron", {"attention_bias": True}, "attention_bias = true"),
        ("llada2", {"hidden_size": None}, "family 'llada2': it has hidden_size = none; allowed: whole numbers >= 1"),
        ("llada2", {"score_function": "softmax"}, "score_function = 'softmax'; supported: 'sigmoid'"),
        ("llada2", {"use_qk_norm": False}, "use_qk_norm = false; supported: true"),
        ("llada2", {"use_qkv_bias": True}, "use_qkv_bias = true"),
        ("llada2", {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ("llada2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_scaling = {"type": "linear"'),
        ("llada2", {"tie_word_embeddings": True}, "tie_word_embeddings = true"),
        ("llada2", {"n_group": 8}, "8 experts in n_group = 8, .* equal groups of at least 2"),
        ("llada2", {"n_group": 3}, "8 experts in n_group = 3"),
        ("llada2", {"topk_group": 5}, "topk_group = 5 are kept"),
        ("llada2", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5; 2 groups of 2 have fewer experts"),
        ("llada2", {"rotary_dim": 16}, "rotary_dim = 16, but partial_rotary_factor makes it 8"),
        ("llada2", {"partial_rotary_factor": 0.2, "rotary_dim": None}, "rotary dimension 3 of head dimension 16"),
        ("llada2", {"partial_rotary_factor": "half"}, "partial_rotary_factor = 'half'; allowed: numbers > 0"),
        ("llada2", {"num_key_value_heads": 3}, "4 heads and 3 key heads do not divide evenly"),
        ("llada2", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1; allowed: whole numbers >= 0"),
        ("llada2", {"rms_norm_eps": None}, "rms_norm_eps = none; allowed: numbers > 0"),
    ],
)
def test_a_config_that_can_not_be_run_is_refused(golden, tmp_path, family, change, message):
    if (golden / family).is_dir():
        copy_changed(golden / family, tmp_path, config=change)
    else:
        save_random(tmp_path, family)
        change_config(tmp_path, change)
    with pytest.raises(ValueError, match=rf"^(?=model\.\w+: ).*{message}"):
        inspect_model(tmp_path, mask_id=GIVEN.get(family))
