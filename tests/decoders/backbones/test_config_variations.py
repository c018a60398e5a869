"""What varies between public checkpoints of one causal family: every variation decodes as transformers does, or is refused."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from tests.decoders.backbones.causal_models import SLIDING, in_a_row, load, play, random_tokens, save_random, theirs
from tests.decoders.backbones.config_changes import GONE, TYPES, YARN, change_config, old_rope
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
