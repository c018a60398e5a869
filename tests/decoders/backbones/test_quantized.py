"""Quantized checkpoints: every layout against its writer's own unpacking where that is installed, else against a plain loop."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from tests.decoders.backbones.causal_models import decode_with_rejections, random_tokens, save_random

SIZES = {"hidden_size": 64, "intermediate_size": 96}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def words_of(codes, bits, order=None):
    """Codes of the last dimension in int32 words, the lowest bits first, by a plain loop."""
    per_word = 32 // bits
    rows = []
    for row in codes.tolist():
        words = []
        for start in range(0, len(row), per_word):
            word = row[start : start + per_word]
            word = word if order is None else [word[place] for place in order]
            number = sum(code << (bits * place) for place, code in enumerate(word))
            words.append(number - (1 << 32) if number >> 31 else number)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def random_codes(weight_MK, bits, group, *, seed):
    """Codes [M, K], zeros and scales [M, G], of sizes like those of a weight; a zero is at least 1."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = weight_MK.shape
    codes = torch.randint(0, 2**bits, (num_rows, num_columns), generator=generator)
    zeros = torch.randint(1, 2**bits, (num_rows, num_columns // group), generator=generator)
    scales = (torch.rand(num_rows, num_columns // group, generator=generator) * 0.5 / 2**bits + 0.01).half()
    return codes, zeros, scales


def gptq_parts(codes, zeros, scales, bits, *, shift=1, group_K=None):
    parts = {"qweight": words_of(codes, bits).T, "scales": scales.T}
    parts["qzeros"] = words_of((zeros - shift).T, bits)
    return parts if group_K is None else parts | {"g_idx": group_K.to(torch.int32)}


def awq_parts(codes, zeros, scales):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words_of(codes.T, 4, order),
        "qzeros": words_of(zeros.T, 4, order),
        "scales": scales.T,
    }


def save_quantized(tmp_path, quantization, parts_of):
    """Folders with a quantized model and with the same model unpacked; `parts_of(name, weight)` gives a layer's stored tensors
    and its numbers."""
    for name in ("dense", "small"):
        save_random(tmp_path / name, "llama", std=0.1, **SIZES)
    dense, small = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "small"))
    for number, name in enumerate(sorted(name for name in dense if re.search(r"_proj\.weight$", name))):
        parts, numbers = parts_of(number, dense[name])
        small.pop(name)
        small |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
        dense[name] = numbers.contiguous()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    save_file(small, tmp_path / "small" / "model.safetensors")
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return tmp_path / "dense", tmp_path / "small"


def assert_same_states(dense, small):
    texts = {0: random_tokens(9, seed=1)}
    found, expected = (
        decode_with_rejections(load_backbone(folder, dtype="float32", device="cpu"), texts, prompts={0: 4})
        for folder in (small, dense)
    )
    assert torch.equal(found[0], expected[0])
    assert inspect_model(small).num_parameters == inspect_model(dense).num_parameters


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_loads_as_its_numbers(tmp_path, bits, version):
    def parts_of(number, weight):
        codes, zeros, scales = random_codes(weight, bits, 32, seed=number)
        numbers = (codes - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        return gptq_parts(codes, zeros, scales, bits, shift=int(version == "gptq")), numbers

    assert_same_states(*save_quantized(tmp_path, GPTQ | {"bits": bits, "checkpoint_format": version}, parts_of))


def test_gptq_in_the_order_of_activations_loads_as_its_numbers(tmp_path):
    def parts_of(number, weight):
        codes, zeros, scales = random_codes(weight, 4, 32, seed=number)
        group_K = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(number)) // 32
        numbers = (codes - zeros[:, group_K]) * scales.float()[:, group_K]
        return gptq_parts(codes, zeros, scales, 4, group_K=group_K), numbers

    assert_same_states(*save_quantized(tmp_path, GPTQ | {"desc_act": True}, parts_of))


def test_awq_loads_as_its_numbers(tmp_path):
    def parts_of(number, weight):
        codes, zeros, scales = random_codes(weight, 4, 32, seed=number)
        return awq_parts(codes, zeros, scales), (
            codes - zeros.repeat_interleave(32, 1)
        ) * scales.float().repeat_interleave(32, 1)

    dense, small = save_quantized(tmp_path, AWQ, parts_of)
    assert_same_states(dense, small)
    texts = {0: random_tokens(9, seed=1)}
    found, expected = (
        decode_with_rejections(load_backbone(small, device="cpu", small=kind), texts, prompts={0: 4})[0]
        for kind in ("int4", "auto")
    )
    assert (found - expected).abs().max() < 1e-4, "int4 has the checkpoint's own numbers"


# ---- compressed-tensors, by its own compressors ----------------------------------------------------------------------


def compressed(weight_MK, args, written):
    """A weight as compressed-tensors stores it, and as it reads it."""
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    assert ct.__version__
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    size, rows = args.get("group_size"), weight_MK.shape[0]
    parts = weight_MK.unflatten(1, (-1, size)) if size else weight_MK.unsqueeze(1)
    if args["strategy"] == "tensor":
        parts = weight_MK.reshape(1, 1, -1)
    if block := args.get("block_structure"):
        padded = torch.nn.functional.pad(weight_MK, (0, -weight_MK.shape[1] % block[1], 0, -rows % block[0]))
        parts = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).transpose(1, 2).flatten(2)
    scale, zero = calculate_qparams(parts.amin(2), parts.amax(2), scheme.weights)
    if args["strategy"] == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    compressor = BaseCompressor.get_value_from_registry(written)
    stored = compressor.compress({"weight": weight_MK, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return dict(stored), compressor.decompress(stored, scheme)["weight"]


INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
COMPRESSED = {
    "int4 groups": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}),
    "int4 groups with zeros": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32, "symmetric": False}),
    "int8 rows, packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 rows": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 rows with zeros": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "fp8 rows": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8 matrices": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8 blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [40, 24]}),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_load_as_its_own_reader_says(tmp_path, name):
    pytest.importorskip("compressed_tensors")
    written, args = COMPRESSED[name]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        "ignore": ["lm_head"],
    }
    assert_same_states(*save_quantized(tmp_path, quantization, lambda _, weight: compressed(weight, args, written)))


@pytest.mark.parametrize("block", [(32, 32), None])
def test_fp8_loads_as_transformers_reads_it(tmp_path, block):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def parts_of(number, weight):
        size = block or weight.shape
        parts_BbCc = weight.unflatten(0, (-1, size[0])).unflatten(2, (-1, size[1]))
        scale_B1C1 = parts_BbCc.abs().amax((1, 3), keepdim=True) / 448
        codes = (parts_BbCc / scale_B1C1).to(torch.float8_e4m3fn).flatten(0, 1).flatten(1)
        scale = scale_B1C1[:, 0, :, 0]
        reader = Fp8Dequantize(None)
        numbers = reader._dequantize_one(codes, scale, output_dtype=torch.float32)
        unused = torch.ones(())
        return {"weight": codes, "weight_scale_inv": scale, "activation_scale": unused}, numbers

    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    assert_same_states(*save_quantized(tmp_path, quantization, parts_of))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            ".quant_method = 'bitsandbytes'; supported: gptq, awq, fp8, mxfp4, compressed-tensors",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3; supported: 4, 2, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; supported: gptq, gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "format = 'gemv'; supported: gemm"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype = 'fp4'; supported: fp8"),
        (
            {"config_groups": {"0": {"weights": {"num_bits": 4}}}, "format": "nvfp4-pack-quantized"},
            "supported: pack-quantized, int-quan",
        ),
        (
            {"config_groups": {"0": {"weights": {"num_bits": 4}}}, "transform_config": {"a": 1}},
            "transform_config = {'a': 1}",
        ),
        ({"config_groups": {}, "format": "int-quantized"}, "config_groups of 0 kinds of weights; supported: one kind"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format = 'marlin'; supported: gptq, gptq_v2"),
        ("int4", " = 'int4', which is no such object"),
    ],
)
def test_other_forms_are_refused_in_one_line(tmp_path, given, message):
    save_random(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    for read in (inspect_model, load_backbone):
        with pytest.raises(ValueError, match=f"^model.path: config.json has quantization_config.*{re.escape(message)}"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("lines", "columns", "read", "message"),
    [
        (None, -1, load_backbone, r"the quantized tensors of model.layers.\d.*_proj do not fit together"),
        (32, None, inspect_model, r"weight has shape \(32, \d+\), but config.json says"),
    ],
)
def test_tensors_that_contradict_each_other_or_the_config_are_refused(tmp_path, lines, columns, read, message):
    def parts_of(number, weight):
        codes, zeros, scales = random_codes(weight[:lines], 4, 32, seed=number)
        return awq_parts(codes, zeros, scales[:, :columns]), weight

    _, folder = save_quantized(tmp_path, AWQ, parts_of)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_a_stored_zero_that_readers_take_for_different_numbers_is_refused(tmp_path):
    def with_minus_one(number, weight):
        codes, zeros, scales = random_codes(weight, 4, 32, seed=number)
        parts = gptq_parts(codes, zeros % 15, scales, 4, shift=0)
        return parts | {"qzeros": torch.full_like(parts["qzeros"], -1)}, weight

    _, folder = save_quantized(tmp_path, GPTQ, with_minus_one)
    with pytest.raises(ValueError, match="a zero of -1, which readers of this format take for different numbers"):
        load_backbone(folder, device="cpu")
