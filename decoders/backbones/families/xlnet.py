"""The sizes of an XLNet from config.json, and the tensors of its checkpoints.

Source: transformers' XLNetLMHeadModel, whose defaults apply to fields that config.json lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from draftmill.decoders.backbones.families.config import Config, Supported, demand, fitting, positive, whole
from draftmill.decoders.backbones.families.rotary import Shapes, product_shapes


@dataclass(frozen=True, slots=True)
class XLNetShape:
    """The sizes of an XLNet, named as in config.json; distances are clamped to `clamp_len` if that is > 0."""

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    d_inner: int
    clamp_len: int
    layer_norm_eps: float
    ff_activation: str
    tie_word_embeddings: bool
    max_length: ClassVar[None] = None
    is_bounded: ClassVar[bool] = False

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    def optional(self) -> set[str]:
        # Segments are not used by any-subset decoding; a tied output layer is usually not stored.
        names = {"lm_loss.weight"}
        for layer in range(self.n_layer):
            names |= {f"transformer.layer.{layer}.rel_attn.{name}" for name in ("seg_embed", "r_s_bias")}
        return names

    def tensors(self) -> Shapes:
        """Name every tensor of a checkpoint, with its shape; a tied output layer is not one of them."""
        width, inner, vocab = self.d_model, self.d_inner, self.vocab_size
        shapes: Shapes = {
            "transformer.mask_emb": (1, 1, width),
            "transformer.word_embedding.weight": (vocab, width),
            "lm_loss.bias": (vocab,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_loss.weight"] = (vocab, width)
        for layer in range(self.n_layer):
            attention, feed = f"transformer.layer.{layer}.rel_attn.", f"transformer.layer.{layer}.ff."
            shapes |= {attention + name: (width, self.n_head, self.d_head) for name in ("q", "k", "v", "o", "r")}
            shapes |= {attention + name: (self.n_head, self.d_head) for name in ("r_w_bias", "r_r_bias")}
            for norm in (attention, feed):
                shapes |= {f"{norm}layer_norm.weight": (width,), f"{norm}layer_norm.bias": (width,)}
            shapes |= product_shapes(feed + "layer_1", inner, width) | product_shapes(feed + "layer_2", width, inner)
        return shapes


_SIZES: Final = ("vocab_size", "d_model", "n_layer", "n_head", "d_inner")
_BUILT: Final[Supported] = {
    "attn_type": ("bi",),
    "bi_data": (False,),
    "ff_activation": ("gelu", "relu", "gelu_new", "silu"),
    "tie_word_embeddings": (True, False),
    "quantization_config": (None,),
}


def xlnet_shape(config: Config) -> XLNetShape:
    """Read an XLNet config; ValueError names the first missing, invalid or unsupported field."""
    with fitting("xlnet"):
        demand(config, _BUILT)
        shape = XLNetShape(
            **{key: whole(config, key) for key in _SIZES},
            clamp_len=whole(config, "clamp_len", -1, least=-1),
            layer_norm_eps=positive(config, "layer_norm_eps", 1e-12),
            ff_activation=config.get("ff_activation", "gelu"),
            tie_word_embeddings=config.get("tie_word_embeddings", True),
        )
        if shape.d_model % shape.n_head or shape.d_model % 2 or config.get("d_head") not in {None, shape.d_head}:
            raise ValueError(
                f"it has d_model = {shape.d_model}, n_head = {shape.n_head}, d_head = {config.get('d_head')!r}; allowed: "
                "an even d_model, n_head heads of which have a width of d_head"
            )
    return shape
