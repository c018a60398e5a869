"""The tokenizers of Dream and SDAR, whose classes are remote code: read as those of transformers that they are copies of."""

import json

import pytest
from tokenizers import pre_tokenizers

from draftmill.actors.rows.text import load_tokenizer
from draftmill.storage.errors import UserError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_tokenizer(folder, name, model_type="Dream"):
    vocab = {piece: index for index, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"])}
    added = {str(len(vocab) + index): token for index, token in enumerate(SPECIAL)}
    config = {
        "tokenizer_class": name,
        "auto_map": {"AutoTokenizer": [f"tokenization.{name}", None]},
        "added_tokens_decoder": {index: {"content": token, "special": True} for index, token in added.items()},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "chat_template": CHAT,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return vocab


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("DreamTokenizer", "Dream"), ("Qwen2Tokenizer", "sdar"), ("Qwen2Tokenizer", "Fast_dLLM_Qwen")],
)
def test_a_tokenizer_that_is_a_copy_of_transformers_own_needs_no_remote_code(tmp_path, name, model_type):
    vocab = write_tokenizer(tmp_path, name, model_type)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello") == [vocab["he"], vocab["ll"], vocab["o"]]
    assert tokenizer.decode(tokenizer.encode("Grüße,\n  world")) == "Grüße,\n  world"
    assert (tokenizer.eos_id, tokenizer.bos_id) == (len(vocab), len(vocab) + 3)
    assert tokenizer.chat is not None
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_any_other_remote_tokenizer_is_still_refused(tmp_path):
    write_tokenizer(tmp_path, "NightmareTokenizer")
    with pytest.raises(UserError, match="can't be loaded"):
        load_tokenizer(tmp_path)
