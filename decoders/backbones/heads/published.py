"""Runs published draft heads, which read the states of some of the target's layers, over slot caches of their own.

    target's column   0    1    2    3            its states g after some layers, joined into one (`fc`)
    EAGLE-3           g0   g1   g2   h3   h4      row c: the state of column c, and the token of column c + 1; predicts c + 2
      tokens          1    2    3    a    b       drafts continue from the head's own states h, a forward each
    DFlash            g0   g1   g2   [3 M  M  M]  keys and values of g, then a block that sees them and itself: one forward

The target hands its states over in its own forward (`read`): they are noted in the head's cache, at the slot and column that they
are of, so whatever happens to the target's columns happens to them. Of an EAGLE-3 head they wait in a further layer of the cache;
another one keeps what the head itself made of a column. A DFlash head makes keys and values of them at once. DSpark is a DFlash
head whose drafts are drawn one after the other, each corrected for the token before it.

Sources: Li et al., "EAGLE-3" (2025); Chen et al., "DFlash" (2026). Legend: N rows, P the same with padding, F joined states of
layers, H heads, K key heads, X = 2 K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.decoders.backbones.attention import AnyLayout, Scores, attend_rows
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.config import refused
from draftmill.decoders.backbones.heads.files import SpeculatorConfig, read_speculator
from draftmill.decoders.backbones.load import check_finite, load_weights
from draftmill.decoders.backbones.network import Rotation
from draftmill.decoders.backbones.packed import PackedLinear, product_kind
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.backbones.small_weights import SmallLinear
from draftmill.decoders.backbones.transformer import ModuleBackbone, NetworkBackbone
from draftmill.decoders.kernels.find import noting

Attend = Callable[..., Tensor]
"""(layer, queries [P, H, d], keys and values [P, X, d], scores=) -> [P, H, d]."""


class _Layer(nn.Module):
    """A layer of Llama or Qwen3. If `is_wide` it is EAGLE-3's first one, which reads tokens and states side by side."""

    def __init__(self, shape: Any, index: int, *, is_wide: bool) -> None:
        super().__init__()
        width, d, eps = shape.hidden_size, shape.head_dim, shape.rms_norm_eps
        outer, keys, read = shape.num_attention_heads * d, shape.num_key_value_heads * d, (1 + is_wide) * width
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, num_out in (("q_proj", outer), ("k_proj", keys), ("v_proj", keys)):
            self.self_attn.add_module(name, nn.Linear(read, num_out, bias=shape.qkv_bias))
        self.self_attn.o_proj = nn.Linear(outer, width, bias=shape.output_bias)
        if shape.head_norms:
            self.self_attn.q_norm, self.self_attn.k_norm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        for name in ("gate_proj", "up_proj"):
            self.mlp.add_module(name, nn.Linear(width, shape.intermediate_size, bias=shape.inner_bias))
        self.mlp.down_proj = nn.Linear(shape.intermediate_size, width, bias=shape.inner_bias)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        if is_wide:
            self.hidden_norm = nn.RMSNorm(width, eps)
        self.index, self.head_width = index, d

    def heads(self, letter: str, rows_PD: Tensor, turn_2P1d: Tensor | None = None) -> Tensor:
        """Queries, keys or values of rows, [P, heads, d]; normed and turned if there are cosines and sines (network.py)."""
        attention: Any = self.self_attn
        heads_PHd: Tensor = getattr(attention, f"{letter}_proj")(rows_PD).unflatten(1, (-1, self.head_width))
        if turn_2P1d is None:
            return heads_PHd
        if hasattr(attention, "q_norm"):
            heads_PHd = getattr(attention, f"{letter}_norm")(heads_PHd)
        cos_P1d, sin_P1d = turn_2P1d
        return heads_PHd * cos_P1d + heads_PHd.roll(self.head_width // 2, -1) * sin_P1d

    def held(self, rows_PD: Tensor, turn_2P1d: Tensor) -> Tensor:
        """Keys and values of rows, as a cache takes them, [P, X, d]."""
        return torch.cat([self.heads("k", rows_PD, turn_2P1d), self.heads("v", rows_PD)], 1)

    def forward(self, rows_PD: Tensor, states_PD: Tensor, turn_2P1d: Tensor, attend: Attend) -> Tensor:
        """The states after the layer, whose attention reads `rows_PD`."""
        attention, mlp, query_PHd = self.self_attn, self.mlp, self.heads("q", rows_PD, turn_2P1d)
        held_PXd, scores = self.held(rows_PD, turn_2P1d), Scores(self.head_width**-0.5)
        mixed_PHd = attend(self.index, query_PHd, held_PXd, scores=scores)
        states_PD = states_PD + attention.o_proj(mixed_PHd.flatten(1))  # type: ignore[operator]
        inner_PD = self.post_attention_layernorm(states_PD)
        gated_PI = nn.functional.silu(mlp.gate_proj(inner_PD)) * mlp.up_proj(inner_PD)  # type: ignore[operator]
        return states_PD + mlp.down_proj(gated_PI)  # type: ignore[operator]


class DraftStack(nn.Module):
    """All of a head but its output layer (see `shape_of`); recipes/eagle_head.py trains it."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.head: SpeculatorConfig = shape.head
        flags, width, eps = self.head.flags, shape.hidden_size, shape.rms_norm_eps
        is_eagle, count = self.head.kind == "eagle3", len(self.head.layer_ids)
        self.word_embeddings = nn.Embedding(shape.target_vocab, width)
        self.fc = nn.Linear(shape.num_read, width, bias=False)
        wide = [is_eagle and index == 0 for index in range(shape.num_hidden_layers)]
        self.layers = nn.ModuleList(_Layer(shape, index, is_wide=wide[index]) for index in range(len(wide)))
        self.norm = nn.RMSNorm(width, eps)
        if not is_eagle:
            self.hidden_norm = nn.RMSNorm(width, eps)
        if "norm_before_fc" in flags:
            self.input_norm = nn.RMSNorm(shape.num_read, eps)
        if "fc_norm" in flags:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.num_read // count, eps) for _ in range(count))

    def join(self, states_PF: Tensor) -> Tensor:
        """The states of the target's layers as one, [P, D]."""
        if hasattr(self, "input_norm"):
            states_PF = self.input_norm(states_PF)
        if hasattr(self, "fc_norm"):
            parts = zip(self.fc_norm, states_PF.chunk(len(self.fc_norm), 1), strict=True)
            states_PF = torch.cat([norm(part) for norm, part in parts], 1)
        joined_PD = self.fc(states_PF)
        return self.hidden_norm(joined_PD) if hasattr(self, "hidden_norm") else joined_PD

    def forward(
        self, tokens_P: Tensor, states_PD: Tensor | None, turn_2P1d: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The final states of rows (normed), [P, D], and those from which an EAGLE-3 head continues. Its rows read `states_PD`
        beside their tokens; those of a DFlash head read none."""
        read_PD: Tensor = self.word_embeddings(tokens_P)
        own_PD = read_PD if states_PD is None else states_PD
        layers: Any = self.layers
        for layer in layers:
            if layer.index == 0 and states_PD is not None:
                normed_PD = layer.hidden_norm(states_PD)
                own_PD = normed_PD if "norm_before_residual" in self.head.flags else states_PD
                read_PD = torch.cat([layer.input_layernorm(read_PD), normed_PD], 1)
            else:
                read_PD = layer.input_layernorm(own_PD)
            own_PD = layer(read_PD, own_PD, turn_2P1d, attend)
        normed_PD = self.norm(own_PD)
        return normed_PD, normed_PD if "norm_output" in self.head.flags else own_PD


def shape_of(head: SpeculatorConfig, *, target_vocab: int, num_read: int) -> Any:
    """The sizes of a head for a target of `target_vocab` ids. It reads `num_read` numbers of a column."""
    sizes = {field.name: getattr(head.parsed, field.name) for field in fields(head.parsed)}
    sizes |= {"vocab_size": head.draft_vocab, "num_last": head.parsed.hidden_size + head.markov_rank}
    return SimpleNamespace(**sizes, head=head, target_vocab=target_vocab, num_read=num_read)


class Speculator(NetworkBackbone):
    """A draft head for the model `target`, as its drafting model. `weights` are those of its file; embeddings and an output layer
    that it lacks are the target's."""

    def __init__(
        self, head: SpeculatorConfig, weights: dict[str, Tensor], target: ModuleBackbone, *, exact: bool = False
    ) -> None:
        device, dtype, num_read = target.device, target.dtype, weights["fc.weight"].shape[1]
        self.speculator, ids_V = head, _target_ids(weights, target.vocab_size)
        _complete(weights, target, ids_V, is_dflash=head.kind != "eagle3")
        how = Running(dtype, device, exact)
        self.heads = _take_markov(weights, head, how)
        """Corrects the states of a DSpark head (engine/rolls.py); None if it is none."""
        if self.heads is not None:
            weights["lm_head.weight"] = torch.cat([weights["lm_head.weight"], weights.pop("markov_w2")], 1)
        shape = shape_of(head, target_vocab=target.vocab_size, num_read=num_read)
        width = shape.head_dim
        self._rotation = Rotation(shape.rope, width, width, shape.max_position_embeddings, dtype, device)
        named = {name if name.startswith("lm_head.") else f"model.{name}": weights.pop(name) for name in list(weights)}
        named["model.word_embeddings.weight"] = named.pop("model.embed_tokens.weight")
        super().__init__(DraftStack, shape, named, how)
        self._ids_V, self.vocab_size = ids_V, target.vocab_size
        self.width = shape.num_last  # of the states that the output layer reads

    def forget(self) -> None:
        """See Model. An EAGLE-3 head's cache has two layers more: the target's joined states, and its own."""
        super().forget()
        if self.speculator.kind == "eagle3":
            for _ in range(2):
                self.cache.add_layer(self.width)

    @torch.no_grad()
    def read(self, states_NF: Tensor, rows: TokenRows) -> None:
        """Note the target's states of rows that it has just run: those after the layers `layer_ids`, side by side."""
        count, stack = rows.num_rows, self.base
        padded = [0, 0, 0, self._padded(count) - count]
        joined_PD = stack.join(nn.functional.pad(states_NF, padded))
        if self.speculator.kind == "eagle3":
            self.cache.write_rows(-2, rows, joined_PD[:count])
            return
        turn_2P1d = self._rotation.at(nn.functional.pad(rows.position_N, padded[2:])).unsqueeze(2)
        places = self.cache.places_of(rows, rows.column_N)
        for layer in stack.layers:
            self.cache.write(layer.index, places, layer.held(joined_PD, turn_2P1d)[:count])

    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        states_PD, is_eagle = None, self.speculator.kind == "eagle3"
        if is_eagle:
            # A draft's row continues from what the head made of the row before it.
            held, columns_N = (-1, rows.column_N - 1) if rows.takes_drafts else (-2, rows.column_N)
            states_ND = self.cache.read_rows(held, rows, columns_N, self.width)
            states_PD = nn.functional.pad(states_ND, (0, 0, 0, len(tokens_P) - len(states_ND)))
        turn_2P1d = self._rotation.at(positions_P).unsqueeze(2)
        normed_PD, own_PD = self.base(tokens_P, states_PD, turn_2P1d, partial(attend_rows, layout=layout))
        if is_eagle:
            self.cache.write_rows(-1, rows, own_PD[: rows.num_rows])
        return normed_PD

    def embed(self, tokens_R: Tensor) -> Tensor:
        """A DSpark head's vectors of the tokens before drafts, [R, rank]; the token embeddings of other heads."""
        return super().embed(tokens_R) if self.heads is None else self.heads.markov.prev_VR[tokens_R]

    @torch.no_grad()
    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits [R, V] over the target's ids; those that the head never drafts are impossible."""
        logits_RV = super().raw_logits(hidden_RD)
        if self._ids_V is None:
            return logits_RV
        full_RV = logits_RV.new_full((len(logits_RV), self.vocab_size), -torch.inf)
        return full_RV.index_copy_(1, self._ids_V, logits_RV)


class MarkovBias(nn.Module):
    """Appends a vector of the token before a draft to the draft's state, for an output layer that reads both: the logits get a
    bias of low rank, which a gate may weigh."""

    def __init__(self, prev_VR: Tensor, gate: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.prev_VR, self.gate = prev_VR, gate

    def forward(self, hidden_RD: Tensor, *, prev_RD: Tensor, **_: Tensor) -> Tensor:
        """The widened states, [R, D + rank]; `prev_RD` is of the token before each draft."""
        both = torch.cat([hidden_RD, prev_RD], 1)
        return both if self.gate is None else torch.cat([hidden_RD, self.gate(both).sigmoid() * prev_RD], 1)


def _take_markov(weights: dict[str, Tensor], head: SpeculatorConfig, how: Running) -> Any:
    """The part of a DSpark head beside its network, as draft heads are given to an engine; None without one. The second matrix
    stays, as `markov_w2`."""
    if not head.markov_rank:
        return None
    prev_VR, weights["markov_w2"] = (weights.pop(f"markov_head.markov_{name}.weight") for name in ("w1", "w2"))
    gate: Callable[[Tensor], Tensor] | None = None
    if head.is_gated:
        weight, bias = (weights.pop(f"markov_head.gate_proj.{name}") for name in ("weight", "bias"))
        kind = product_kind(how)
        gate = partial(nn.functional.linear, weight=weight, bias=bias) if kind is None else kind(weight, bias)
    return SimpleNamespace(markov=MarkovBias(prev_VR, gate))


def _target_ids(weights: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's id of each id that a head drafts, [V]; None if they are the same ones. `d2t` holds their differences."""
    differences_V = weights.pop("d2t", None)
    weights.pop("t2d", None)
    if differences_V is None or len(differences_V) == vocab_size:
        return None
    ids_V = differences_V.long() + torch.arange(len(differences_V), device=differences_V.device)
    if int(ids_V.min()) < 0 or int(ids_V.max()) >= vocab_size:
        raise ValueError(
            f"decoder.drafter.path: its d2t names ids up to {int(ids_V.max())}; allowed: 0 to {vocab_size - 1}"
        )
    return ids_V


def _complete(weights: dict[str, Tensor], target: ModuleBackbone, ids_V: Tensor | None, *, is_dflash: bool) -> None:
    """Give a head the embeddings and the rows of the output layer that it shares with its target. Those in the file of a DFlash
    head are stale, but for an output layer of fewer ids."""
    for name in [name for name in weights if name.startswith(("verifier_", "rotary_emb.", "confidence_head."))]:
        del weights[name]
    if is_dflash or "embed_tokens.weight" not in weights:
        weights["embed_tokens.weight"] = target.embed(torch.arange(target.vocab_size, device=target.device))
    if "lm_head.weight" not in weights or (is_dflash and ids_V is None):
        output = target.head
        output_VD = output.weight_MK() if isinstance(output, PackedLinear | SmallLinear) else output.weight
        weights["lm_head.weight"] = output_VD if ids_V is None else output_VD[ids_V]


def load_speculator(folder: Path, target: Any, *, exact: bool = False) -> Speculator:
    """Load a head onto the device of its target; ValueError as read_speculator, or where its tensors do not fit its config."""
    head = read_speculator(folder)
    weights = load_weights(folder, device=str(target.device))
    check_finite(weights, folder, "decoder.drafter.path")
    weights = {name: part.to(target.dtype) if part.is_floating_point() else part for name, part in weights.items()}
    problem = f"decoder.drafter.path: the tensors of {folder} do not fit its config.json"
    with refused(problem, RuntimeError, KeyError), noting() as kernels:
        speculator = Speculator(head, weights, target, exact=exact)
        speculator.kernels = kernels
    return speculator
