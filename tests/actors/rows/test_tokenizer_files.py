"""Tokenizers and chat templates are read without transformers and without remote code, and are what these make of them."""

import datetime
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from draftmill.actors.checkpoints.models import builtin_models
from draftmill.actors.rows import text
from draftmill.actors.rows.text import NotPlain, Tokenizer, load_tokenizer, read_files
from draftmill.storage.errors import UserError
from tests.actors.tokenizers_for_tests import byte_level

BUILTIN = Path(text.__file__).parents[2] / "decoders" / "builtin" / "ar-tiny"
TEXTS = ["def f(x):\n    return x", "<s>a</s> b", " <new> x<other>y", "日本 🙂", "", "a<|im_end|>\n", "  x  "]
PLAIN = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
ADDED = {"lstrip": False, "rstrip": True, "normalized": True, "single_word": False, "special": False}

# What tokenizer_config.json may say.
CONFIGS: dict[str, dict] = {
    "nothing": {},
    "names": {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<cls>", "unk_token": "<unk>"},
    "a new end": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
    "a piece of the vocabulary": {"eos_token": "return", "pad_token": "x"},
    "spelled out": {"eos_token": PLAIN | {"content": "<|end|>", "rstrip": True}, "bos_token": None},
    "added": {
        "added_tokens_decoder": {
            "301": ADDED | {"content": "<other>"},
            "300": ADDED | {"content": "<new>", "special": True},
            "1": ADDED | {"content": "<s>", "special": True},
        },
        "eos_token": "<other>",
    },
    "more": {"extra_special_tokens": ["<new>", PLAIN | {"content": "<other>"}], "eos_token": "</s>"},
    "more, by the old name": {"additional_special_tokens": ["<new>", "<s>"], "eos_token": "</s>"},
    "more, with names": {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
    "flags": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True, "bos_token": "<s>"},
    "its class": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "legacy": False, "model_max_length": 8},
}
ROLES = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
TEMPLATES = {
    "roles": ROLES + "{% if add_generation_prompt %}[assistant]{% endif %}",
    "blocks": "  {%- for m in messages %}\n    {{ m.content }}\n  {% endfor %}\n{{ bos_token }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | upper }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}{{ tools }}{{ documents }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{% set d = dict(a=messages[0].role) %}{{ d.a }}{{ d.items() | list }}{{ image_token }}",
    "thinking": "{{ messages[-1].thinking }}{{ messages[-1].reasoning_content }}{{ messages[-1].reasoning is defined }}",
    "null": "{{ messages[-1].name is defined }}{{ messages[-1].tool_calls }}{{ undefined_name }}",
    "year": "{{ strftime_now('%Y') }}",
    "raises": "{{ raise_exception('roles must alternate') }}",
    "damaged": "{% for m in messages %}",
    "escapes": "{{ messages.append(1) }}",
    "hides": "{% set ns = namespace(_x=1) %}",
}
CHATS: list[list[dict]] = [
    [{"role": "user", "content": "  <b>hi</b> 日本\n", "name": None}],
    [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a", "reasoning": "why", "tool_calls": [{"f": 1.5, "x": None}]},
    ],
    [],
    [{"role": "user", "content": "x", "when": datetime.date(2024, 1, 2)}],
]


def write(folder: Path, config: dict | None, core: Core | None = None) -> Path:
    core = core or Core.from_str(byte_level()._core.to_str())
    core.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def both(folder: Path) -> tuple:
    """The tokenizer of a folder as it is read here, and as transformers reads it."""
    read_files(folder)  # it needs no help
    ours = load_tokenizer(folder)
    assert ours is not None
    return ours, PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def check(folder: Path) -> None:
    ours, theirs = both(folder)
    other = Tokenizer(theirs.backend_tokenizer, bos_id=theirs.bos_token_id, eos_id=theirs.eos_token_id)
    assert (ours.bos_id, ours.eos_id, ours.size) == (other.bos_id, other.eos_id, other.size)
    assert ours.vocabulary() == other.vocabulary() and ours.lead == other.lead
    for given in TEXTS:
        assert ours.encode(given) == other.encode(given), given
        assert ours.parse(given) == other.parse(given), given
    assert read_files(folder)[1] == theirs.special_tokens_map
    ids = list(range(ours.size))
    assert ours.decode(ids) == other.decode(ids)
    assert ours._core.decode(ids, skip_special_tokens=True) == other._core.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tokenizer_is_what_transformers_reads(tmp_path, name):
    check(write(tmp_path, CONFIGS[name]))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_older_files_are_left_to_transformers_where_the_config_lists_no_tokens(tmp_path, name):
    write(tmp_path, {"eos_token": "</s>"})
    (tmp_path / name).write_text('{"<new>": 300}')
    with pytest.raises(NotPlain):
        read_files(tmp_path)
    check(write(tmp_path, CONFIGS["added"]))


def test_what_the_file_itself_asks_for_is_read_and_left_out_as_before(tmp_path):
    core = Core.from_str(byte_level()._core.to_str())
    core.enable_truncation(3)
    core.enable_padding(length=9, pad_token="<pad>", pad_id=5)
    core.add_tokens([AddedToken("<new>", lstrip=True), AddedToken("return x", normalized=True)])
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    check(write(tmp_path, {"bos_token": "<s>"}, core))
    assert read_files(tmp_path)[1]["pad_token"] == "<pad>"


@pytest.mark.parametrize("model", sorted(set(builtin_models()) - {"ar-tiny-eagle3"}))
def test_the_builtin_tokenizers_are_what_transformers_reads(model):
    check(BUILTIN.parent / model)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_what_transformers_renders(tmp_path, name, chat):
    config = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>", "chat_template": TEMPLATES[name]}
    ours, theirs = both(write(tmp_path, config))
    assert ours.chat is not None
    try:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001 - a template raises what it likes
        with pytest.raises(type(error)):
            ours.chat(chat)
        return
    assert ours.chat(chat) == expected


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}),
        ({"chat_template": [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]}, {}),
        ({"chat_template": [{"name": "rag", "template": "two"}]}, {}),
        ({"chat_template": "config"}, {"additional_chat_templates/tool.jinja": "tool"}),
        ({}, {"chat_template.jinja": "file", "additional_chat_templates/tool.jinja": "tool"}),
        ({}, {}),
    ],
)
def test_the_template_of_several_is_the_one_that_transformers_takes(tmp_path, config, files):
    write(tmp_path, config)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    try:
        expected = PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).get_chat_template()
    except ValueError:
        assert ours.chat is None
        return
    assert ours.chat is not None and ours.chat([{"role": "user", "content": "x"}]) == expected


@pytest.mark.parametrize("config", [{"fix_mistral_regex": True}, {"eos_token": 3}, {"extra_special_tokens": [3]}])
def test_what_only_transformers_understands_is_left_to_it(tmp_path, config):
    with pytest.raises(NotPlain):
        read_files(write(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("special_tokens_map.json", "{"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_setting(tmp_path, name, content):
    shutil.copy(BUILTIN / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="can't be loaded"):
        load_tokenizer(tmp_path)


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
