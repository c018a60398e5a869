"""Tiny random models of every causal family, saved as transformers saves them, and a hand that plays forwards on a backbone."""

from dataclasses import replace

import torch
import transformers

from draftmill.decoders.backbones.any_causal import AnyCausalBackbone
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.rows import token_rows
from tests.decoders.references.rows import intervals_of

ROTARY: dict = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE: dict = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING: dict = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GPT2: dict = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64}
GPT_NEO: dict = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 3,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local", "local"], 1]],
    "window_size": 4,
}
# name: (class, config)
MODELS: dict[str, tuple[str, dict]] = {
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


def load(folder, dtype="float32", **more):
    backbone = load_backbone(folder, dtype=dtype, device="cpu", **more)
    assert isinstance(backbone, RotaryBackbone | AnyCausalBackbone)
    return backbone


@torch.no_grad()
def theirs(model, tokens):
    """(hidden states [L, D], logits [L, V]) of one sequence by transformers' own forward."""
    hidden = model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state
    return hidden[0], model.get_output_embeddings()(hidden)[0]


def plain_layer(weight_MK, bias_M, *, one_code):
    """A layer of `RotaryNetwork.turn` with the whole numbers of its weight."""
    num_out, num_in = weight_MK.shape
    layer = torch.nn.Linear(num_in, num_out, bias=bias_M is not None, dtype=torch.float64)
    layer.load_state_dict({"weight": weight_MK} | ({} if bias_M is None else {"bias": bias_M}))
    return layer.requires_grad_(False)


def random_tokens(length, *, seed, vocab_size=61):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


def play(backbone, work, *, width=None):
    """One forward: `work` maps a slot to rows (token, position, column, the columns it sees); hidden states by slot."""
    counts = [len(rows) for rows in work.values()]
    flat = [row for rows in work.values() for row in rows]
    tokens, positions, columns = (torch.tensor([row[part] for row in flat]) for part in range(3))
    num_columns = 1 + max(max((*seen, column)) for _, _, column, seen in flat)
    seen = torch.zeros(len(flat), num_columns, dtype=torch.bool)
    for row, (*_, columns_seen) in enumerate(flat):
        seen[row, list(columns_seen)] = True
    rows = token_rows(list(work), counts, tokens, positions, columns, intervals_of(seen))
    if width is not None:
        rows = replace(rows, shape=replace(rows.shape, num_columns=width))
    hidden = backbone.forward(rows)
    assert hidden.shape == (len(flat), backbone.width)
    return dict(zip(work, hidden.split(counts), strict=True))


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
