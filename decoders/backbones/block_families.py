"""The block-diffusion families: SDAR and Fast-dLLM v2, which run on transformers' Qwen3 and Qwen2, and LLaDA2 on llada2.py.

Pure tables and checks over a config dict; reads no weights and imports no torch. A model of these families sees every finished
block and, in both directions, the block that it fills; what a row sees is the decoder's business. Their remote code is never
run.

Sources: the checkpoints' configs, and the model files of SDAR (Cheng et al., 2025), Fast-dLLM v2 (Wu et al., 2025) and LLaDA2.0
(Bie et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from decoders.backbones.causal_families import CausalFamily, Config
from decoders.backbones.masked_families import demand, numbers

DECODERS: Final = ("block_diffusion", "s2d2")
"""The decoders that run on these families."""
MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What the public checkpoints of a family have in common, and often say nowhere.

    `mask_id` counts where neither config.json nor the tokenizer (`mask_token`) says it, `block_size` where none of the fields
    `block_keys` of config.json does. `ends` are the tokens that end a turn of a chat; `shift` is as in ModelInfo.
    """

    mask_token: str
    mask_id: int
    block_keys: tuple[str, ...]
    block_size: int
    ends: tuple[str, ...]
    shift: int = 0

    def find_mask(self, config: Config) -> int:
        """The id of the mask token; ValueError where config.json has no id for one."""
        key = _first(config, MASK_KEYS)
        if key is None:
            return self.mask_id
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"model.path: config.json has {key} = {value!r}; allowed: token ids")
        return value

    def find_block(self, config: Config) -> int:
        """How many positions the blocks had that the model was trained with; ValueError where config.json has no such number."""
        key = _first(config, self.block_keys)
        return self.block_size if key is None else numbers(config, {key: key}, str(config.get("model_type")))[key]


def _first(config: Config, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if config.get(key) is not None), None)


# ---- SDAR and Fast-dLLM v2: Qwen3, and Qwen2 that still predicts the next token, seeing their block in both directions -----

_ROTARY_BUFFERS: Final = ("model.rotary_emb.inv_freq", "model.layers.{}.self_attn.rotary_emb.inv_freq")
# Fields that name other code, or the kernels of a training run.
_NOT_OURS: Final = {"model_type", "architectures", "auto_map", "attn_implementation"}


def _full_attention(config: Config) -> Config:
    demand(config, {"use_sliding_window": (False, None)})
    return {key: value for key, value in config.items() if key not in _NOT_OURS}


def _qwen(name: str, classes: str) -> CausalFamily:
    return CausalFamily(
        name=name,
        config_class=f"{classes}Config",
        model_class=f"{classes}ForCausalLM",
        prefix="model.",
        buffers=_ROTARY_BUFFERS,
        translate=_full_attention,
    )


_SDAR: Final = BlockFacts(
    mask_token="<|MASK|>",
    mask_id=151669,
    block_keys=("block_size", "block_length"),
    block_size=4,
    ends=("<|im_end|>",),
)
_FAST_DLLM_V2: Final = BlockFacts(
    mask_token="|<MASK>|",
    mask_id=151665,
    block_keys=("bd_size", "block_size"),
    block_size=32,
    ends=("<|im_end|>",),
    shift=1,
)
QWEN_FAMILIES: Final = (
    (_qwen("sdar", "Qwen3"), _SDAR),
    (_qwen("fast_dllm_v2", "Qwen2"), _FAST_DLLM_V2),
)


# ---- LLaDA2: a network of its own ---------------------------------------------------------------------------------------

LLADA2: Final = BlockFacts(
    mask_token="<|mask|>",
    mask_id=156895,
    block_keys=("block_size", "block_length"),
    block_size=32,
    ends=("<|role_end|>",),
)


@dataclass(frozen=True, slots=True)
class LLaDA2Shape:
    """All that config.json tells of a LLaDA2 network, under its names.

    The first `rotary_dim` numbers of a head are turned. Of the `n_group` groups of experts a row keeps `topk_group`, and
    chooses `num_experts_per_tok` experts in them. `num_shared_experts` may be 0.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    max_position_embeddings: int
    num_shared_experts: int
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    routed_scaling_factor: float


_COUNTS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
    "max_position_embeddings",
)
_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "use_qk_norm": (True,),
    "use_qkv_bias": (False,),
    "use_bias": (False,),
    "norm_head": (False,),
    "norm_topk_prob": (True,),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "tie_word_embeddings": (False,),
    "quantization_config": (None,),
}
_TURNED: Final = 0.5


def llada2_shape(config: Config) -> LLaDA2Shape:
    """Read a LLaDA2 config; ValueError names the first field that is missing, wrong, or asks for what is not built."""
    counts = numbers(config, {key: key for key in _COUNTS}, "llada2")
    heads, width = counts["num_attention_heads"], counts["hidden_size"]
    own = config.get("head_dim") is not None
    head_dim = numbers(config, {"head_dim": "head_dim"}, "llada2")["head_dim"] if own else width // heads
    try:
        demand(config, _BUILT)
        shape = LLaDA2Shape(
            **counts,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(config, head_dim),
            num_shared_experts=_from_zero(config, "num_shared_experts"),
            first_k_dense_replace=_from_zero(config, "first_k_dense_replace"),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            rope_theta=_positive(config, "rope_theta"),
            routed_scaling_factor=_positive(config, "routed_scaling_factor"),
        )
        _check_heads(shape)
        _check_groups(shape)
    except ValueError as error:
        raise ValueError(f"model.path: config.json does not fit family 'llada2': {error}") from None
    return shape


def _rotary_dim(config: Config, head_dim: int) -> int:
    """The part of a head that is turned; two fields may say it, the public code reads the factor alone."""
    turned = int(head_dim * _positive({"partial_rotary_factor": _TURNED} | dict(config), "partial_rotary_factor"))
    if config.get("rotary_dim", turned) != turned:
        raise ValueError(f"it has rotary_dim = {config['rotary_dim']!r}, but partial_rotary_factor makes it {turned}")
    if turned % 2 or not 0 < turned <= head_dim:
        raise ValueError(
            f"{turned} of a head's {head_dim} numbers would be turned; allowed: even numbers up to all of them"
        )
    return turned


def _from_zero(config: Config, key: str) -> int:
    value = config.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"it has {key} = {value!r}; allowed: whole numbers >= 0")
    return value


def _positive(config: Config, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"it has {key} = {value!r}; allowed: numbers > 0")
    return float(value)


def _check_heads(shape: LLaDA2Shape) -> None:
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ValueError(
            f"{shape.num_attention_heads} heads and {shape.num_key_value_heads} key heads do not divide evenly"
        )


def _check_groups(shape: LLaDA2Shape) -> None:
    each = shape.num_experts // shape.n_group
    if shape.num_experts % shape.n_group or each < 2 or shape.topk_group > shape.n_group:
        raise ValueError(
            f"{shape.num_experts} experts in n_group = {shape.n_group}, of which topk_group = {shape.topk_group} are kept; "
            "allowed: equal groups of at least 2, no more kept than there are"
        )
    if shape.num_experts_per_tok > shape.topk_group * each:
        raise ValueError(
            f"num_experts_per_tok = {shape.num_experts_per_tok}; {shape.topk_group} groups of {each} have fewer experts"
        )


def llada2_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name every tensor of a LLaDA2 checkpoint, with its shape."""
    shape = llada2_shape(config)
    width, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    joined = heads + 2 * shape.num_key_value_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (shape.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (shape.vocab_size, width),
    }
    for layer in range(shape.num_hidden_layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        shapes |= {f"{block}attention.{norm}_layernorm.weight": (shape.head_dim,) for norm in ("query", "key")}
        shapes[block + "attention.query_key_value.weight"] = (joined, width)
        shapes[block + "attention.dense.weight"] = (width, heads)
        if layer < shape.first_k_dense_replace:
            shapes |= _gated(block + "mlp.", width, shape.intermediate_size)
        else:
            shapes |= _mixture(block + "mlp.", shape)
    return shapes


def _gated(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    into: dict[str, tuple[int, ...]] = {f"{prefix}{name}_proj.weight": (inner, width) for name in ("gate", "up")}
    return into | {f"{prefix}down_proj.weight": (width, inner)}


def _mixture(prefix: str, shape: LLaDA2Shape) -> dict[str, tuple[int, ...]]:
    width, inner, count = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    shapes: dict[str, tuple[int, ...]] = {prefix + "gate.weight": (count, width)}
    shapes[prefix + "gate.expert_bias"] = (count,)
    for expert in range(count):
        shapes |= _gated(f"{prefix}experts.{expert}.", width, inner)
    shared = shape.num_shared_experts * inner
    return shapes | (_gated(f"{prefix}shared_experts.", width, shared) if shared else {})
