"""Causal models of transformers that are not in the table: tiny random ones, dense, mixtures, windows, soft caps, sinks, MLA.

Each gives the greedy texts of transformers' own `generate`.
"""

import copy
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from draftmill.decoders.backbones.any_causal import AnyCausalBackbone
from draftmill.decoders.backbones.attention import Scores
from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.families import any_causal
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.moe import Experts, GivenExperts
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.common_settings import Sampling
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.references import kernels as reference
from tests.decoders.support import decode, decoder_settings, prompts, texts

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
HALF = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK = MLA | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": HALF | {"attn_logit_softcapping": 0.5},
    "gemma3_text": HALF,
    "gemma4_text": HALF | {"global_head_dim": 16, "hidden_size_per_layer_input": 0},
    "phi": {},
    "phi3": {},
    "phimoe": EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmo3": HALF,
    "olmoe": EXPERTS,
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": EXPERTS,
    "granite_swa": HALF,
    "smollm3": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS | {"output_router_logits": True},
    "gpt_oss": EXPERTS | HALF | {"rope_parameters": YARN, "intermediate_size": 64},
    "deepseek_v2": DEEPSEEK | {"topk_method": "greedy", "moe_intermediate_size": 16},
    "deepseek_v3": DEEPSEEK | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "minicpm3": MLA,
    "cohere": {"logit_scale": 0.5},
    "cohere2": HALF | {"logit_scale": 0.5},
    "starcoder2": {},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "glm4": {},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "helium": {},
    "exaone4": HALF,
    "seed_oss": {},
    "mimo_v2_flash": EXPERTS | HALF | {"v_head_dim": 6},
    "ministral3": {},
    "apertus": {},
    "arcee": {},
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A random model of a family: its folder, transformers' module, our backbone, each made once."""

    @cache
    def loaded(name):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(3)
        own = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **SIZES | FAMILIES[name]), dtype=torch.float32
        )
        shake(own)
        own.save_pretrained(folder)
        return folder, own.eval(), load_backbone(folder, dtype="float32", device="cpu")

    return loaded


@torch.no_grad()
def shake(model):
    """Give every tensor numbers that differ, biases and sinks too, large enough for the layers to matter."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


def requests():
    """Prompts shorter and longer than a window, ragged."""
    return prompts([(3, 15), (17, 26), (1, 21), (9, 12), (26, 40)], vocab_size=VOCAB, seed=7, least=1)


def generated(own, request, **more):
    prompt = torch.tensor(request.canvas[request.canvas >= 0]).long().unsqueeze(0)
    options = {"max_new_tokens": int((request.canvas < 0).sum()), "do_sample": False} | more
    return own.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, prompt.shape[1] :].tolist()


def test_the_types_that_are_named_as_tested_are_these_with_this_version():
    assert set(any_causal.TESTED) == set(FAMILIES) and any_causal.version() == any_causal.TESTED_WITH


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_texts_are_those_of_generate(name, load):
    folder, own, backbone = load(name)
    settings, sampling = decoder_settings("autoregressive"), Sampling(temperature=0.0)
    found = texts(decode(backbone, inspect_model(folder), settings, sampling, requests(), rows=3))
    assert backbone.exact, "in float32 on a CPU the batch changes nothing"
    for request in requests():
        assert found[request.index] == generated(own, request)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("mamba", {}, "layer_types holds linear_attention; supported: full_attention, sliding_attention"),
        ("llama4_text", {}, "layer_types holds chunked_attention"),
        ("diffllama", {}, "0 of its 4 layers attend once, through transformers' attention interface"),
        ("bloom", {}, "its network does not run on rows of tokens"),
        ("bart", {}, "it has an encoder"),
        ("bert", {}, "its attention sees texts in both directions"),
        ("gemma2", {"quantization_config": {"quant_method": "hqq"}}, "quant_method = 'hqq'; supported: gptq"),
        ("gemma2", {"num_attention_heads": 0}, "gemma2"),
    ],
)
def test_a_model_that_cannot_run_is_refused_in_one_line_before_its_weights_are_read(name, more, reason, tmp_path):
    config = {key: value for key, value in SIZES.items() if name != "bloom"} | more | {"model_type": name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"{index}": torch.zeros(1) for index in range(9)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        inspect_model(tmp_path)
    assert str(refused.value).startswith("model.") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kind"), [("gemma2", "int8"), ("phi", "fp8"), ("qwen2_moe", "int8"), ("gpt_oss", "fp8")]
)
def test_layers_may_have_small_weights(load, name, kind):
    folder, _, full = load(name)
    small: Any = load_backbone(folder, dtype="float32", device="cpu", small=kind)
    full_ones = [name for name, weight in small.base.named_parameters() if weight.ndim > 1 and "embed" not in name]
    assert small.exact and all("gate" in name or "router" in name for name in full_ones)
    states = []
    for backbone in (full, small):
        backbone.allocate(1, 32)
        states.append(backbone.forward(causal_rows([0], [20], [0], torch.arange(20) % VOCAB)))
    assert 0 < (states[0] - states[1]).norm() / states[0].norm() < 0.5


def test_a_type_that_transformers_does_not_have_is_refused_with_the_types_that_can_be_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "gemma99"}))
    with pytest.raises(ValueError, match=r"'gemma99'; known families: .*and the causal models of transformers 5\."):
        inspect_model(tmp_path)


def test_missing_and_foreign_tensors_are_named_as_the_checkpoint_names_them(load, tmp_path):
    folder = load("mixtral")[0]
    weights = load_file(folder / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != expert}, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match=f"lacks the tensors {re.escape(expert)}"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("what", ["window", "cap", "sink", "order"])
def test_a_forward_that_is_not_the_models_own_is_refused(what, load, monkeypatch):
    name = {"window": "olmo3", "cap": "gemma2", "sink": "gpt_oss", "order": "mixtral"}[what]
    folder = load(name)[0]
    if what == "window":
        made = any_causal.facts(name, json.loads((folder / "config.json").read_text()))
        wrong = dataclasses.replace(made, windows=made.windows[::-1])
        monkeypatch.setattr("draftmill.decoders.backbones.any_causal.facts", lambda *_: wrong)
    elif what == "order":
        ask = Experts._ask
        monkeypatch.setattr(Experts, "_ask", lambda self, rows, expert: ask(self, rows, expert.flip(1)))
    else:
        monkeypatch.setattr(
            Scores, *(("capped_", lambda self, scores: scores) if what == "cap" else ("left", lambda *_: None))
        )
    with pytest.raises(ValueError, match=rf"family '{name}' can't run here: at token \d+ of text 0 the hidden states"):
        load_backbone(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", "phi3"])
def test_other_dtypes_run_too_and_say_that_they_are_not_exact(name, load):
    folder = load(name)[0]
    backbone = load_backbone(folder, dtype="bfloat16", device="cpu")
    settings, sampling = decoder_settings("autoregressive"), Sampling(temperature=0.0)
    found = texts(decode(backbone, inspect_model(folder), settings, sampling, requests(), rows=3))
    assert not backbone.exact and [len(found[one.index]) for one in requests()] == [12, 9, 20, 3, 14]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_whose_turns_follow_the_longest_text_end_where_the_training_did(kind, tmp_path):
    name, rope = "smollm3", {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        name = "phi3"
        rope = rope | {"short_factor": [1.5] * 4, "long_factor": [5.0] * 4, "original_max_position_embeddings": 32}
    config = AutoConfig.for_model(
        name,
        **SIZES | {"rope_parameters": rope, "max_position_embeddings": 128, "original_max_position_embeddings": 32},
    )
    torch.manual_seed(3)
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shake(own)
    own.save_pretrained(tmp_path)
    longest = 32
    assert inspect_model(tmp_path).max_length == longest
    file = tmp_path / "config.json"
    written = file.read_text()
    file.write_text(json.dumps(json.loads(written) | {"draftmill": {"max_length": longest + 1}}))
    with pytest.raises(ValueError, match=f"model's positions end at {longest}"):
        inspect_model(tmp_path)
    file.write_text(written)
    backbone: Any = load_backbone(tmp_path, dtype="float32", device="cpu")
    token_N = torch.arange(longest) % VOCAB
    backbone.allocate(1, longest + 8)
    ours = backbone.forward(causal_rows([0], [longest], [0], token_N))
    theirs = own.eval().model(token_N.unsqueeze(0)).last_hidden_state[0]
    assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()


@pytest.mark.parametrize("published", [True, False], ids=["language_model.model", "model.language_model"])
def test_the_text_model_of_a_larger_one_is_read_and_the_rest_left(published, tmp_path):
    text = {key: value for key, value in SIZES.items() if not key.endswith("_token_id")} | FAMILIES["gemma3_text"]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision | {"patch_size": 8}, mm_tokens_per_image=4
    )
    torch.manual_seed(3)
    own = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    shake(own)
    own.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = {name: re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name) for name in weights}
    prefix = "language_model.model." if published else "model.language_model."
    weights = {
        names[name].replace("model.", prefix, 1) if names[name] != name else name: weights[name] for name in weights
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert sum(name.startswith(prefix) for name in weights) > 20 and sum("vision" in name for name in weights) > 5
    info, backbone = inspect_model(tmp_path), load_backbone(tmp_path, dtype="float32", device="cpu")
    settings, sampling = decoder_settings("autoregressive"), Sampling(temperature=0.0)
    found = texts(decode(backbone, info, settings, sampling, requests(), rows=3))
    (tmp_path / "generation_config.json").unlink()
    config_json = json.loads((tmp_path / "config.json").read_text())
    config_json.pop("eos_token_id", None)
    config_json["text_config"]["eos_token_id"] = 7
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    assert stop_ids(tmp_path) == (7,)
    assert info.family == "gemma3_text" and info.num_parameters < sum(part.numel() for part in own.parameters())
    for request in requests():
        assert found[request.index] == generated(own, request, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize(
    ("name", "prefix", "more"),
    [
        ("gpt_neox", "gpt_neox.", ["layers.0.attention.masked_bias", "layers.1.attention.rotary_emb.inv_freq"]),
        ("olmo", "model.", ["layers.2.self_attn.rotary_emb.inv_freq"]),
        ("deepseek_v3", "", ["model.layers.61.embed_tokens.weight"]),
    ],
)
def test_names_of_older_versions_and_of_layers_of_the_training_are_read(name, prefix, more, load, tmp_path):
    folder, _, backbone = load(name)
    weights = {key.removeprefix(prefix): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | {key: torch.ones(2) for key in more}, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert inspect_model(tmp_path) == inspect_model(folder)
    found: Any = load_backbone(tmp_path, dtype="float32", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(found._states(), backbone._states(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "phimoe"])
def test_experts_that_are_multiplied_at_once_give_the_same(name, load):
    own = next(part for part in copy.deepcopy(load(name)[1]).modules() if hasattr(part, "is_transposed"))
    own.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    rows_ND = torch.randn(9, 32, generator=generator)
    expert_NK = torch.rand(9, 4, generator=generator).argsort(1)[:, :2]
    weight_NK = torch.rand(9, 2, generator=generator)
    expected = own(rows_ND, expert_NK, weight_NK)
    experts = GivenExperts(own)
    assert torch.allclose(experts(rows_ND, expert_NK, weight_NK), expected, atol=1e-5)
    experts.gather(reference.product)
    assert experts.is_gathered and torch.allclose(experts(rows_ND, expert_NK, weight_NK), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "gpt_oss", "deepseek_v3", "mimo_v2_flash"])
def test_attention_over_flat_rows_as_kernels_compute_it_gives_the_same_states(name, load, monkeypatch):
    folder = load(name)[0]
    plain: Any = load_backbone(folder, dtype="float64", device="cpu")
    monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_attention", lambda *_, **__: reference.attend)
    flat: Any = load_backbone(folder, dtype="float64", device="cpu")
    assert flat.cache.is_pooled and not plain.cache.is_pooled
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(flat._states(), plain._states(), strict=True))


def test_a_model_that_rounds_by_the_size_of_its_batch_runs_and_is_not_called_exact(load, monkeypatch):
    folder, run = load("granite")[0], AnyCausalBackbone._run
    monkeypatch.setattr(
        AnyCausalBackbone, "_run", lambda self, tokens, *more: run(self, tokens, *more) + 1e-6 * len(tokens)
    )
    backbone = load_backbone(folder, dtype="float32", device="cpu")
    assert not backbone.exact
    with pytest.raises(ValueError, match="the batch changes last bits"):
        load_backbone(folder, dtype="float32", device="cpu", exact=True)


def test_experts_of_fp4_are_read_as_transformers_reads_them(load, tmp_path):
    """The layout in which gpt-oss is published; the numbers of its experts are few."""
    folder = load("gpt_oss")[0]
    config = json.loads((folder / "config.json").read_text())
    dense, small, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(2)
    for name, tensor in list(dense.items()):
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            small[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        shape = (num_experts, num_out, -(-num_in // 32))
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 127, shape, generator=generator, dtype=torch.uint8)
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for name, weights, more in (
        ("dense", dense, {}),
        ("small", small, {"quantization_config": {"quant_method": "mxfp4"}}),
    ):
        (tmp_path / name).mkdir()
        save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"intermediate_size": 64} | more))
    expected, found = (inspect_model(tmp_path / name) for name in ("dense", "small"))
    assert found == expected
    states: list[Any] = [load_backbone(tmp_path / name, dtype="float32", device="cpu") for name in ("dense", "small")]
    assert all(torch.equal(a, b) for a, b in zip(*(one._states() for one in states), strict=True))


def test_a_model_is_described_in_a_process_that_loaded_one_of_the_table_before(tmp_path):
    """torch keeps a list of what makes tensors, from its first use on."""
    save_random(tmp_path)
    config = json.dumps(SIZES | FAMILIES["gemma4_text"])
    code = f"""
import json, pathlib
from draftmill.decoders.backbones.families.any_causal import facts
from draftmill.decoders.backbones.load import load_backbone
load_backbone(pathlib.Path({str(tmp_path)!r}), device="cpu")
print(facts("gemma4_text", json.loads({config!r})).head_dim)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "16", found.stderr[-1000:]


def test_weights_of_experts_are_not_among_those_that_every_row_is_multiplied_with(load):
    backbone = load("mixtral")[2]
    attention, router = 2 * 32 * 32 + 2 * 32 * 16, 32 * 4
    assert backbone.num_weights == 4 * (attention + router)
