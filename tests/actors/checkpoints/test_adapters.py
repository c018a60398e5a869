"""A LoRA adapter is merged once and computes what PEFT computes with it; one that does not fit is refused by name."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.actors.checkpoints import made_folders
from draftmill.actors.checkpoints.merge_adapter import MergeRefused, main, merge
from draftmill.actors.checkpoints.models import BUILTIN, _check_adapter, adapter_hash, fetch_model, model_hash
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.base import ModelInfo
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.plan.fingerprint import results_key
from draftmill.storage.errors import UserError
from tests.decoders.backbones.causal_models import in_a_row, load, play, save_random, theirs
from tests.decoders.backbones.masked_models import copy_changed, look_alone
from tests.jobs.specs import completion

TOKENS = [5, 17, 3, 60, 1, 8, 21]
LLAMA: dict = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
GPT2: dict = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


def train(model, folder, settings: dict, *, seed: int = 3):
    """Save an adapter whose weights are all random, as training leaves them; returns the model with it."""
    import peft  # takes seconds, which every process of the tests would spend

    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=peft.TaskType.CAUSAL_LM, **settings)).eval()
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(str(folder))
    return adapted


def merged(tmp_path, base: str = "base", adapter: str = "adapter"):
    folder = tmp_path / f"{adapter}-merged"
    folder.mkdir()
    merge(tmp_path / base, "b", tmp_path / adapter, "a", folder)
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", LLAMA),
        ("qwen3", LLAMA | {"use_rslora": True}),
        ("qwen2", LLAMA | {"use_dora": True}),
        ("gpt2", GPT2),
        ("gpt_neo", LLAMA | {"target_modules": "all-linear"}),
    ],
)
@pytest.mark.slow
def test_a_merged_model_computes_what_peft_computes(tmp_path, name, settings):
    model = save_random(tmp_path / "base", name)
    plain, _ = theirs(model, TOKENS)
    adapted = train(model, tmp_path / "adapter", settings)
    with torch.no_grad():
        expected = adapted(torch.tensor([TOKENS])).logits[0]
    backbone = load(merged(tmp_path))
    backbone.allocate(1, len(TOKENS))
    hidden = play(backbone, {0: in_a_row(TOKENS)})[0]
    torch.testing.assert_close(backbone.logits(hidden), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(hidden, plain, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "targets"),
    [
        (
            "gemma2",
            {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            ["q_proj", "down_proj"],
        ),
        ("phi3", {}, ["qkv_proj", "gate_up_proj"]),
    ],
)
def test_an_adapter_of_a_model_outside_the_table_computes_what_peft_computes(name, more, targets, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **heads, **more)).float()
    model.save_pretrained(tmp_path / "base")
    adapted = train(model.eval(), tmp_path / "adapter", {"r": 4, "lora_alpha": 8, "target_modules": targets})
    with torch.no_grad():
        expected = adapted(torch.tensor([TOKENS])).logits[0]
    backbone = load_backbone(merged(tmp_path), dtype="float32", device="cpu")
    backbone.allocate(1, len(TOKENS))
    found = backbone.logits(backbone.forward(causal_rows([0], [len(TOKENS)], [0], torch.tensor(TOKENS))))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def refused(tmp_path, adapter: str = "adapter", base: str = "base") -> str:
    with pytest.raises(MergeRefused) as caught:
        merged(tmp_path, base, adapter)
    return str(caught.value)


def test_an_adapter_of_another_model_is_refused_with_what_does_not_fit(tmp_path):
    train(save_random(tmp_path / "base", "llama"), tmp_path / "adapter", LLAMA)
    save_random(tmp_path / "narrow", "llama", hidden_size=16, head_dim=4)
    assert "size mismatch" in refused(tmp_path, base="narrow")
    save_random(tmp_path / "short", "llama", num_hidden_layers=2)
    shutil.rmtree(tmp_path / "adapter-merged")
    assert "parts that the model lacks: base_model.model.model.layers.2." in refused(tmp_path, base="short")
    save_random(tmp_path / "long", "llama", num_hidden_layers=4)
    shutil.rmtree(tmp_path / "adapter-merged")
    assert "it lacks: base_model.model.model.layers.3." in refused(tmp_path, base="long")
    save_random(tmp_path / "gpt2", "gpt2")
    shutil.rmtree(tmp_path / "adapter-merged")
    assert "Target modules" in refused(tmp_path, base="gpt2")


def test_what_can_not_be_merged_is_refused_by_name(tmp_path):
    import peft

    model = save_random(tmp_path / "base", "qwen3")
    train(model, tmp_path / "tied", LLAMA | {"target_modules": ["embed_tokens"]})
    assert "are one tensor in this model" in refused(tmp_path, "tied")
    prompt = peft.PromptTuningConfig(task_type=peft.TaskType.CAUSAL_LM, num_virtual_tokens=3)
    peft.get_peft_model(save_random(tmp_path / "base", "qwen3"), prompt).save_pretrained(str(tmp_path / "prompt"))
    assert "type PROMPT_TUNING, which adds to prompts" in refused(tmp_path, "prompt")
    shutil.copytree(BUILTIN / "asarm-tiny", tmp_path / "masked")
    shutil.rmtree(tmp_path / "tied-merged")
    assert "this model is of family 'xlnet'" in refused(tmp_path, "tied", "masked").replace('"', "'")


@pytest.mark.parametrize("damage", [{"r": None}, {"rank_pattern": 7}])
def test_a_value_that_peft_can_not_use_is_refused_in_a_sentence(tmp_path, capsys, damage):
    train(save_random(tmp_path / "base", "qwen3"), tmp_path / "adapter", LLAMA)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert main([str(tmp_path / "base"), "b", str(file.parent), "a", str(tmp_path)]) == 2
    said = json.loads(capsys.readouterr().out)["refused"]
    assert said.startswith(
        f"the adapter in {file.parent} can't be merged: PEFT can't use a value of its adapter_config.json ("
    )


# ---- masked and block-diffusion models, whose modules PEFT sees under the checkpoint's names -----------------------------

# As the public adapters of D2F on LLaDA name their parts; they have no task type.
D2F: dict = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "k_proj", "attn_out"]}
PATTERNS: dict = {
    "task_type": "CAUSAL_LM",
    "rank_pattern": {"gate_proj": 2},
    "alpha_pattern": {"k_proj": 1},
    "use_rslora": True,
}


def write_adapter(folder, weights: dict[str, torch.Tensor], settings: dict) -> dict[str, torch.Tensor]:
    """Write random LoRA weights for these tensors of a checkpoint by hand; returns what the merged tensors must be."""
    folder.mkdir()
    torch.manual_seed(4)
    merged, held = dict(weights), dict[str, torch.Tensor]()
    for name, tensor in weights.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith(".weight") and tensor.ndim == 2 and part in settings["target_modules"]:
            rank = settings.get("rank_pattern", {}).get(part, settings["r"])
            alpha = settings.get("alpha_pattern", {}).get(part, settings["lora_alpha"])
            down, up = torch.randn(rank, tensor.shape[1]), torch.randn(tensor.shape[0], rank)
            merged[name] = tensor + alpha / (rank**0.5 if settings.get("use_rslora") else rank) * up @ down
            stem = "base_model.model." + name.removesuffix(".weight")
            held |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    save_file(held, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | settings))
    return merged


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llada", D2F),
        ("llada", D2F | {"target_modules": ["ff_proj", "ff_out"]}),
        ("llada_moe", D2F | PATTERNS | {"target_modules": ["k_proj", "o_proj", "gate_proj"]}),
        ("llada2", D2F | {"target_modules": ["query_key_value", "down_proj", "lm_head"]}),
        ("sdar", D2F | PATTERNS | {"target_modules": ["k_proj", "gate_proj", "up_proj"]}),
        ("mdlm", D2F | {"target_modules": ["attn_qkv"]}),
    ],
)
def test_an_adapter_is_added_to_a_diffusion_models_tensors_under_their_names(tmp_path, golden, name, settings):
    copy_changed(golden / name, tmp_path / "base", config={"mask_token_id": 64})
    expected = write_adapter(tmp_path / "adapter", load_file(golden / name / "model.safetensors"), settings)
    ours = load_file(merged(tmp_path) / "model.safetensors")
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key], tensor.float(), rtol=1e-5, atol=1e-5)
    assert inspect_model(tmp_path / "adapter-merged") == inspect_model(tmp_path / "base")


def test_a_merged_dream_computes_what_peft_computes(tmp_path):
    model = save_random(tmp_path / "base", "qwen2", tie_word_embeddings=False)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"model_type": "Dream", "mask_token_id": 60}))
    adapted = train(model, tmp_path / "adapter", LLAMA | {"modules_to_save": ["lm_head"]})
    with torch.no_grad():
        mask = torch.zeros(1, 1, len(TOKENS), len(TOKENS))
        expected = adapted(input_ids=torch.tensor([TOKENS]), attention_mask=mask).logits[0]
    backbone = load(merged(tmp_path))
    torch.testing.assert_close(backbone.logits(look_alone(backbone, TOKENS)), expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_of_parts_that_a_diffusion_model_lacks_is_refused(tmp_path, golden):
    weights = load_file(golden / "dream" / "model.safetensors")
    write_adapter(tmp_path / "adapter", weights, D2F)
    shutil.copytree(golden / "llada", tmp_path / "base")
    assert "parts that the model lacks: base_model.model.model.layers.0." in refused(tmp_path)
    shutil.rmtree(tmp_path / "adapter-merged")
    copy_changed(golden / "dream", tmp_path / "small", config={"quantization_config": {"quant_method": "fp8"}})
    assert "the model's checkpoint is quantized" in refused(tmp_path, base="small")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no adapter_config.json"),
        (
            ["adapter_config.json", "adapter_model.bin"],
            r"has no adapter_model.safetensors; .*\(.bin\) are not supported",
        ),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"^model\.adapter: .*" + message):
        fetch_model("builtin:ar-tiny", adapter=str(tmp_path))


def test_an_adapter_that_is_a_pointer_of_git_lfs_is_named_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"^model\.adapter: .*adapter_model\.safetensors is a pointer of git-lfs"):
        fetch_model("builtin:ar-tiny", adapter=str(tmp_path))


def test_an_adapter_that_is_not_there_is_refused():
    for path in ("/no/such/folder", "builtin:ar-tiny", "nobody/no-such-adapter"):
        with pytest.raises(UserError, match=r"^model\.adapter: .*(is not a folder|neither a local folder)"):
            fetch_model("builtin:ar-tiny", adapter=path)


def test_an_adapter_of_another_hub_model_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/Base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    _check_adapter(tmp_path, "a", "owner/base")
    _check_adapter(tmp_path, "a", str(tmp_path))
    with pytest.raises(UserError, match=r"trained on 'owner/Base', not on 'owner/other'"):
        _check_adapter(tmp_path, "a", "owner/other")


def test_without_peft_the_message_says_how_to_go_on(tmp_path, monkeypatch):
    train(save_random(tmp_path / "base", "llama"), tmp_path / "adapter", LLAMA)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(UserError, match=r"^model\.adapter: .*pip install peft .*merge_and_unload"):
        fetch_model(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
def test_model_and_adapter_are_merged_once_and_both_are_in_the_fingerprint(tmp_path, monkeypatch):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    train(save_random(base, "llama"), adapter, LLAMA)
    folder = fetch_model(str(base), adapter=str(adapter))
    assert model_hash(folder) == model_hash(base) and adapter_hash(base) is None
    shutil.copytree(adapter, tmp_path / "copy")
    monkeypatch.setattr(made_folders, "run_maker", lambda *_: pytest.fail("merged again"))
    assert fetch_model(str(base), adapter=str(tmp_path / "copy")) == folder
    first = adapter_hash(folder)
    assert first is not None and len(first) == 64
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, tmp_path / "copy" / "adapter_model.safetensors")
    monkeypatch.undo()
    monkeypatch.setenv("DRAFTMILL_CACHE", str(tmp_path / "cache"))
    other = fetch_model(str(base), adapter=str(tmp_path / "copy"))
    assert other != folder and adapter_hash(other) != first and model_hash(other) == model_hash(base)


def test_a_job_without_an_adapter_keeps_its_fingerprint():
    spec, info = check_spec(completion()), ModelInfo("llama", 61, None, None, "causal", 1)
    plain = results_key(spec, info, model="m", tokenizer="t")
    assert "adapter" not in plain["model"]
    adapted = results_key(spec, info, model="m", tokenizer="t", adapter="x")
    assert adapted["model"]["adapter"] == "x"
