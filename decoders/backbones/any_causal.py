"""Runs any causal model of transformers whose attention goes through its interface, as families/any_causal.py describes it.

The model keeps its own code between attention and experts, which are ours. When it is loaded, its own forward with eager
attention, one text at a time and without a cache, is compared with ours: ragged texts beside each other, with a cache, after
drafts that were rejected, and with windows that the short texts exceed. A model that gives other numbers is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftmill.decoders.backbones.attention import AnyLayout, slot_attention
from draftmill.decoders.backbones.base import Running
from draftmill.decoders.backbones.families.any_causal import CausalFacts, facts, parse, pin_rotations
from draftmill.decoders.backbones.families.config import refused
from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.backbones.moe import GivenExperts, is_experts, take_experts
from draftmill.decoders.backbones.rows import TokenRows, causal_rows
from draftmill.decoders.backbones.small_weights import SmallLinear, shrink_products
from draftmill.decoders.backbones.transformer import ModuleBackbone

ATTENTION: Final = "draftmill_slots"
"""The name of slot_attention in transformers' interface."""

# Texts of the comparison, and the window that stands in for a longer one: shorter than the texts.
_LENGTHS: Final = (23, 5, 14)
_WINDOW: Final = 6
# Its forwards: for each text the first and last column, and a shift of its tokens where they are drafts to be rejected.
_FORWARDS: Final = (
    ((0, 9, 0), (0, 2, 0), (0, 4, 0)),
    ((9, 14, 3), (2, 4, 3), (4, 7, 3)),
    ((9, 23, 0), (2, 5, 0), (4, 14, 0)),
)
# The largest difference of a row of hidden states, beside the row: rounding in other orders, through all layers.
_ROUNDING: Final = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
# Families whose operations beside products and attention have the same bits in any batch on a GPU.
_FIXED: Final = ("gpt2", "gpt_neo")

Chosen = tuple[Tensor, Tensor]
"""The experts of each row of a text, and their weights."""


class AnyCausalBackbone(ModuleBackbone):
    """See the module's docstring. `weights` are the checkpoint's tensors, which are removed from the dict."""

    is_foreign = True
    layers_by = "transformers' code"

    def __init__(self, name: str, config: Mapping[str, Any], weights: dict[str, Tensor], how: Running) -> None:
        known, where, first, small = facts(name, config), how.device, how.first, how.small
        if how.is_fixed and name not in _FIXED:
            raise ValueError(
                f"model.exact: true, but models of family {name!r} are not exact on GPUs; allowed there: false"
            )
        model = _load(name, config, known, weights, how.dtype)
        base = model.get_decoder()
        model.to(first)
        if small != "auto":
            shrink_products(base, small, first)
        own, choices = _own_states(model, known, first)
        take_experts(model)
        use_interface(model)
        self._forward, self._given = base.forward, torch.empty(0)
        if small != "auto":
            shrink_products(base, small, where)
            if small == "int8":
                output = model.get_output_embeddings()
                model.set_output_embeddings(SmallLinear(output.weight, output.bias, small))
            model.to(where)
        parts = base, model.get_output_embeddings(), model.get_input_embeddings()
        super().__init__(model, parts, known, known.windows, how)
        base.config._attn_implementation = ATTENTION
        model.set_output_embeddings(self.head)
        # Stands in for the stack's forward while the model computes logits of given hidden states.
        base.forward = lambda *_, **__: _Given(self._given)
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=how.dtype, device=where)
        self._compare(name, own, choices)

    def _run(self, tokens_P: Tensor, positions_P: Tensor, layout: AnyLayout, rows: TokenRows) -> Tensor:
        flat = {"input_ids": tokens_P.unsqueeze(0), "position_ids": positions_P.unsqueeze(0)}
        output = self._forward(**flat, attention_mask=self._no_mask, use_cache=False, layout=layout)
        return output.last_hidden_state[0]

    @torch.no_grad()
    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits [R, V] by the model's own code: it may scale or cap them."""
        return at_least_rows(self._padded(len(hidden_RD)), self._finish, hidden_RD)

    def _finish(self, hidden_RD: Tensor) -> Tensor:
        self._given = hidden_RD.unsqueeze(0)
        no_tokens_1R = torch.zeros(self._given.shape[:2], dtype=torch.int64, device=self.device)
        return self.model(input_ids=no_tokens_1R, use_cache=False).logits[0]

    def _compare(self, name: str, own: list[Tensor], choices: dict[str, list[Chosen]]) -> None:
        """ValueError if a row differs from the model's own forward by more than rounding. The cache is empty afterwards."""
        experts = {which: part for which, part in self.base.named_modules() if isinstance(part, GivenExperts)}
        windows, errors = self.windows, (AttributeError, IndexError, KeyError, TypeError)
        problem = f"model.path: models of family {name!r} can't run here"
        try:
            with refused(problem, *errors), _narrow(self.base, windows) as narrowed:
                self.windows = tuple(_WINDOW if window in narrowed else window for window in windows)
                found = self._states([(experts[which], chosen) for which, chosen in choices.items()])
        finally:
            for part in experts.values():
                part.forced = None
            self.windows = windows
            self.forget()
        for text, (theirs, ours) in enumerate(zip((states.to(self.device) for states in own), found, strict=True)):
            right = (theirs - ours).norm(dim=1) <= _ROUNDING[self.dtype] * theirs.norm(dim=1)
            if not right.all():
                row = int((~right).nonzero()[0])
                raise ValueError(
                    f"{problem}: at token {row} of text {text} the hidden states differ from transformers' own by "
                    f"{float((theirs - ours)[row].abs().max()):.2g}, beside numbers up to {float(theirs.abs().max()):.2g}"
                )

    def _states(self, forced: Sequence[tuple[GivenExperts, list[Chosen]]] = ()) -> list[Tensor]:
        """The hidden states of all texts by the forwards of _FORWARDS, with these choices of experts for each text."""
        self.allocate(len(_LENGTHS), max(_LENGTHS))
        texts = _texts(self.vocab_size, self.device)
        states = [torch.empty(length, self.width, device=self.device) for length in _LENGTHS]
        for parts in _FORWARDS:
            pieces = [
                (text[first:end] + more) % self.vocab_size
                for text, (first, end, more) in zip(texts, parts, strict=True)
            ]
            counts, firsts = [end - first for first, end, _ in parts], [first for first, _, _ in parts]
            padding = (0, 0, 0, self._padded(sum(counts)) - sum(counts))
            for part, chosen in forced:
                of_rows = (
                    torch.cat([kind[first:end] for kind, (first, end, _) in zip(kinds, parts, strict=True)])
                    for kinds in zip(*chosen, strict=True)
                )
                expert_NK, weight_NK = (functional.pad(rows, padding) for rows in of_rows)
                part.forced = expert_NK.to(self.device), weight_NK.to(self.device)
            hidden_ND = self.forward(causal_rows(range(len(texts)), counts, firsts, torch.cat(pieces))).float()
            for state, (first, end, _), piece_ND in zip(states, parts, hidden_ND.split(counts), strict=True):
                state[first:end] = piece_ND
        return states


class _Given:
    """An output of a stack that has hidden states; everything else in it is None."""

    def __init__(self, hidden_1RD: Tensor) -> None:
        self.last_hidden_state = hidden_1RD

    def __getitem__(self, index: int) -> Tensor | None:
        return (self.last_hidden_state, None)[min(index, 1)]

    def __getattr__(self, name: str) -> None:
        return None


def _texts(vocab_size: int, device: torch.device) -> list[Tensor]:
    return [(torch.arange(length, device=device) * 7 + 11 * length + 1) % vocab_size for length in _LENGTHS]


@torch.no_grad()
def _own_states(model: Any, known: CausalFacts, device: torch.device) -> tuple[list[Tensor], dict[str, list[Chosen]]]:
    """The hidden states of the texts by transformers' own forward, one text at a time. In half precision, where rounding may lead
    to other experts and so to other states of all rows that see it, also the experts chosen, by the names of their modules."""
    base, choices = model.get_decoder(), dict[str, list[Chosen]]()
    base.config._attn_implementation = base.config._experts_implementation = "eager"
    for name, part in base.named_modules():
        if is_experts(part) and part.down_proj.dtype.itemsize == 2:
            noted = choices.setdefault(name, [])
            part.register_forward_pre_hook(lambda _, given, noted=noted: noted.append(given[1:]))
    with _narrow(base, known.windows):
        states = [
            base(input_ids=text.unsqueeze(0), use_cache=False).last_hidden_state[0].float()
            for text in _texts(known.vocab_size, device)
        ]
    return states, choices


@contextmanager
def _narrow(base: Any, windows: tuple[int | None, ...]) -> Iterator[set[int]]:
    """Gives the layers with a window, if they ask for it in each forward, one of _WINDOW positions. Yields the sizes replaced."""
    sizes = {window for window in windows if window is not None}
    holders = [base.config, *base.modules()]
    held = [(one, value) for one in holders if (value := getattr(one, "sliding_window", None)) in sizes]
    try:
        for one, _ in held:
            one.sliding_window = _WINDOW
        yield {value for _, value in held}
    finally:
        for one, value in held:
            one.sliding_window = value


def _load(
    name: str, config: Mapping[str, Any], known: CausalFacts, weights: dict[str, Tensor], dtype: torch.dtype
) -> Any:
    """Build transformers' module with these tensors, renamed and put together by its own rules for the family."""
    import transformers
    from transformers.utils import logging

    transformers.AttentionInterface.register(ATTENTION, slot_attention)
    module_class = getattr(transformers, known.model_class)
    logging.disable_progress_bar()
    model, report = module_class.from_pretrained(
        None, config=parse(name, config), state_dict=weights, dtype=dtype, output_loading_info=True
    )
    weights.clear()
    lacking = sorted(set(report["missing_keys"]) - known.tied)
    if lacking:
        raise ValueError(f"model.path: the weights lack {', '.join(lacking[:5])}")
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # for losses; they are not there where states are given
    return pin_rotations(model).eval().requires_grad_(False)


# ---- GPT-Neo, whose own attention does not use transformers' interface -----------------------------------------------


class _GPTNeoAttention(nn.Module):
    """Replaces the attention of one layer, with the same weights under the same names. Scores are not scaled, and local layers
    have a window. `given` are the keyword arguments for attention: GPT-Neo's blocks pass none."""

    is_causal = True

    def __init__(self, own: Any, given: dict[str, Any]) -> None:
        super().__init__()
        self.attention, self.layer_idx, self.given = own.attention, own.layer_id, given
        self.attention.bias = None  # its mask of all positions, a few MiB a layer
        self.window = own.attention.config.window_size if own.attention_type == "local" else None

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own: Any = self.attention
        products = own.q_proj, own.k_proj, own.v_proj
        heads_1HNd = (own._split_heads(product(hidden_states), own.num_heads, own.head_dim) for product in products)
        attend = ALL_ATTENTION_FUNCTIONS[own.config._attn_implementation]
        mixed_1NHd, _ = attend(self, *heads_1HNd, None, scaling=1.0, sliding_window=self.window, **self.given)
        return own.out_proj(mixed_1NHd.flatten(2)), None


def use_interface(model: Any) -> None:
    """Let a GPT-Neo use the interface, with the `layout` that its stack is called with; other models stay as they are."""
    if model.config.model_type != "gpt_neo":
        return
    base, given = model.get_decoder(), dict[str, Any]()
    plain = base.forward
    for block in base.h:
        block.attn = _GPTNeoAttention(block.attn, given)

    def forward(*, layout: Any, **rows: Any) -> Any:
        given["layout"] = layout
        return plain(**rows)

    base.forward = forward
