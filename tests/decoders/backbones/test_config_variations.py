"""What varies between public checkpoints: it decodes as transformers does, or is refused by field and value."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.families.rotary import MixtureShape
from draftmill.decoders.backbones.families.table import find_family
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from tests.decoders.backbones.causal_models import SLIDING, in_a_row, load, play, random_tokens, save_random, theirs
from tests.decoders.backbones.config_changes import GONE, TYPES, YARN, change_config, old_rope
from tests.decoders.backbones.masked_models import copy_changed
from tests.decoders.backbones.test_families import MASKS
from tests.decoders.support import decode, decoder_settings, texts

LINEAR = {"factor": 3.0, "rope_theta": 100.0}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


# ---- causal families: transformers' logits and transformers' greedy text ---------------------------------------------

# name: (name in MODELS, changes of the config that is built, changes of the config.json that was saved)
VARIATIONS: dict[str, tuple[str, dict, dict]] = {
    "one key head, untied": ("llama", {"num_key_value_heads": 1}, {}),
    "as many key heads as heads": ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}, {}),
    "wide heads and a bias in the MLP": ("llama", {"head_dim": 20, "mlp_bias": True}, {}),
    "old rotation": ("llama", {}, old_rope(None)),
    "old rotation, linear": ("qwen2", {}, old_rope({"type": "linear", "factor": 2.0})),
    "linear": ("qwen3", {}, {"rope_parameters": {"rope_type": "linear"} | LINEAR}),
    "old rotation, yarn": ("mistral", {}, old_rope({"type": "yarn"} | YARN)),
    "yarn with options": (
        "qwen2",
        {},
        old_rope({"rope_type": "yarn", "beta_fast": 16, "attention_factor": 0.7} | YARN),
    ),
    "old rotation, llama3": ("llama", {}, old_rope({"rope_type": "llama3"} | LLAMA3)),
    "no window": ("mistral", {"sliding_window": None}, {}),
    "old windows": ("qwen2", SLIDING, {"layer_types": GONE}),
    "old windows off": ("qwen3", {}, {"layer_types": GONE, "sliding_window": 4, "max_window_layers": 0}),
    "windows by layer": ("qwen3", {}, {"layer_types": TYPES, "use_sliding_window": True, "sliding_window": 3}),
    "another activation": ("qwen2", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}, {}),
    "GPT-2 without scale": ("gpt2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}, {}),
    "GPT-2 untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}, {}),
    "GPT-2 with fields of others": ("gpt2", {}, {"num_key_value_heads": 1, "head_dim": 4}),
    "GPT-Neo untied": ("gpt_neo", {"window_size": 3, "tie_word_embeddings": False}, {}),
    "GPT-Neo local alone": ("gpt_neo", {"attention_types": [[["local"], 3]], "activation_function": "gelu"}, {}),
    "no tuples": ("llama", {}, {"return_dict": False}),
    "several ends": ("gpt2", {"eos_token_id": [5, 9, 13, 16, 21, 48, 55, 58]}, {}),
}
SETTINGS = (
    decoder_settings("autoregressive"),
    decoder_settings("speculative", k=3, drafter={"kind": "ngram", "max_n": 3}),
    decoder_settings("jacobi", block_size=8),
)


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.slow
def test_logits_and_greedy_texts_are_those_of_transformers(tmp_path, variation):
    name, built, saved = VARIATIONS[variation]
    save_random(tmp_path, name, **({"eos_token_id": None, "bos_token_id": None} | built))
    change_config(tmp_path, saved)
    check_against_transformers(tmp_path, precise="GPT-Neo" not in variation)


def check_against_transformers(folder, *, precise=True):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.config.return_dict = True
    info, backbone = inspect_model(folder), load(folder, "float64")
    text = random_tokens(26, seed=4)
    backbone.allocate(1, len(text))
    logits = backbone.logits(play(backbone, {0: in_a_row(text)})[0])
    # transformers computes some parts in float32 whatever the dtype, GPT-Neo its scores.
    tolerance = 1e-6 if precise else 1e-4
    torch.testing.assert_close(logits, theirs(model, text)[1], atol=tolerance, rtol=tolerance)
    model.generation_config.pad_token_id = 0
    rng, requests, expected = np.random.default_rng(0), list[Request](), {}
    for index, num_prompt in enumerate((1, 12, 4)):
        canvas = rng.integers(1, info.vocab_size, num_prompt + 9).astype(np.int32)
        canvas[num_prompt:] = -1
        requests.append(Request(index, sample_key(7, str(index)), canvas))
        prompt = torch.from_numpy(canvas[:num_prompt]).long().unsqueeze(0)
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
        expected[index] = made[0, num_prompt:].tolist()
    stops = Stops(stop_ids(folder), None)
    for settings in SETTINGS:
        outcomes = decode(backbone, info, settings, Sampling(temperature=0.0), requests, rows=2, stops=stops)
        assert texts(outcomes) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shards_of_half_precision_are_read(tmp_path, dtype):
    model = save_random(tmp_path, "llama-3")
    (tmp_path / "model.safetensors").unlink()
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="4KB")
    change_config(tmp_path, {"architectures": GONE})
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_against_transformers(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_how_others_run_the_weights_is_no_matter(tmp_path, key):
    save_random(tmp_path, "llama")
    change_config(tmp_path, {key: "flash_attention_2"})
    load(tmp_path)


# ---- families of which transformers has no class: what their networks are built from ---------------------------------

SIZES: list[tuple[str, dict, dict]] = [
    ("llada", {"n_kv_heads": 1, "embedding_size": None}, {"num_key_value_heads": 1, "vocab_size": 96}),
    ("llada", {"n_kv_heads": None, "mlp_hidden_size": None, "mlp_ratio": 3}, {"intermediate_size": 144}),
    ("llada", {"weight_tying": True, "rms_norm_eps": 1e-2}, {"tied": True, "rms_norm_eps": 1e-2, "max_length": 256}),
    ("llada", {"rope_theta": 100.0}, {"rope": {"rope_type": "default", "rope_theta": 100.0}}),
    ("llada", {"embedding_size": 104, "n_kv_heads": None}, {"vocab_size": 104, "num_key_value_heads": 4}),
    ("llada2", {"first_k_dense_replace": 2, "num_key_value_heads": 4}, {"dense": {0, 1}, "num_key_value_heads": 4}),
    ("llada2", {"partial_rotary_factor": 0.25, "rotary_dim": 4}, {"rotary_dim": 4, "rope": {"rope_theta": 600000}}),
    ("llada2", {"partial_rotary_factor": 1.0, "rotary_dim": None, "head_dim": None}, {"rotary_dim": 12, "head_dim": 12}),
    ("mdlm", {"n_heads": 8, "cond_dim": 33, "time_conditioning": True}, {"num_attention_heads": 8, "cond_dim": 33}),
    ("mdlm", {"n_blocks": 3, "time_conditioning": None}, {"num_hidden_layers": 3, "takes_sigma": False}),
]  # fmt: skip
MIXTURE = {
    "num_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 1.0,
}


def shape_of(golden, family, **changes):
    config = json.loads((golden / family / "config.json").read_text()) | changes
    return find_family(config, "auto").shape(config)


@pytest.mark.parametrize(("family", "changes", "expected"), SIZES)
def test_sizes_are_those_that_config_json_says(golden, family, changes, expected):
    shape = shape_of(golden, family, **changes)
    assert {name: getattr(shape, name) for name in expected} == expected


def test_a_mixture_is_the_one_that_config_json_says(golden):
    found = shape_of(golden, "llada2", **MIXTURE).mixture
    assert found == MixtureShape(inner=24, num_experts=8, num_chosen=1, groups=(2, 1), scale=1.0, shared=48)
    assert shape_of(golden, "llada2", num_shared_experts=0, first_k_dense_replace=0).mixture.shared == 0


def test_a_llada2_may_keep_its_rotation_in_rope_parameters(golden):
    rope = {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 0.5}
    config = json.loads((golden / "llada2" / "config.json").read_text())
    newer = {key: value for key, value in config.items() if key not in rope} | {"rope_parameters": rope}
    assert find_family(newer, "auto").shape(newer) == shape_of(golden, "llada2")


def test_a_mask_that_is_null_is_the_public_one():
    for family, mask in (("llada", 126336), ("dream", 151666)):
        assert find_family({"model_type": family}, family).mask_id({"mask_token_id": None}) == mask


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_single_file_is_read_whatever_an_index_beside_it_says(tmp_path):
    save_random(tmp_path, "gpt2")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "other.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(load(tmp_path).embedding_VD.detach(), weights["transformer.wte.weight"])


DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
FILES, TOKENIZER = ("config.json", "generation_config.json", "tokenizer.json"), "the files of .* can't be read: "
NESTED = '{"a": ' + "[" * 300 + "]" * 300 + "}"


NO_PLAIN_JSON = [
    (DEEP, "is not JSON: maximum recursion depth exceeded"),
    (NESTED, "nests objects and lists too deeply; allowed: 100 levels"),
    ('{"a": ' + "1" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ("version https://git-lfs.github.com/spec/v1", "is a pointer of git-lfs, not the file; run `git lfs pull`"),
]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, content, f".*{name} {message}") for name in FILES for content, message in NO_PLAIN_JSON),
        (INDEX, "{", ".*is not JSON"),
        (INDEX, "[]", ".*is not a JSON object"),
        (INDEX, "{}", ".*has no weight_map"),
        (INDEX, '{"weight_map": {"a": 3}}', ".*has no weight_map"),
        (INDEX, '{"weight_map": {"a": "gone.safetensors"}}', ".*lacks gone.safetensors"),
        (
            INDEX,
            '{"weight_map": {"a": "../other.safetensors"}}',
            ".*'../other.safetensors' in its weight_map; allowed: ",
        ),
        (INDEX, '{"weight_map": {"a": ".."}}', ".*has '..' in its weight_map; allowed: NAME.safetensors"),
        ("tokenizer.json", '{"model": 3}', TOKENIZER),
        ("tokenizer.json", '{"added_tokens": [3]}', TOKENIZER),
        ("tokenizer.json", '{"added_tokens": [{"content": "a", "id": "b"}]}', TOKENIZER),
    ],
)
def test_a_file_of_other_content_is_refused_by_name(tmp_path, name, content, message):
    save_random(tmp_path, "llama")
    (tmp_path / name).write_text(content)
    if name == INDEX:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^model.path: {message}"):
        inspect_model(tmp_path)


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
        inspect_model(tmp_path, mask_id=MASKS.get(family))
