"""transformers' causal models over our slot cache: against their own forwards, and against themselves in other company."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from draftmill.decoders.backbones import attention, network, transformer
from draftmill.decoders.backbones.cache import SlotCache
from draftmill.decoders.backbones.checkpoint import bos_id, inspect_model, stop_ids
from draftmill.decoders.backbones.invariance import INEXACT_RULES
from draftmill.decoders.backbones.network import Norm
from draftmill.decoders.backbones.packed import can_pack
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.backbones.self_test import check_masking
from tests.decoders.backbones.causal_models import (
    MODELS,
    decode_with_rejections,
    in_a_row,
    load,
    play,
    random_tokens,
    save_random,
    theirs,
)
from tests.golden_data import read_json

TEXTS = {0: random_tokens(14, seed=1), 1: random_tokens(9, seed=2), 2: random_tokens(21, seed=3)}
PROMPTS = {0: 6, 1: 1, 2: 11}


@pytest.fixture
def norms_in_float64(monkeypatch):
    """Norms pass through float32, which turns a last bit into 1e-8: equality to 1e-10 needs them in float64."""

    def forward(self, rows):
        eps = self.eps if isinstance(self, Norm) else self.variance_epsilon
        return self.weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Norm):
        monkeypatch.setattr(norm, "forward", forward)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_float64_hidden_states_and_logits_are_those_of_transformers(tmp_path, norms_in_float64, name):
    model = save_random(tmp_path, name).double()
    backbone = load(tmp_path, "float64")
    # transformers' GPT-Neo computes scores in float32 whatever its dtype.
    tolerance = 3e-6 if name == "gpt_neo" else 1e-10
    ours = decode_with_rejections(backbone, TEXTS, prompts=PROMPTS)
    for slot, text in TEXTS.items():
        hidden, logits = theirs(model, text)
        torch.testing.assert_close(ours[slot], hidden, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(backbone.logits(ours[slot]), logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(backbone.embed(torch.tensor([3, 7])), model.get_input_embeddings().weight[[3, 7]])


def test_slots_are_refilled_and_grown(tmp_path, norms_in_float64):
    model = save_random(tmp_path, "qwen2-sliding").double()
    backbone = load(tmp_path, "float64")
    first, second, third = (random_tokens(12, seed=seed) for seed in (4, 5, 6))
    backbone.allocate(2, 6)
    play(backbone, {0: in_a_row(first[:5]), 1: in_a_row(second[:3])})
    backbone.allocate(5, 40)
    later = play(backbone, {0: in_a_row(first[5:], 5), 1: in_a_row(third[:2]), 4: in_a_row(second)})
    last = play(backbone, {4: in_a_row(third[:7]), 1: in_a_row(third[2:], 2)})
    for text, ours in ((first, later[0]), (second, later[4]), (third[:7], last[4]), (third, last[1])):
        expected, _ = theirs(model, text)
        torch.testing.assert_close(ours, expected[-len(ours) :], atol=1e-10, rtol=1e-10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_candidates_for_one_position_see_their_own_branch_alone(tmp_path, norms_in_float64, name):
    model = save_random(tmp_path, name).double()
    backbone = load(tmp_path, "float64")
    prefix, branches = random_tokens(7, seed=7), [random_tokens(4, seed=seed) for seed in (8, 9, 10)]
    backbone.allocate(2, 40)
    play(backbone, {1: in_a_row(prefix)})
    rows = []
    for index, branch in enumerate(branches):
        start = 9 + 5 * index  # columns that have nothing to do with positions
        for i, token in enumerate(branch):
            rows.append((token, 7 + i, start + i, [*range(7), *range(start, start + i + 1)]))
    ours = play(backbone, {1: rows, 0: in_a_row(prefix)})[1]
    tolerance = 3e-6 if name == "gpt_neo" else 1e-10
    for index, branch in enumerate(branches):
        expected, _ = theirs(model, prefix + branch)
        torch.testing.assert_close(ours[4 * index : 4 * index + 4], expected[7:], atol=tolerance, rtol=tolerance)


def test_logits_of_the_golden_checkpoint_are_those_of_the_public_code(golden):
    folder = golden / "jacobi"
    backbone, arrays = load(folder), load_file(folder / "arrays.safetensors")
    cases = read_json(folder / "cases.json")["cases"]
    for case in (case for case in cases if case["kind"] == "logits"):
        backbone.allocate(1, 32)
        ours = backbone.logits(play(backbone, {0: in_a_row(case["input_ids"])})[0])
        torch.testing.assert_close(ours, arrays[case["arrays"][0]].float().view_as(ours), atol=1e-4, rtol=1e-4)


def rows_of(slots, lines, columns):
    """Rows of slots with these numbers of rows, which see these numbers of columns at most: the last row all of them."""
    column_N = torch.cat([torch.arange(count) for count in lines])
    ends = [max(1, seen - back) for count, seen in zip(lines, columns, strict=True) for back in reversed(range(count))]
    end_1N = torch.tensor([ends])
    return token_rows(slots, lines, column_N, column_N, column_N, (torch.zeros_like(end_1N), end_1N))


@pytest.mark.parametrize(
    ("slots", "lines", "columns", "found"),
    [
        (range(8), [1] * 8, [30] * 8, [(8, 1, 32, False)]),
        (range(8), [1, 3, 2, 1, 1, 3, 2, 2], [30] * 8, [(8, 3, 32, False)]),  # drafts: a little padding
        (range(4), [1] * 4, [4000, 30, 40, 3990], [(1, 1, 4000, False), (2, 1, 64, False), (1, 1, 4000, False)]),
        (
            range(3),
            [1, 130, 1],
            [30, 2000, 30],
            [(1, 1, 32, False)]
            + [(1, n, w, False) for n, w in ((43, 1920), (43, 1984), (44, 2016))]
            + [(1, 1, 32, False)],
        ),
        ([0, 2, 4, 5], [1] * 4, [30] * 4, [(4, 1, 32, True)]),  # short ones are copied out of the cache
        ([0, 2, 4, 5], [1] * 4, [4000] * 4, [(1, 1, 4000, False)] * 2 + [(2, 1, 4000, False)]),
    ],
)
def test_rows_are_cut_into_tiles_of_slots_that_are_alike(tmp_path, slots, lines, columns, found):
    cache = SlotCache(1, 2, 16, dtype=torch.float32, device=torch.device("cpu"))
    rows = rows_of(slots, lines, columns)
    cuts = attention.cut_rows(rows, 4000, cache, 4, 32, ordered=False)
    assert [(cut.num_slots, cut.num_lines, cut.num_columns, cut.is_copied) for cut in cuts] == found
    assert sum(cut.num_rows for cut in cuts) == rows.num_rows, "every row stands in one tile"


def one_tile(rows, num_columns, cache, num_heads, multiple, *, ordered):
    copied = ordered or rows.shape.slots is None
    return [attention.Cut(0, rows.num_rows, 0, rows.shape.num_slots, rows.shape.num_lines, num_columns, copied)]


@pytest.mark.parametrize(
    "limits", [{}, {"_MOST_LINES": 4}, {"_CALL": 0, "_READ": 0}, {"_CPU_SCORES": 1 << 9}, {"_GPU_SCORES": 1 << 9}]
)
def test_a_row_has_the_same_bits_in_any_tile(tmp_path, monkeypatch, limits):
    save_random(tmp_path, "llama")
    texts = {slot: random_tokens(140 if slot == 2 else 3 + slot, seed=slot) for slot in range(10)}
    prompts = {slot: len(text) - 2 for slot, text in texts.items()}
    with monkeypatch.context() as patched:
        patched.setattr(transformer, "cut_rows", one_tile)
        whole = decode_with_rejections(load(tmp_path), texts, prompts=prompts)
    for name, value in limits.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(network, "_AT_ONCE", 64)
    numbers, cut_rows = [], attention.cut_rows

    def counted(*of, ordered):
        cuts = cut_rows(*of, ordered=ordered)
        numbers.append(len(cuts))
        return cuts

    monkeypatch.setattr(transformer, "cut_rows", counted)
    backbone = load(tmp_path)
    parts = decode_with_rejections(backbone, texts, prompts=prompts)
    assert backbone.exact and max(numbers) > 2, "nothing was cut"
    assert all(torch.equal(parts[slot], whole[slot]) for slot in texts)


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no products of bfloat16 by oneDNN")
def test_many_rows_of_bfloat16_attend_as_precisely_as_few():
    normal = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(*shape, generator=normal).bfloat16() for shape in ((2, 40, 6, 32), *[(2, 3, 300, 32)] * 2)
    )
    bias = torch.where(torch.rand(2, 40, 300, generator=normal) < 0.3, 0.0, -torch.inf).bfloat16()
    attend = partial(attention.attend_grouped, scores=attention.Scores(3 * 32**-0.5), rules=INEXACT_RULES)
    exact = attend(query.double(), key.double(), value.double(), bias.double())
    errors = []
    for lines in (40, 8):  # by oneDNN, by fused attention
        parts = [
            attend(query[:, first : first + lines], key, value, bias[:, first : first + lines])
            for first in range(0, 40, lines)
        ]
        errors.append((torch.cat(parts, 1).double() - exact).norm() / exact.norm())
    assert errors[1] < 0.003 and errors[0] < 1.5 * errors[1], "scores were rounded"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_copied_beginning_goes_on_as_its_source_and_leaves_the_other_columns(tmp_path, name):
    save_random(tmp_path, name)
    backbone = load(tmp_path)
    backbone.allocate(3, 16)
    text, other = (random_tokens(length, seed=length, vocab_size=60) for length in (8, 9))
    expected = play(backbone, {0: in_a_row(text), 1: in_a_row(other)})
    held = [layer[:, 1].clone() for layer in backbone.cache.layers_2SKWd]
    backbone.copy_prefix(0, 1, 5)
    for layer, before in zip(backbone.cache.layers_2SKWd, held, strict=True):
        assert torch.equal(layer[:, 1, :, :5], layer[:, 0, :, :5])
        assert torch.equal(layer[:, 1, :, 5:], before[:, :, 5:])
    assert torch.equal(play(backbone, {1: in_a_row(text[5:], 5)}, width=16)[1], expected[0][5:])
    # Of a slot that held NaN nothing is left: what is hidden weighs 0, but 0 times NaN is NaN.
    for layer in backbone.cache.layers_2SKWd:
        layer[:, 2] = torch.nan
    backbone.clear_slot(2)
    backbone.copy_prefix(0, 2, 5)
    assert torch.equal(play(backbone, {2: in_a_row(text[5:], 5)}, width=16)[2], expected[0][5:])


def test_columns_are_copied_within_their_slots_with_their_positions(tmp_path):
    save_random(tmp_path)
    backbone = load(tmp_path)
    backbone.allocate(2, 16)
    text = random_tokens(8, seed=8)
    expected = play(backbone, {1: in_a_row(text)})[1]
    backbone.copy_columns(torch.tensor([1, 1]), torch.tensor([6, 3]), torch.tensor([12, 9]))
    found = play(backbone, {1: [(text[7], 7, 7, [0, 1, 2, 9, 4, 5, 12, 7])]})[1]
    torch.testing.assert_close(found, expected[7:], atol=1e-5, rtol=1e-5)


def test_rows_computed_are_counted_with_their_padding(tmp_path):
    save_random(tmp_path)
    backbone = load(tmp_path)
    backbone.allocate(2, 64)
    play(backbone, {0: in_a_row(random_tokens(2, seed=0)), 1: in_a_row(random_tokens(1, seed=1))})
    # Heads of width 8 come in blocks of four rows, many rows in blocks of eight.
    assert backbone.num_rows_computed == max(backbone.min_rows, 4)
    play(backbone, {0: in_a_row(random_tokens(31, seed=0)), 1: in_a_row(random_tokens(6, seed=1))})
    assert backbone.num_rows_computed == max(backbone.min_rows, 40)


def test_a_mask_that_has_no_effect_is_found_at_start(tmp_path, monkeypatch):
    save_random(tmp_path)

    def see_all(low_IN, high_IN, num_columns):
        return torch.ones(low_IN.shape[1], num_columns, dtype=torch.bool)

    monkeypatch.setattr(transformer, "seen_columns", see_all)
    with pytest.raises(RuntimeError, match="masked columns or other slots change"):
        load(tmp_path)


def test_rows_that_read_another_slot_are_found_at_start(tmp_path, monkeypatch):
    save_random(tmp_path)
    backbone = load(tmp_path)
    read = backbone.cache.read

    def read_neighbours(cache, layer, slots, num_columns):
        return tuple(part.roll(1, 0) for part in read.__func__(cache, layer, slots, num_columns))

    monkeypatch.setattr(type(backbone.cache), "read", read_neighbours)
    with pytest.raises(RuntimeError, match="self-test of the model"):
        check_masking(backbone)


def test_weights_that_give_no_numbers_are_refused(tmp_path):
    save_random(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.dtype: in torch\.float32 .* contain NaN or infinity"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "prefix", "buffers"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": (1, 1, 64, 64), "h.1.attn.masked_bias": ()}),
        ("gpt_neo", "", {"transformer.h.2.attn.attention.bias": (1, 1, 64, 64)}),
        ("llama-3", "model.", {"layers.1.self_attn.rotary_emb.inv_freq": (4,)}),
        ("llama", "", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    ],
)
def test_names_without_their_prefix_and_old_buffers_are_read(tmp_path, name, prefix, buffers):
    model = save_random(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    weights |= {key: torch.ones(shape) for key, shape in buffers.items()}
    save_file(weights, tmp_path / "model.safetensors")
    assert inspect_model(tmp_path).num_parameters == sum(tensor.numel() for tensor in model.parameters())
    backbone = load(tmp_path)
    backbone.allocate(1, 32)
    ours = play(backbone, {0: in_a_row(TEXTS[1])})[0]
    torch.testing.assert_close(ours, theirs(model, TEXTS[1])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_layer_beside_tied_embeddings_is_used_where_it_differs(tmp_path, equal):
    save_random(tmp_path, "qwen3")
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    save_file(weights, tmp_path / "model.safetensors")
    backbone, wide = load(tmp_path), load(tmp_path, "float64")  # whose products are not packed
    head = wide.head.weight
    assert (head.data_ptr() == wide.embedding_VD.data_ptr()) == equal
    torch.testing.assert_close(head.detach(), weights["lm_head.weight"].double())
    assert backbone.model.lm_head is backbone.head
    rows = torch.eye(head.shape[1])
    torch.testing.assert_close(backbone.logits(rows), rows @ weights["lm_head.weight"].T, atol=1e-5, rtol=1e-5)


def test_a_model_is_described_without_its_weights(tmp_path):
    model = save_random(tmp_path, "qwen2")
    info = inspect_model(tmp_path)
    assert (info.family, info.vocab_size, info.mask_id, info.max_length) == ("qwen2", 61, None, 64)
    assert info.kind == "causal"
    assert info.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert info.suppressed == ()
    assert (inspect_model(tmp_path, mask_id=5).mask_id, inspect_model(tmp_path, mask_id=5).suppressed) == (5, (5,))
    with pytest.raises(ValueError, match=r"model\.mask_id: 61 is outside the vocabulary; allowed: 0 \.\. 60"):
        inspect_model(tmp_path, mask_id=61)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draftmill": {"max_length": 48}}))
    assert inspect_model(tmp_path).max_length == 48


def test_ids_without_a_token_are_suppressed(tmp_path):
    save_random(tmp_path)
    vocab = {f"t{index}": index for index in range(57) if index != 13}
    added = [{"id": 58, "content": "<eos>"}]
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert inspect_model(tmp_path).suppressed == (13, 57, 59, 60)
    unigram = {"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 60}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert inspect_model(tmp_path).suppressed == (60,)


def test_stop_and_begin_ids_come_from_the_generation_config_first(tmp_path):
    def write(name, **content):
        (tmp_path / name).write_text(json.dumps(content))

    write("config.json", eos_token_id=4, bos_token_id=2)
    assert (stop_ids(tmp_path), bos_id(tmp_path)) == ((4,), 2)
    write("generation_config.json", eos_token_id=[7, 4, 7], bos_token_id=None)
    assert (stop_ids(tmp_path), bos_id(tmp_path)) == ((7, 4), 2)
    write("generation_config.json", bos_token_id=1)
    assert (stop_ids(tmp_path), bos_id(tmp_path)) == ((4,), 1)
    write("config.json")
    assert stop_ids(tmp_path) == ()
    write("config.json", eos_token_id="</s>")
    with pytest.raises(ValueError, match=r"config\.json has eos_token_id = '</s>'; allowed: token ids"):
        stop_ids(tmp_path)


STAND_IN = {
    "__init__.py": "import torch._dynamo.utils\n",
    "transforms/__init__.py": "class InterpolationMode: NEAREST_EXACT, BOX, BILINEAR, HAMMING, BICUBIC, LANCZOS = range(6)\n",
    "io.py": "",
    "transforms/functional.py": "def pil_to_tensor(image): ...\n",
}
JOB = """
import sys
from draftmill.jobs.cli import main
assert main(["run", sys.argv[1], "--local"]) == 0
loaded = {name for name in ("transformers", "torch._dynamo", "torchvision") if name in sys.modules}
sys.exit(f"imported {loaded}" if loaded != set(sys.argv[2:]) else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_job_runs_where_torchvision_imports_the_compilers(name, tmp_path):
    save_random(tmp_path / "model", name)
    for file, text in STAND_IN.items():
        path = tmp_path / "packages" / "torchvision" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = tmp_path / "packages" / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "tokens": [1, 2, 3]}\n')
    spec = {
        "task": {"kind": "complete", "max_new_tokens": 2},
        "input": {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id", "tokens": "tokens"}},
        "model": {"path": str(tmp_path / "model"), "device": "cpu", "tokenizer": "none"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(tmp_path / "run")},
    }
    (tmp_path / "job.json").write_text(json.dumps(spec))
    expected = {"gpt2": ["transformers", "torch._dynamo", "torchvision"], "qwen2": []}[name]
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "job.json"), *expected],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
