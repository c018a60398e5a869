"""Prompts that are too long: what is cut away, what stays, and that the row says how much."""

import random

import numpy as np
import pytest

from draftmill.actors.rows.makers import Maker, cut_ids, cut_text, prompt_room
from draftmill.actors.task import Side
from draftmill.storage.errors import RowError
from tests.actors.rows import test_prompts
from tests.actors.rows.test_prompts import BEGIN, beginning, chat_folder, chatting, made, prompt
from tests.actors.tokenizers_for_tests import byte_level, word_pieces

__all__ = ["chat_folder", "chatting"]  # fixtures

SIDES: tuple[Side, ...] = ("left", "right", "middle")


def maker(truncate: Side | None, **more) -> Maker:
    return test_prompts.maker(truncate=truncate, **{"max_length": 16} | more)


@pytest.mark.parametrize(("side", "expected"), [("left", "efgh"), ("right", "abcd"), ("middle", "abgh")])
def test_each_side_cuts_away_what_its_name_says(side, expected):
    letters = np.asarray([ord(letter) for letter in "abcdefgh"], np.int32)
    assert "".join(map(chr, cut_ids(letters, 4, side, fixed=0))) == expected
    assert cut_ids(letters, 5, side, fixed=2).tolist()[:2] == [97, 98]
    assert "".join(map(chr, cut_ids(letters, 1, "middle", fixed=0))) == "a"
    assert cut_ids(letters, 8, side, fixed=0).tolist() == letters.tolist()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tokenizer", [byte_level(), word_pieces()], ids=["bytes", "words"])
def test_a_text_is_cut_at_its_tokens(side, tokenizer):
    text = "one two three four five"
    count = len(tokenizer.encode(text))
    for excess in (1, count - 1, count, count + 5):
        cut = cut_text(text, excess, side, tokenizer)
        assert len(tokenizer.encode(cut)) <= max(0, count - excess) + 1, "an edge may make one more"
        if side == "left":
            assert text.endswith(cut)
        elif side == "right":
            assert text.startswith(cut)


def test_a_prompt_is_cut_to_leave_room_for_what_is_asked_and_half_of_the_model_at_least():
    assert prompt_room(64, 16) == 48 and prompt_room(64, 1000) == 32 and prompt_room(65, 1000) == 33
    ids = byte_level().encode("0123456789abcdefghij")
    kept: dict[Side, list[int]] = {"left": ids[-12:], "right": ids[:12], "middle": ids[:6] + ids[-6:]}
    for side, expected in kept.items():
        canvas = made(maker(side, max_new_tokens=4), {"prompt": "0123456789abcdefghij"})
        assert prompt(canvas) == expected and canvas.num_masked == 4 and canvas.truncated == len(ids) - 12
    canvas = made(maker("left", max_new_tokens=100), {"prompt": "0123456789abcdefghij"})
    assert prompt(canvas) == ids[-8:] and canvas.num_masked == 8 and canvas.truncated == len(ids) - 8


def test_what_fits_is_not_cut_and_without_the_setting_nothing_is():
    for side in (None, *SIDES):
        canvas = made(maker(side, max_new_tokens=4), {"prompt": "0123456789ab"})
        assert canvas.truncated == 0 and len(prompt(canvas)) == 12
    canvas = made(maker(None, max_new_tokens=4), {"prompt": "0123456789abcd"})
    assert canvas.truncated == 0 and canvas.num_masked == 2, "a shorter completion, as before"
    with pytest.raises(RowError, match="too_long"):
        maker(None, max_new_tokens=4).make({"prompt": "0123456789abcdefghij"}, 1)
    assert made(maker("left", max_length=None), {"prompt": "7" * 80}).truncated == 0


@pytest.mark.parametrize("side", SIDES)
def test_the_begin_token_stays(side):
    canvas = made(maker(side, tokenizer=beginning(), max_new_tokens=4), {"prompt": "7" * 40})
    lead = list(beginning().lead)
    assert lead and prompt(canvas)[: len(lead)] == lead and len(prompt(canvas)) == 12
    assert canvas.truncated == len(lead) + 40 - 12
    given = [BEGIN, *range(10, 40)]
    canvas = made(maker(side, tokenizer=beginning(), columns={"tokens": "t"}, max_new_tokens=4), {"t": given})
    assert len(prompt(canvas)) == 12 and canvas.truncated == len(given) - 12
    assert (prompt(canvas)[: len(lead)] == lead) == (given[: len(lead)] == lead or side != "left")


@pytest.mark.parametrize("side", SIDES)
def test_a_chat_keeps_its_template_and_loses_text_of_its_longest_messages(side, chatting):
    make = maker(side, tokenizer=chatting, chat=True, max_new_tokens=8, max_length=96)
    talk = [
        {"role": "system", "content": "s" * 30},
        {"role": "user", "content": "".join(random.Random(1).choices("abcdefgh ", k=300))},
        {"role": "assistant", "content": "short"},
        {"role": "user", "content": "?"},
    ]
    canvas = made(make, {"messages": talk})
    text = chatting.decode(prompt(canvas))
    assert len(prompt(canvas)) <= 88 and canvas.truncated == len(chatting.parse(chatting.chat(talk))) - len(
        prompt(canvas)
    )
    assert "s" * 30 in text and "short" in text and "?" in text
    inner = chatting.chat([*talk[:1], {"role": "user", "content": "\0"}, *talk[2:]]).split("\0")
    assert text.startswith(inner[0]) and text.endswith(inner[1]), "the template is whole, the answer's header too"
    kept = text[len(inner[0]) : len(text) - len(inner[1])]
    content = talk[1]["content"]
    if side == "left":
        assert content.endswith(kept) and kept
    elif side == "right":
        assert content.startswith(kept) and kept
    else:
        assert content.startswith(kept[: len(kept) // 3]) and content.endswith(kept[-len(kept) // 3 :])


def test_a_chat_whose_template_alone_is_too_long_fails(chatting):
    make = maker("left", tokenizer=chatting, chat=True, max_length=16)
    with pytest.raises(RowError, match=r"too_long.*of chat template and short messages"):
        make.make({"messages": [{"role": "user", "content": "x"}] * 12}, 1)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tokenizer", [byte_level(), word_pieces()], ids=["bytes", "words"])
def test_of_a_score_the_prompt_is_cut_and_never_what_is_scored(side, tokenizer):
    make = maker(side, score=True, tokenizer=tokenizer, max_length=8)
    row = {"prompt": "one two one two one two one two one two ", "completion": "one"}
    canvas = made(make, row)
    whole = made(maker(None, score=True, tokenizer=tokenizer, max_length=None), row)
    scored = whole.tokens[whole.score_from :].tolist()
    assert len(canvas.tokens) == 8 and canvas.tokens[canvas.score_from :].tolist() == scored
    assert canvas.truncated == len(whole.tokens) - 8 and canvas.text == whole.text
    with pytest.raises(RowError, match="too_long"):
        make.make(row | {"completion": row["prompt"]}, 1)
