"""Rows become prompts with room for a completion, or texts to score: columns, begin tokens, chats, bounds, and bad rows."""

import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftmill.actors.rows.canvas import Canvas, CanvasSize
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.actors.task import Complete, Score, Side
from draftmill.decoders.base import HOLE
from draftmill.storage.errors import RowError
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of, word_pieces

BEGIN, END = 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('no such role') }}{% endif %}"
    "<cls>{{ m.role }}\n{{ m.content }}<sep>{% endfor %}{% if add_generation_prompt %}<cls>assistant\n{% endif %}"
)


def core_with(*, lead: bool = False, tail: bool = False) -> Core:
    """The byte-level vocabulary, putting a begin token in front of a text and an end token behind it where asked."""
    core = Core.from_str(byte_level()._core.to_str())
    single = f"{'<s> ' if lead else ''}$A{' </s>' if tail else ''}"
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", BEGIN), ("</s>", END)])
    return core


@cache
def beginning() -> Tokenizer:
    return Tokenizer(core_with(lead=True, tail=True), bos_id=BEGIN, eos_id=END)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a tokenizer as checkpoints have it, chat template included."""
    folder = tmp_path_factory.mktemp("chat")
    special = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<cls>", "sep_token": "<sep>"}
    inner = PreTrainedTokenizerFast(tokenizer_object=core_with(lead=True), **special)
    inner.chat_template = TEMPLATE
    inner.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chatting(chat_folder) -> Tokenizer:
    tokenizer = load_tokenizer(chat_folder)
    assert tokenizer is not None
    return tokenizer


def maker(
    *,
    tokenizer: Tokenizer | None = None,
    columns: dict[str, str] | None = None,
    score: bool = False,
    truncate: Side | None = None,
    **task: Any,
) -> Maker:
    info = replace(
        model_info(max_length=task.pop("max_length", 64)),
        mask_id=task.pop("mask_id", None),
        kind=task.pop("model", "causal"),
    )
    setting: Complete | Score = (
        Score.model_validate({"kind": "score"} | task, strict=True)
        if score
        else Complete.model_validate({"kind": "complete"} | task, strict=True)
    )
    return maker_for(recipe_of(setting, columns, truncate=truncate), tokenizer or byte_level(), info)


def made(make: Maker, values: dict[str, Any]) -> Canvas:
    """The row's canvas, of the size that the planner knows."""
    canvas = make.make(values, 1)
    assert make.size(values, 1) == canvas.size
    return canvas


def prompt(canvas: Canvas) -> list[int]:
    return canvas.tokens[: canvas.holes[0][0]].tolist()


def error_kind(make: Maker, values: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        make.make(values, 1)
    with pytest.raises(RowError) as planned:
        make.size(values, 1)
    assert planned.value.kind == caught.value.kind
    return caught.value.kind


def test_a_canvas_is_the_prompt_and_room_for_its_completion():
    canvas = made(maker(max_new_tokens=5), {"prompt": "x = "})
    ids = byte_level().encode("x = ")
    assert canvas.tokens.tolist() == [*ids, *[HOLE] * 5]
    assert canvas.holes == ((len(ids), len(ids) + 5),) and canvas.size == CanvasSize(len(ids) + 5, 5)


def test_the_room_ends_where_the_model_does():
    assert made(maker(max_new_tokens=5, max_length=8), {"prompt": "7" * 6}).size == CanvasSize(8, 2)
    assert made(maker(max_new_tokens=5, max_length=8), {"prompt": "7" * 7}).size == CanvasSize(8, 1)
    assert error_kind(maker(max_new_tokens=5, max_length=8), {"prompt": "7" * 8}) == "too_long"
    assert made(maker(max_new_tokens=5, max_length=None), {"prompt": "7" * 80}).size == CanvasSize(85, 5)


@pytest.mark.parametrize(
    ("columns", "values", "expected"),
    [
        ({}, {"prompt": "p", "text": "t"}, "p"),
        ({}, {"prompt": None, "text": "t"}, "t"),
        ({}, {"text": "t"}, "t"),
        ({"prompt": "q"}, {"prompt": "p", "q": "q"}, "q"),
        ({"text": "body"}, {"prompt": "p", "body": "b"}, "b"),
    ],
)
def test_a_prompt_is_the_named_column_else_prompt_else_text(columns, values, expected):
    assert prompt(made(maker(columns=columns), values)) == byte_level().encode(expected)


def test_a_prompt_is_what_transformers_makes_of_a_text_but_for_an_end_token(chat_folder):
    theirs: Any = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer = load_tokenizer(chat_folder)
    for text in ("x = 1\n", " x", "日本"):
        assert prompt(made(maker(tokenizer=tokenizer), {"prompt": text})) == theirs(text).input_ids
    assert prompt(made(maker(tokenizer=beginning()), {"prompt": "x"})) == [BEGIN, *byte_level().encode("x")]


def test_a_special_token_that_a_prompt_spells_is_text():
    ids = prompt(made(maker(tokenizer=beginning()), {"prompt": "a</s>b"}))
    assert ids == [BEGIN, *byte_level().encode("a</s>b")] and END not in ids


def test_an_empty_prompt_is_the_begin_token_where_there_is_one():
    assert prompt(made(maker(tokenizer=beginning()), {"prompt": ""})) == [BEGIN]
    assert prompt(made(maker(tokenizer=Tokenizer(core_with(), bos_id=BEGIN)), {"prompt": ""})) == [BEGIN]
    assert prompt(made(maker(tokenizer=Tokenizer(core_with(), bos_id=BEGIN)), {"prompt": "x"})) != [BEGIN]
    assert error_kind(maker(), {"prompt": ""}) == "empty_prompt"


def test_a_checkpoints_begin_token_stands_in_for_that_of_the_tokenizer(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=core_with()).save_pretrained(tmp_path)
    for content, expected in (("{}", None), ('{"bos_token_id": 4}', 4)):
        (tmp_path / "config.json").write_text(content)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None and tokenizer.bos_id == expected


def test_a_tokenizer_is_what_its_file_says_whatever_the_type_of_the_model(chat_folder, tmp_path):
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    text = "for value in values:\n        total += value\n"
    typed: Any = AutoTokenizer.from_pretrained(folder)
    found = load_tokenizer(folder)
    assert found is not None and found.encode(text) == byte_level().encode(text)
    assert typed(text).input_ids[1:] != found.encode(text), "transformers puts Qwen2's own rules in the file's place"


def test_a_model_with_masks_begins_without_a_prompt_and_takes_none_that_holds_its_mask():
    """It would fill such a mask, or believe it open: SGLang had to learn to refuse them, too."""
    make = maker(columns={"tokens": "ids"}, mask_id=8)
    canvas = made(make, {"ids": []})
    assert (prompt(canvas), canvas.num_masked) == ([], 64)
    assert prompt(made(maker(mask_id=8), {"prompt": ""})) == []
    with pytest.raises(RowError, match="id 8 is the model's mask") as caught:
        make.make({"ids": [7, 8]}, 1)
    assert caught.value.kind == "bad_tokens"
    assert prompt(made(maker(columns={"tokens": "ids"}), {"ids": [7, 8]})) == [7, 8]


def test_tokens_are_a_prompt_as_they_are():
    make = maker(columns={"tokens": "ids"}, tokenizer=beginning())
    assert prompt(made(make, {"ids": [7, 8]})) == [7, 8]
    assert error_kind(make, {"ids": []}) == "empty_prompt"
    assert error_kind(make, {"ids": [7, None]}) == "bad_tokens"
    assert error_kind(make, {"ids": [300]}) == "bad_tokens"
    assert error_kind(make, {"prompt": "x"}) == "missing_column"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"a": 1}, "missing_column"),
        ({"messages": [{"role": "user", "content": "x"}]}, "missing_column"),
        ({"prompt": ["a", "b"]}, "bad_row"),
        ({"prompt": "\ud800"}, "bad_encoding"),
    ],
)
def test_a_row_without_a_prompt_fails(values, kind):
    assert error_kind(maker(), values) == kind


def test_a_conversation_takes_the_form_of_the_template(chat_folder, chatting):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    theirs: Any = AutoTokenizer.from_pretrained(chat_folder).apply_chat_template(messages, add_generation_prompt=True)
    ids = prompt(made(maker(tokenizer=chatting, chat=True), {"messages": messages}))
    assert ids == theirs["input_ids"] and ids[0] == BEGIN and BEGIN not in ids[1:]


def test_a_chats_text_is_one_message_of_a_user(chatting):
    make = maker(tokenizer=chatting, chat=True)
    ids = prompt(made(make, {"prompt": "hello"}))
    assert ids == prompt(made(make, {"messages": [{"role": "user", "content": "hello"}]}))
    named = maker(tokenizer=chatting, chat=True, columns={"prompt": "q"})
    assert prompt(made(named, {"q": "hello", "messages": [{"role": "user", "content": "no"}]})) == ids


def test_special_tokens_in_a_conversation_are_parsed_as_transformers_does(chat_folder, chatting):
    messages = [{"role": "user", "content": "a</s>b"}]
    ids = prompt(made(maker(tokenizer=chatting, chat=True), {"messages": messages}))
    theirs: Any = AutoTokenizer.from_pretrained(chat_folder).apply_chat_template(messages, add_generation_prompt=True)
    assert END in ids and ids == theirs["input_ids"]
    assert END not in chatting.encode("a</s>b"), "parsing a chat must not switch parsing on elsewhere"


@pytest.mark.parametrize(
    "messages",
    [
        *["hello", [], ["hello"], [{"content": "no role"}], [{"role": 3}], [{"role": "odd", "content": "refused"}]],
        *[[{"role": "user", "content": odd}] for odd in (7, {"text": "a"}, ["a"], [{"type": "image_url"}])],
    ],
    ids=str,
)
def test_what_is_no_conversation_fails(chatting, messages):
    assert error_kind(maker(tokenizer=chatting, chat=True), {"messages": messages}) == "bad_messages"


def test_text_parts_of_a_message_are_its_text(chatting):
    make = maker(tokenizer=chatting, chat=True)
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    given = [prompt(made(make, {"messages": [{"role": "user", "content": content}]})) for content in (parts, "hello")]
    assert given[0] == given[1]


def test_a_tokenizer_without_a_template_has_no_chat(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=core_with()).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.chat is None


def test_a_text_is_scored_behind_the_begin_token():
    canvas = made(maker(score=True, tokenizer=beginning()), {"text": "x = 1", "prompt": "not used"})
    ids = byte_level().encode("x = 1")
    assert canvas.tokens.tolist() == [BEGIN, *ids] and canvas.score_from == 1 and canvas.holes == ()
    assert canvas.text == "x = 1" and canvas.size == CanvasSize(len(ids) + 1, len(ids))


def test_without_a_begin_token_the_first_token_is_given():
    canvas = made(maker(score=True), {"text": "x = 1"})
    assert canvas.tokens.tolist() == byte_level().encode("x = 1") and canvas.score_from == 1
    assert canvas.text is None, "only a part of the text is scored"
    assert error_kind(maker(score=True), {"text": "x"}) == "empty_text"
    assert error_kind(maker(score=True, tokenizer=beginning()), {"text": ""}) == "empty_text"


@pytest.mark.parametrize(
    ("columns", "values", "before", "scored"),
    [
        ({}, {"prompt": "ab", "completion": "c", "text": "t"}, "ab", "c"),
        ({}, {"completion": "c"}, "", "c"),
        ({"prompt": "prompt"}, {"prompt": "ab", "text": "t"}, "ab", "t"),
        ({"prompt": "q", "completion": "a"}, {"q": "ab", "a": "c"}, "ab", "c"),
        ({"completion": "a"}, {"prompt": "ab", "a": "c"}, "ab", "c"),
        ({"text": "body"}, {"prompt": "ab", "completion": "c", "body": "t"}, "", "t"),
    ],
)
def test_a_completion_is_scored_behind_its_prompt(columns, values, before, scored):
    canvas = made(maker(score=True, columns=columns, tokenizer=beginning()), values)
    ids = [BEGIN, *byte_level().encode(before)]
    assert canvas.tokens.tolist() == [*ids, *byte_level().encode(scored)]
    assert (canvas.score_from, canvas.text) == (len(ids), scored)


def test_a_vocabulary_that_joins_no_pieces_scores_every_token_with_a_part_of_the_completion():
    make = maker(score=True, tokenizer=word_pieces(), columns={"prompt": "p", "text": "t"})
    canvas = made(make, {"p": "the cat", "t": " sat on"})
    assert canvas.tokens.tolist() == word_pieces().encode("the cat sat on") and canvas.score_from == 2
    canvas = made(make, {"p": "the c", "t": "at sat"})
    assert canvas.tokens.tolist() == word_pieces().encode("the cat sat") and canvas.score_from == 1


def test_a_chats_answer_is_scored_behind_the_generation_prompt(chatting):
    messages = [{"role": "user", "content": "hello"}]
    before = prompt(made(maker(tokenizer=chatting, chat=True), {"messages": messages}))
    canvas = made(maker(score=True, tokenizer=chatting, chat=True), {"messages": messages, "completion": "hi"})
    assert canvas.tokens.tolist() == [*before, *chatting.encode("hi")] and canvas.score_from == len(before)
    assert error_kind(maker(score=True, tokenizer=chatting, chat=True), {"text": "hi"}) == "missing_column"


def test_given_tokens_are_scored_from_the_second_on():
    make = maker(score=True, columns={"tokens": "ids"})
    canvas = made(make, {"ids": [7, 8, 9]})
    assert np.array_equal(canvas.tokens, [7, 8, 9]) and (canvas.score_from, canvas.text) == (1, None)
    assert error_kind(make, {"ids": [7]}) == "empty_text"


@pytest.mark.parametrize("model", ["masked", "ancestral", "blocks", "any_subset"])
def test_a_model_that_needs_no_token_before_scores_the_first_one_too(model):
    canvas = made(maker(score=True, model=model), {"text": "x = 1"})
    assert canvas.tokens.tolist() == byte_level().encode("x = 1") and canvas.score_from == 0
    assert canvas.text == "x = 1" and canvas.size == CanvasSize(5, 5)
    assert made(maker(score=True, model=model), {"text": "x"}).size == CanvasSize(1, 1)
    assert error_kind(maker(score=True, model=model), {"text": ""}) == "empty_text"


def test_an_any_subset_models_text_has_no_begin_token_as_when_it_is_infilled():
    for model, begin in (("masked", [BEGIN]), ("any_subset", [])):
        canvas = made(maker(score=True, tokenizer=beginning(), model=model), {"text": "x = 1"})
        assert canvas.tokens.tolist() == [*begin, *byte_level().encode("x = 1")]


def test_a_reference_is_scored_if_no_other_column_is_named():
    row = {"prompt": "1 + 1 =", "answer": " 2", "completion": " 3", "text": "1 + 1 = 4"}
    for columns, scored in (
        ({"reference": "answer"}, " 2"),
        ({"reference": "answer", "completion": "completion"}, " 3"),
        ({"reference": "answer", "prompt": "prompt", "text": "text"}, "1 + 1 = 4"),
    ):
        canvas = made(maker(score=True, columns=columns), row)
        begin = len(byte_level().encode("1 + 1 ="))
        assert (canvas.score_from, canvas.text) == (begin, scored)
    assert error_kind(maker(score=True, columns={"reference": "answer"}), {"prompt": "p"}) == "missing_column"


def test_a_references_ids_are_scored_behind_the_rows_tokens():
    make = maker(score=True, columns={"tokens": "ids", "reference": "answer"})
    canvas = made(make, {"ids": [7, 8], "answer": [9, 10]})
    assert canvas.tokens.tolist() == [7, 8, 9, 10] and (canvas.score_from, canvas.text) == (2, None)
    assert error_kind(make, {"ids": [7, 8], "answer": "9"}) == "bad_tokens"
    assert error_kind(make, {"ids": [7, 8]}) == "missing_column"


def test_what_the_model_never_generates_is_not_scored():
    assert error_kind(maker(score=True, columns={"tokens": "ids"}), {"ids": [7, 6]}) == "bad_tokens"
    make = maker(score=True, columns={"tokens": "ids", "reference": "answer"}, mask_id=6, model="masked")
    assert error_kind(make, {"ids": [6], "answer": [7]}) == "bad_tokens"


def test_a_text_longer_than_the_model_fails():
    assert made(maker(score=True, max_length=8), {"text": "7" * 8}).size == CanvasSize(8, 7)
    assert error_kind(maker(score=True, max_length=8), {"text": "7" * 9}) == "too_long"
