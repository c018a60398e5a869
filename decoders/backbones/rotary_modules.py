"""Modules that hold the weights of rotary models (Llama, Mistral, Qwen2, Qwen3) by the names that transformers gives them.

rotary.py runs the layers; these modules only hold their parts, so that transformers, which takes seconds to import, is not needed
on a CPU in float32. tests/decoders/backbones/test_rotary.py compares the results with transformers' code, to the bit.

Legend: P positions, d width of a head.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones.families.causal import CausalFamily, head_width, shapes_of
from draftmill.decoders.backbones.packed import UnsetLinear

_MODELS: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


def has_own_modules(family: CausalFamily) -> bool:
    """Whether models of a family may run without transformers."""
    return family.model_class in _MODELS


def is_plain(parsed: Any) -> bool:
    """Whether a config has no scaled rotations and no other activation than SiLU: those are left to transformers' code."""
    return parsed.rope_parameters["rope_type"] == "default" and parsed.hidden_act == "silu"


class Rotation(nn.Module):
    """Cosines and sines of positions, without scaling."""

    attention_scaling = 1.0

    def __init__(self, parsed: Any) -> None:
        super().__init__()
        width = head_width(parsed)
        # Not on the meta device: torch would import its compilers to count up there.
        exponents = torch.arange(0, width, 2, dtype=torch.float, device="cpu") / width
        self.register_buffer("inv_freq", 1.0 / parsed.rope_parameters["rope_theta"] ** exponents, persistent=False)

    @torch.no_grad()
    def forward(self, like: Tensor, positions_1P: Tensor) -> tuple[Tensor, Tensor]:
        """[1, P, d] each, in the dtype and on the device of `like`."""
        angles_1Pd = (positions_1P.unsqueeze(-1).float() * self.inv_freq.to(like.device)).repeat(1, 1, 2)
        return angles_1Pd.cos().to(like.dtype), angles_1Pd.sin().to(like.dtype)


class _Table(nn.Embedding):
    """Draws no random weights: torch would import its compilers to draw them on the meta device."""

    def reset_parameters(self) -> None:
        """Leave them as they are."""


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.empty(width)), eps


class RotaryModel(nn.Module):
    """A whole model, with the interface of transformers' modules as far as TransformerBackbone uses it."""

    def __init__(self, model_class: str, parsed: Any) -> None:
        super().__init__()
        base: Any = nn.Module()
        base.layers = nn.ModuleList(nn.Module() for _ in range(parsed.num_hidden_layers))
        base.config, self.model = parsed, base
        shapes = shapes_of(model_class, parsed)
        for name in (name for name in shapes if name.endswith(".weight")):
            path = name.removesuffix(".weight")
            parent, _, last = path.rpartition(".")
            _parent(self, parent).add_module(last, _part(last, shapes[name], parsed, bias=f"{path}.bias" in shapes))
        for layer in base.layers:
            layer.self_attn.scaling, layer.mlp.act_fn = head_width(parsed) ** -0.5, nn.SiLU()
        base.rotary_emb = Rotation(parsed)

    @property
    def base_model(self) -> Any:
        """All but the output layer."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """The token embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The output layer."""
        return self.lm_head


def _part(name: str, shape: tuple[int, ...], parsed: Any, *, bias: bool) -> nn.Module:
    if len(shape) == 1:
        return _Norm(shape[0], parsed.rms_norm_eps)
    return _Table(*shape) if name == "embed_tokens" else UnsetLinear(shape[1], shape[0], bias=bias)


def _parent(root: nn.Module, path: str) -> nn.Module:
    for step in filter(None, path.split(".")):
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    return root
