"""Tiny random models of every causal family, saved as transformers saves them, and a hand that plays forwards on a backbone."""

from typing import Any

import torch
import transformers

from decoders.backbones.base import TokenRows
from decoders.backbones.load import load_backbone
from decoders.backbones.transformer import TransformerBackbone

ROTARY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GPT2: dict[str, Any] = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64}
GPT_NEO: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 3,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local", "local"], 1]],
    "window_size": 4,
}
# name: (class, config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", ROTARY | {"attention_bias": True}),
    "llama-3": ("Llama", ROTARY | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("Mistral", ROTARY | {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", ROTARY),
    "qwen2-sliding": ("Qwen2", ROTARY | SLIDING | {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3", ROTARY | {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", GPT2 | {"pad_token_id": 0}),
    "gpt2-scales": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40}),
    "gpt_neo": ("GPTNeo", GPT_NEO | {"intermediate_size": 40}),
}


def save_random(folder, name="qwen2", *, seed=0, std=0.25, **changes):
    """Save random weights of a family; returns transformers' own model with them."""
    family, config = MODELS[name]
    parsed = getattr(transformers, f"{family}Config")(**(config | changes))
    model_class = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(parsed).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def load(folder, dtype="float32"):
    """Load saved weights on the CPU."""
    backbone = load_backbone(folder, dtype=dtype, device="cpu")
    assert isinstance(backbone, TransformerBackbone)
    return backbone


@torch.no_grad()
def theirs(model, tokens):
    """(hidden states [L, D], logits [L, V]) of one sequence by transformers' own forward."""
    hidden = model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state
    return hidden[0], model.get_output_embeddings()(hidden)[0]


def random_tokens(length, *, seed, vocab_size=61):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


def play(backbone, work, *, width=None):
    """One forward: `work` maps a slot to rows (token, position, column, the columns it sees); hidden states by slot."""
    num_rows = max(len(rows) for rows in work.values())
    width = width or 1 + max(max((*seen, column)) for rows in work.values() for _, _, column, seen in rows)
    fields = torch.zeros(3, len(work), num_rows, dtype=torch.int64)
    valid = torch.zeros(len(work), num_rows, dtype=torch.bool)
    visible = torch.rand(len(work), num_rows, width) < 0.5  # what padding rows see may be anything
    for index, rows in enumerate(work.values()):
        for row, (token, position, column, seen) in enumerate(rows):
            fields[:, index, row] = torch.tensor([token, position, column])
            valid[index, row] = True
            visible[index, row] = torch.isin(torch.arange(width), torch.tensor(list(seen), dtype=torch.int64))
    tokens, positions, columns = fields
    hidden = backbone.forward(TokenRows(torch.tensor(list(work)), tokens, positions, columns, valid, visible))
    assert hidden.shape == (len(work), num_rows, backbone.width)
    return {slot: hidden[index, : len(work[slot])] for index, slot in enumerate(work)}


def in_a_row(tokens, first=0):
    """Rows of tokens at the columns from `first` on, each of which sees all before it and itself."""
    return [(token, first + i, first + i, range(first + i + 1)) for i, token in enumerate(tokens)]


def decode_with_rejections(backbone, texts, *, prompts, junk_seed=0, width=None):
    """Hidden states of every token of `texts` (by slot): a ragged prefill, then steps of one token and rejected drafts."""
    generator = torch.Generator().manual_seed(junk_seed)
    backbone.allocate(max(texts) + 1, max(len(text) for text in texts.values()) + 3)
    done = {slot: prompts[slot] for slot in texts}
    hidden = play(backbone, {slot: in_a_row(text[: prompts[slot]]) for slot, text in texts.items()}, width=width)
    found = {slot: [rows] for slot, rows in hidden.items()}
    while any(done[slot] < len(text) for slot, text in texts.items()):
        work = {}
        for slot, text in texts.items():
            if done[slot] < len(text):
                num_junk = int(torch.randint(0, 4, (1,), generator=generator))
                junk = torch.randint(1, 61, (num_junk,), generator=generator).tolist()
                work[slot] = in_a_row([text[done[slot]], *junk], done[slot])
        for slot, rows in play(backbone, work, width=width).items():
            found[slot].append(rows[:1])
            done[slot] += 1
    return {slot: torch.cat(rows) for slot, rows in found.items()}
