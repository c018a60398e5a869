"""The block-diffusion families: SDAR (a Qwen3), Fast-dLLM v2 (a Qwen2), Nemotron-Labs-Diffusion (a Llama), and LLaDA2.

Pure tables and checks over a config dict; reads no weights and imports no torch. Qwen3 may have experts. A model of these
families sees every finished block and, in both directions, the current block; the decoder decides what a row sees. Remote code
is never run.

Sources: the checkpoints' configs, and the model files of SDAR (Cheng et al., 2025), Fast-dLLM v2 (Wu et al., 2025), LLaDA2.0
(Bie et al., 2025) and Nemotron-Labs-Diffusion (NVIDIA, 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from draftmill.decoders.backbones.families.causal import (
    CausalFamily,
    Config,
    Shapes,
    max_positions,
    rotary_family,
    weight_shapes,
)
from draftmill.decoders.backbones.families.config_fields import demand, numbers, token_id

MASK_KEYS: Final = ("mask_token_id", "mask_id")
"""The fields of config.json that may name the mask, the first one first."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts shared by the public checkpoints of a family, which are often not in their files. `mask_id` is the default if
    neither config.json nor the tokenizer (`mask_token`) has one, `block_size` if none of the fields `block_keys` of config.json
    does. `ends` are the tokens that end a turn of a chat; `shift`, `left_shift` and `prompt_block` are as in ModelInfo."""

    mask_token: str
    mask_id: int
    block_keys: tuple[str, ...]
    block_size: int
    ends: tuple[str, ...]
    shift: int = 0
    left_shift: int | None = None
    prompt_block: bool = False

    def find_mask(self, config: Config) -> int:
        """The id of the mask token; ValueError if config.json has an invalid one."""
        return token_id(config, _first(config, MASK_KEYS) or MASK_KEYS[0], self.mask_id)

    def find_block(self, config: Config) -> int:
        """The block size of the training; ValueError if config.json has an invalid one."""
        key = _first(config, self.block_keys)
        return self.block_size if key is None else numbers(config, {key: key}, str(config.get("model_type")))[key]


def _first(config: Config, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if config.get(key) is not None), None)


# ---- SDAR and Fast-dLLM v2: Qwen3, and Qwen2 that still predicts the next token, seeing their block in both directions -----

# Fields that name other code, or the kernels of a training run; they are ignored.
_NOT_OURS: Final = {"model_type", "architectures", "auto_map", "attn_implementation"}


def _full_attention(config: Config) -> Config:
    demand(config, {"use_sliding_window": (False, None)})
    return {key: value for key, value in config.items() if key not in _NOT_OURS}


def _full_attention_moe(config: Config) -> Config:
    demand(config, {"hidden_act": ("silu",)})
    return {key: value for key, value in _full_attention(config).items() if key != "output_router_logits"}


_SDAR: Final = BlockFacts(
    mask_token="<|MASK|>", mask_id=151669, block_keys=("block_size", "block_length"), block_size=4, ends=("<|im_end|>",)
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
    (rotary_family("sdar", "Qwen3", translate=_full_attention), _SDAR),
    (rotary_family("sdar_moe", "Qwen3Moe", translate=_full_attention_moe), _SDAR),
    (rotary_family("fast_dllm_v2", "Qwen2", translate=_full_attention), _FAST_DLLM_V2),
)


# ---- Nemotron-Labs-Diffusion: a Llama (Ministral 3) that is causal, too, and predicts the next token where it is ----------


_NEMOTRON_BUILT: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "tie_word_embeddings": (False,),
}
_SCALING: Final = "llama_4_scaling_beta"
_HEAD: Final = "diffusion_head.weight"


def _nemotron_as_llama(config: Config) -> Config:
    """Without the scaling of queries by their position, which is 1 within the length that YaRN starts from."""
    demand(config, _NEMOTRON_BUILT)
    ours = {key: value for key, value in config.items() if key not in _NOT_OURS | {"rope_scaling"}}
    return ours | {"rope_parameters": {key: value for key, value in _rope_of(config).items() if key != _SCALING}}


def _rope_of(config: Config) -> dict[str, Any]:
    """The rotary settings; both fields have the same ones."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _llama_name(name: str) -> str:
    return "lm_head.weight" if name == _HEAD else "model." + name.removeprefix(NEMOTRON.prefix)


NEMOTRON: Final = CausalFamily(
    name="nemotron_labs_diffusion",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    prefix="encoder.",
    buffers=(),
    convert=lambda weights: {_llama_name(name): tensor for name, tensor in weights.items()},
    translate=_nemotron_as_llama,
)
NEMOTRON_FACTS: Final = BlockFacts(
    mask_token="", mask_id=100, block_keys=("block_size",), block_size=32, ends=(), left_shift=1, prompt_block=True
)


def nemotron_shapes(config: Config) -> Shapes:
    """Name every tensor of a Nemotron-Labs-Diffusion checkpoint as it names them, with its shape."""
    shapes = weight_shapes(NEMOTRON, config)
    head = shapes.pop("lm_head.weight")
    return {NEMOTRON.prefix + name.removeprefix("model."): shape for name, shape in shapes.items()} | {_HEAD: head}


def nemotron_length(config: Config) -> int | None:
    """The longest text whose queries are not scaled, or the config's own length."""
    rope, longest = _rope_of(config), max_positions(NEMOTRON, config)
    unscaled = rope.get("original_max_position_embeddings") if rope.get(_SCALING) else None
    return min((length for length in (longest, unscaled) if length is not None), default=None)


# ---- LLaDA2: a network of its own ---------------------------------------------------------------------------------------

LLADA2: Final = BlockFacts(
    mask_token="<|mask|>",
    mask_id=156895,
    block_keys=("block_size", "block_length"),
    block_size=32,
    ends=("<|role_end|>",),
)
