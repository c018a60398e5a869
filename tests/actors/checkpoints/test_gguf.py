"""A GGUF file gives the model and the tokenizer that it was made from, once, or a refusal that says why and what to do."""

import importlib.util
import json
import logging
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from draftmill.actors.checkpoints.gguf_convert import convert, narrow
from draftmill.actors.checkpoints.gguf_files import by_hand, check_gguf, gguf_folder, weights_hash
from draftmill.actors.checkpoints.made_folders import content_hash, make_once, read_source
from draftmill.actors.checkpoints.models import fetch_model, model_hash, tokenizer_hash
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import read_config, stop_ids
from draftmill.decoders.backbones.load import load_weights
from draftmill.storage.errors import UserError
from tests.decoders.backbones.causal_models import LLAMA3_ROPE, in_a_row, load, play, save_random
from tests.runs.gguf_of_tests import WORDS, write_gguf

# Widths of whole blocks of 32, which quantised files have.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(WORDS["tokens"])}
TOKENS = [5, 17, 3, 60, 1, 8, 21]


def made(tmp_path: Path, file: Path) -> Path:
    """The checkpoint of a file, converted in this process."""
    folder = tmp_path / "made"
    folder.mkdir()
    convert(file, folder, content_hash(file))
    return folder


def logits(backbone) -> torch.Tensor:
    backbone.allocate(1, len(TOKENS))
    return backbone.logits(play(backbone, {0: in_a_row(TOKENS)})[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_the_weights_of_a_file_are_those_of_the_checkpoint_it_was_made_from(tmp_path, name):
    changes = {"attention_bias": False} if name == "llama" else {}
    model = save_random(tmp_path / "original", name, **changes)
    folder = made(tmp_path, write_gguf(tmp_path / "m.gguf", model))
    original, converted = load_weights(tmp_path / "original"), load_weights(folder)
    assert original.keys() == converted.keys()
    assert all(torch.equal(original[name], converted[name].float()) for name in original)
    assert torch.equal(logits(load(folder)), logits(load(tmp_path / "original")))
    assert read_config(folder)["architectures"] == [type(model).__name__]


def test_quantised_weights_are_the_numbers_that_the_file_stands_for(tmp_path):
    model = save_random(tmp_path / "original", "qwen3", **WIDE)
    file = write_gguf(tmp_path / "m.gguf", model, dtype=GGMLQuantizationType.Q8_0)
    held = load_weights(made(tmp_path, file))
    embedding = model.get_input_embeddings().weight.detach().numpy()
    expected = gguf.dequantize(gguf.quantize(embedding, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.array_equal(held["model.embed_tokens.weight"].numpy(), expected)
    assert not np.array_equal(expected, embedding)


def test_a_tensor_is_kept_in_the_narrowest_dtype_that_holds_it():
    exact = torch.tensor([1.0, 0.1])
    assert narrow(exact.half().float()).dtype == torch.float16
    assert narrow(exact.bfloat16().float() * 2.0**100).dtype == torch.bfloat16
    assert narrow(exact) is exact


def rope_of(tmp_path: Path, *, keys: dict | None = None, factors=None) -> dict:
    model = save_random(tmp_path / "original", "llama", attention_bias=False)
    tensors = {} if factors is None else {"rope_freqs.weight": np.asarray(factors, dtype=np.float32)}
    folder = made(tmp_path, write_gguf(tmp_path / "m.gguf", model, keys=keys, tensors=tensors))
    return dict(read_config(folder)["rope_parameters"])


def llama3_factors(theta: float, width: int) -> np.ndarray:
    """As llama.cpp's converter computes them for Llama 3.1: wavelengths beyond the old context are stretched eightfold."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    smooth = np.clip((8192 / wavelengths - 1.0) / 3.0, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / 8.0 + smooth), dtype=np.float32)


def test_llama_3_s_positions_are_recognised_by_their_factors(tmp_path):
    rope = rope_of(tmp_path, keys={".rope.freq_base": 500000.0}, factors=llama3_factors(500000.0, 8))
    assert rope == LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}


def test_factors_of_another_rule_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        rope_of(tmp_path, factors=[1.0, 2.0, 3.0, 8.0])


def test_linear_and_yarn_scaling_are_kept_and_others_refused(tmp_path):
    keys = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
    (tmp_path / "one").mkdir()
    found = rope_of(tmp_path / "one", keys=keys)
    assert (found["rope_type"], found["factor"]) == ("linear", 4.0)
    (tmp_path / "two").mkdir()
    original = {".rope.scaling.original_context_length": 16}
    found = rope_of(tmp_path / "two", keys=keys | original | {".rope.scaling.type": "yarn"})
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 16)
    (tmp_path / "three").mkdir()
    with pytest.raises(ValueError, match=r"position scaling 'longrope'"):
        rope_of(tmp_path / "three", keys=keys | {".rope.scaling.type": "longrope"})


def test_a_file_with_numbers_or_tensors_that_nobody_reads_is_refused(tmp_path):
    model = save_random(tmp_path / "original", "llama", attention_bias=False)
    file = write_gguf(tmp_path / "scaled.gguf", model, keys={".logit_scale": 16.0})
    with pytest.raises(ValueError, match=r"llama\.logit_scale = 16\.0, which no family here supports"):
        made(tmp_path, file)
    shutil.rmtree(tmp_path / "made")
    surplus = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), dtype=np.float32)}
    with pytest.raises(ValueError, match=r"does not know: blk\.0\.ffn_gate_exps\.weight"):
        made(tmp_path, write_gguf(tmp_path / "experts.gguf", model, tensors=surplus))


def tokenizer_of(tmp_path: Path, **keys) -> Path:
    model = save_random(tmp_path / "original", "qwen2", vocab_size=len(WORDS["tokens"]))
    ids = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return made(tmp_path, write_gguf(tmp_path / "m.gguf", model, vocabulary=WORDS, keys=ids | named))


@pytest.mark.parametrize(
    ("rule", "cut"), [("smollm", ["1", "2", "ab"]), ("gpt-2", ["12", "ab"]), ("qwen2", ["1", "2", "ab"])]
)
def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path, rule, cut):
    tokenizer = load_tokenizer(tokenizer_of(tmp_path, pre=rule))
    assert tokenizer is not None
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12ab")] == cut
    assert tokenizer.decode(tokenizer.encode("Größe 12\n")) == "Größe 12\n"


def test_a_rule_that_is_not_known_leaves_the_file_without_a_tokenizer(tmp_path):
    folder = tokenizer_of(tmp_path, pre="of-tomorrow")
    with pytest.raises(
        UserError, match=r"^model\.tokenizer: .*'of-tomorrow' \(tokenizer\.ggml\.pre\).*allowed: a folder"
    ):
        load_tokenizer(folder)
    assert load_tokenizer(folder, "none") is None


def test_special_tokens_end_tokens_and_the_template_are_the_files_own(tmp_path):
    template = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"
    (tmp_path / "one").mkdir()
    folder = tokenizer_of(tmp_path / "one", pre="smollm", eot_token_id=258, add_bos_token=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.lead, tokenizer.chat) == (256, 257, (256,), None)
    assert stop_ids(folder) == (257, 258)
    assert tokenizer.parse("ab<|turn|>") == [260, 258]
    (tmp_path / "two").mkdir()
    model = save_random(tmp_path / "original", "qwen2", vocab_size=len(WORDS["tokens"]))
    keys = {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
    }
    found = load_tokenizer(made(tmp_path / "two", write_gguf(tmp_path / "m.gguf", model, vocabulary=WORDS, keys=keys)))
    assert found is not None and found.chat is not None and found.lead == ()
    assert found.chat([{"role": "user", "content": "ab"}]) == "<|turn|>ab"


def test_llama_3_s_vocabulary_takes_whole_words_first(tmp_path):
    held = json.loads((tokenizer_of(tmp_path, pre="llama-bpe") / "tokenizer.json").read_text())
    assert held["model"]["ignore_merges"] is True


def test_without_the_package_the_lines_that_convert_are_told(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(UserError) as caught:
        fetch_model(str(file))
    assert str(caught.value).startswith("model.path: m.gguf is a GGUF file")
    assert "pip install gguf" in str(caught.value) and by_hand(file) in str(caught.value)


def test_a_part_of_a_file_is_refused_with_the_command_that_joins(tmp_path):
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"join them first: llama-gguf-split --merge"):
        fetch_model(str(file))


@pytest.mark.parametrize("path", ["/no/such/file.gguf", "nobody/no-such-model/file.gguf"])
def test_a_file_that_is_not_there_is_refused(path):
    with pytest.raises(UserError, match=r"^model\.path: .*(is not a file|neither a local file)"):
        fetch_model(path)


def test_a_revision_of_a_local_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"^model\.revision: 'main' is not allowed"):
        fetch_model(str(tmp_path / "m.gguf"), "main")


@pytest.mark.slow
def test_a_damaged_file_and_an_unknown_architecture_are_refused_by_the_process_that_converts(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(40))
    with pytest.raises(UserError, match=r"(?s)^model\.path: damaged\.gguf can't be converted: .*AutoModelForCausalLM"):
        fetch_model(str(damaged))
    model = save_random(tmp_path / "original", "llama", attention_bias=False)
    unknown = write_gguf(tmp_path / "unknown.gguf", model, architecture="mystery")
    with pytest.raises(UserError, match=r"architecture mystery is not supported"):
        fetch_model(str(unknown))
    assert [place.name for place in (tmp_path / "cache" / "models").iterdir() if place.is_dir()] == []


def test_a_file_that_is_cut_off_or_no_gguf_file_says_so_without_advice_about_readers(tmp_path):
    model = save_random(tmp_path / "original", "llama", attention_bias=False)
    whole = write_gguf(tmp_path / "whole.gguf", model).read_bytes()
    file = tmp_path / "m.gguf"
    size = f"{len(whole) // 2:,} bytes" if len(whole) < 2e6 else r"\d+ MB"
    for data, said in (
        (whole[: len(whole) // 2], rf"m\.gguf is cut off: it has {size}, its table of tensors needs "),
        (whole[:100], r"it ends within its header, after 100 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"is a pointer of git-lfs, not the file; run `git lfs pull`"),
        (b"PK", r"is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 9) + whole[8:], r"its GGUF version is 9; supported: 2, 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), r"it ends within its header"),
    ):
        file.write_bytes(data)
        with pytest.raises(UserError, match=said) as caught:
            fetch_model(str(file))
        assert "AutoModelForCausalLM" not in str(caught.value)
    file.write_bytes(whole)
    check_gguf(file)


@pytest.mark.slow
def test_a_file_is_known_by_its_content_and_converted_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "draftmill")
    model = save_random(tmp_path / "original", "llama", attention_bias=False)
    file = write_gguf(tmp_path / "m.gguf", model)
    folder = fetch_model(str(file))
    [said] = caplog.messages
    assert said.startswith("converting m.gguf (0 MB) to safetensors, once; the result is kept in")
    (tmp_path / "elsewhere").mkdir()
    again = Path(shutil.copy(file, tmp_path / "elsewhere" / "m.gguf"))
    made_at = folder.stat().st_mtime_ns
    assert fetch_model(str(again)) == folder and folder.stat().st_mtime_ns == made_at
    assert caplog.messages == [said]
    assert model_hash(folder) == weights_hash(content_hash(file)) != model_hash(tmp_path / "original")
    assert tokenizer_hash(folder, "none") == "none"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    again.write_bytes(data)
    assert content_hash(again) != content_hash(file)
    assert gguf_folder(again, "model.path") != folder


def test_two_callers_at_once_make_a_folder_once(tmp_path):
    target, made_here, begun = tmp_path / "cache" / "models" / "one", [], threading.Barrier(2)

    def make(folder: Path) -> None:
        made_here.append(folder)
        (folder / "whole").write_text("yes")

    def call() -> None:
        begun.wait()
        assert (make_once(target, make) / "whole").read_text() == "yes"

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made_here) == 1 and sorted(place.name for place in target.parent.iterdir()) == ["one", "one.lock"]


def test_a_folder_that_could_not_be_finished_is_made_again(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no space")

    target = tmp_path / "one"
    with pytest.raises(RuntimeError, match="no space"):
        make_once(target, fail)
    assert not target.exists()
    assert list(make_once(target, lambda folder: None).iterdir()) == []


def test_the_caller_of_a_conversion_needs_no_torch():
    code = "import sys, draftmill.actors.checkpoints.models; sys.exit(int('torch' in sys.modules or 'gguf' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_was_not_made_here_has_no_source(tmp_path):
    (tmp_path / "draftmill_source.json").write_text("[1]")
    assert read_source(tmp_path) is None
