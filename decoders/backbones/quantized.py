"""Quantized checkpoints (GPTQ, AWQ, compressed-tensors, fp8, mxfp4): which stored tensors make up a matrix, and its numbers.

Such a layer X has several tensors in the place of X.weight: codes (small integers or fp8 numbers), scales, and maybe zeros. A
number of the matrix is (code - zero) * scale. Activations are not quantized, whatever other engines do. config.json and
the headers are read without torch.

Sources: the layouts that AutoGPTQ, AutoAWQ, compressed-tensors and transformers' FP8 quantizer write.
Legend: K in, M out, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from draftmill.decoders.backbones.families.config import refused

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
# The last part of the name of a layer's codes, by layout; and of the tensors that belong to them.
_CODES: Final = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "scaled": "weight", "mxfp4": "blocks"}
_SCALES: Final = ("scales", "weight_scale_inv", "weight_scale")
_OTHERS: Final = ("qzeros", "g_idx", "weight_zero_point", "weight_shape")
_OF_ACTIVATIONS: Final = ("input_scale", "input_zero_point", "activation_scale")
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_LAYOUTS: Final = {"pack-quantized": "packed"} | {f"{kind}-quantized": "scaled" for kind in ("int", "float", "naive")}
# What is read of quantization_config, by quant_method; a missing key stands for the first value.
_SUPPORTED: Final[dict[Any, dict[str, tuple[Any, ...]]]] = {
    "gptq": {"bits": (4, 2, 8), "format": ("gptq", "gptq_v2")},
    "awq": {"bits": (4,), "format": ("gemm",)},
    "fp8": {"bits": (8,), "expert_dtype": ("fp8",)},
    "mxfp4": {"bits": (4,)},
    "compressed-tensors": {
        "transform_config": (None, {}),
        "sparsity_format": (None, "dense"),
        "format": tuple(_LAYOUTS),
        "bits": (8, 4, 2),
    },
}
METHODS: Final = tuple(_SUPPORTED)
_WHERE: Final = "model.path: config.json has quantization_config"
_ROWS: Final = 1024  # of codes that are unpacked at a time


@dataclass(frozen=True, slots=True)
class Form:
    """How a checkpoint is quantized: a layout of `_CODES`, the bits of a code, what must be added to stored zeros, and the rows
    and columns that share a scale, 0 where config.json does not say it."""

    layout: str
    bits: int
    block: tuple[int, int]
    zero_shift: int = 0

    def layers(self, names: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The stored tensors of each quantized layer, by the last part of their names."""
        codes, parts = _CODES[self.layout], {*_SCALES, *_OTHERS, *_OF_ACTIVATIONS}
        mark = "_" if self.layout == "mxfp4" else "."
        layers = {name.removesuffix(mark + codes): {codes: name} for name in names if name.endswith(mark + codes)}
        for name in names:
            layer, _, part = name.rpartition(mark)
            if layer in layers and part in parts:
                layers[layer][part] = name
        return {layer: stored for layer, stored in layers.items() if stored.keys() & {*_SCALES}}

    def dense_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The shapes of the unpacked tensors, from those of the stored ones."""
        dense, per_word = dict(shapes), 32 // self.bits
        for layer, stored in self.layers(shapes).items():
            first, *rest = shapes[stored[_CODES[self.layout]]]
            dense = {name: shape for name, shape in dense.items() if name not in stored.values()}
            dense[self._dense_name(layer)] = {
                "gptq": (*rest, first * per_word),
                "awq": (*(words * per_word for words in rest), first),
                "packed": (first, *(words * per_word for words in rest)),
                "scaled": (first, *rest),
                "mxfp4": (first, *(32 * groups for groups in rest[-2:-1]), *rest[:-2]),
            }[self.layout]
        return dense

    def _dense_name(self, layer: str) -> str:
        return layer if self.layout == "mxfp4" else f"{layer}.weight"

    def unpacked(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the numbers of every tensor (float32 where quantized), and remove it from `stored`; ValueError on a
        misfit."""
        for layer, names in self.layers(stored).items():
            parts = {part: stored.pop(name) for part, name in names.items()}
            problem = f"model.path: the quantized tensors of {layer} do not fit together"
            with refused(problem, RuntimeError, IndexError, KeyError, ValueError):
                dense_MK = _experts_of_fp4(**parts) if self.layout == "mxfp4" else _dense(self, parts)
            yield self._dense_name(layer), dense_MK
        for name in list(stored):
            yield name, stored.pop(name)


def find_form(config: Mapping[str, Any]) -> Form | None:
    """How a checkpoint is quantized by its config.json; None if it is not, ValueError for what is not supported."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    with refused(f"{_WHERE} = {given!r}, which is no such object", AttributeError, TypeError, IndexError):
        return _form(given)


def _form(given: Mapping[str, Any]) -> Form:
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    block, written = _block(given), given.get("checkpoint_format") or given.get("version") or given.get("format")
    if method not in _SUPPORTED:
        raise ValueError(f"{_WHERE}.quant_method = {method!r}; supported: {', '.join(METHODS)}")
    asked: dict[str, Any] = dict(given)
    if method == "compressed-tensors":
        groups = [one for one in (given.get("config_groups") or {}).values() if one.get("weights")]
        kinds = {(one.get("format"), one["weights"].get("num_bits"), _block(one["weights"])) for one in groups}
        if len(kinds) != 1:
            raise ValueError(f"{_WHERE}.config_groups of {len(kinds)} kinds of weights; supported: one kind")
        own, asked["bits"], block = kinds.pop()
        written = own or given.get("format")
        asked["sparsity_format"] = (given.get("sparsity_config") or {}).get("format")
    asked["format"] = written and str(written).lower()
    for key, values in _SUPPORTED[method].items():
        asked[key] = values[0] if asked.get(key) is None else asked[key]
        if asked[key] not in values:
            raise ValueError(f"{_WHERE}.{key} = {asked[key]!r}; supported: {', '.join(map(str, values))}")
    layout = {"compressed-tensors": _LAYOUTS.get(asked["format"]), "fp8": "scaled"}.get(method) or str(method)
    # The first version of GPTQ's format stores a zero minus one.
    return Form(layout, int(asked["bits"]), block, int(method == "gptq" and asked["format"] == "gptq"))


def _block(given: Mapping[str, Any]) -> tuple[int, int]:
    size = given.get("weight_block_size") or given.get("block_structure") or (0, max(0, given.get("group_size") or 0))
    return int(size[0]), int(size[1])


def _dense(form: Form, parts: Mapping[str, Tensor]) -> Tensor:
    """The numbers of one matrix in float32, [M, K]. Scales and zeros are [M, G], or one a row, a block, or a matrix."""
    code_MK, scale = parts[_CODES[form.layout]], parts[next(part for part in _SCALES if part in parts)]
    zero: Any = parts.get("qzeros", parts.get("weight_zero_point"))
    if form.layout == "awq":
        words = code_MK, zero
        code_MK, zero = (_codes(each, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T for each in words)
    elif form.layout == "gptq":
        code_MK, zero = _codes(code_MK.T, form.bits), _codes(zero, form.bits).T.int() + form.zero_shift
        if bool((zero == 2**form.bits).any()):
            raise ValueError("a zero of -1, which readers of this format take for different numbers")
    elif form.layout == "packed":
        code_MK, zero = _codes(code_MK, form.bits), None if zero is None else _codes(zero.T, form.bits).T
        if code_MK.shape != tuple(parts["weight_shape"].tolist()):
            raise ValueError(f"a matrix of {tuple(code_MK.shape)} with the shape {parts['weight_shape'].tolist()}")
    if "scales" in parts:
        scale = scale.T
    if not scale.is_floating_point() or (zero is not None and zero.shape != scale.shape):
        raise ValueError(
            f"scales {tuple(scale.shape)} of {scale.dtype} and zeros {None if zero is None else tuple(zero.shape)}"
        )

    def spread(values: Tensor) -> Tensor:
        values = values.float().reshape(len(values) if values.ndim else 1, -1)
        rows, columns = (_block_of(code_MK.shape[side], values.shape[side], form.block[side]) for side in (0, 1))
        return values.index_select(0, rows).index_select(1, parts["g_idx"].long() if "g_idx" in parts else columns)

    middle = 2 ** (form.bits - 1) if form.layout == "packed" else 0
    return code_MK.float().sub_(middle if zero is None else spread(zero)).mul_(spread(scale))


def _experts_of_fp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights of experts in float32, [E, K, M], of fp4 (e2m1) codes [E, M, G, 16], two in a byte, and the exponents of their
    groups of 32 columns, [E, M, G], plus 127: OCP Microscaling Formats, version 1.0."""
    import torch

    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values, made = torch.cat([sizes, -sizes]), []
    for block, exponent in zip(blocks, scales, strict=True):
        code = torch.stack([block & 15, block >> 4], -1).flatten(-2).int()
        made.append(torch.ldexp(values[code], exponent.int().unsqueeze(-1) - 127).flatten(1).T)
    return torch.stack(made)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Unpack the codes in int32 words along the columns, the lowest bits first, as uint8."""
    import torch

    if words.dtype != torch.int32:
        raise ValueError(f"codes in words of {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    blocks = [((block.unsqueeze(2) >> shifts) & (2**bits - 1)).to(torch.uint8) for block in words.split(_ROWS)]
    return torch.cat(blocks).flatten(1)


def _block_of(count: int, num_blocks: int, size: int) -> Tensor:
    """The block of each of `count` rows. Blocks have `size` rows, the last one maybe fewer; with 0 all are equal."""
    import torch

    blocks = torch.arange(count) // (size if size and num_blocks > 1 else max(1, count // num_blocks))
    if int(blocks[-1]) != num_blocks - 1:
        raise ValueError(f"{num_blocks} scales for {count} rows or columns")
    return blocks
