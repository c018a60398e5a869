"""Stop strings are found at the token that completes them, however the text is cut into tokens and blocks of tokens."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from draftmill.actors.rows.row_settings import RowRules
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of, word_pieces


@cache
def single_bytes() -> dict[int, int]:
    """Byte -> id of the token that is this byte alone, in the byte-level vocabulary."""
    return {byte: byte_level().encode(chr(byte))[0] for byte in range(128)} | _high_bytes()


def _high_bytes() -> dict[int, int]:
    found = {}
    vocabulary = byte_level().vocabulary()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    for byte in range(128, 256):
        found[byte] = vocabulary[names[byte]]
    return found


@cache
def with_byte_fallback() -> Tokenizer:
    """A vocabulary in the way of SentencePiece: words behind a mark for their space, and 256 tokens for single bytes."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "▁b",
        "a",
        "b",
        "ab",
        "▁\n",
    ]
    core = Core(
        models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core)


def in_bytes(text: str) -> list[int]:
    return [single_bytes()[byte] for byte in text.encode()]


def by_definition(tokenizer: Tokenizer, stops, tokens) -> int | None:
    """The first token behind which the whole text holds a stop string."""
    for count in range(1, len(tokens) + 1):
        if any(stop in tokenizer.continuation(tokens[:count]) for stop in stops):
            return count
    return None


def in_blocks(finder: StopStrings, tokens, sizes) -> int | None:
    """What is found when tokens are looked at in blocks of these sizes, over and over."""
    checked, turn = 0, 0
    while checked < len(tokens):
        end = min(len(tokens), checked + sizes[turn % len(sizes)])
        keep = finder.find(tokens[:end], checked)
        if keep is not None:
            return keep
        checked, turn = end, turn + 1
    return None


def test_a_stop_string_inside_one_token_ends_there():
    tokens = byte_level().encode("def f(x):\n    return x\n")
    inside = next(n for n, token in enumerate(tokens) if len(byte_level().decode([token])) > 2)
    part = byte_level().decode([tokens[inside]])[1:2]
    finder = StopStrings(byte_level(), [part])
    text = byte_level().decode(tokens)
    keep = finder.find(tokens, 0)
    assert keep is not None and part in byte_level().decode(tokens[:keep])
    assert part not in byte_level().decode(tokens[: keep - 1])
    assert finder.cut(byte_level().decode(tokens[:keep])) == text[: text.index(part)]


def test_a_stop_string_at_the_very_first_token_leaves_an_empty_text():
    finder = StopStrings(byte_level(), ["x"])
    assert finder.find(in_bytes("xyz"), 0) == 1
    assert finder.cut("x") == ""


@pytest.mark.parametrize("stop", ["\n\n", "return", "é", "日本", "🎉🎉🎉 the end of it 🎉🎉🎉", "a🎉b"])
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [100]])
def test_a_stop_string_may_span_tokens_and_its_characters_too(stop, sizes):
    tokens = in_bytes(f"before it {stop} and behind {stop}")
    finder = StopStrings(byte_level(), [stop])
    keep = in_blocks(finder, tokens, sizes)
    assert keep == len(f"before it {stop}".encode())
    assert finder.cut(byte_level().decode(tokens[:keep])) == "before it "


def test_of_several_stop_strings_the_one_that_ends_first_cuts_and_the_longest_of_those():
    tokens = in_bytes("one two three")
    assert StopStrings(byte_level(), ["three", "two"]).find(tokens, 0) == len("one two")
    assert StopStrings(byte_level(), ["e tw", "o"]).cut("one two") == ""
    assert StopStrings(byte_level(), ["wo", "two"]).cut("one two") == "one "
    assert StopStrings(byte_level(), ["two three", "tw"]).cut("one two three") == "one "
    assert StopStrings(byte_level(), ["x"]).cut("none") == "none"


def test_several_stop_strings_that_one_token_completes():
    token = next(t for t in range(byte_level().size) if len(byte_level().decode([t])) > 3 and t > 6)
    text = byte_level().decode([token])
    finder = StopStrings(byte_level(), [text[2], text[1:3], text[3]])
    assert finder.find([token], 0) == 1
    assert finder.cut(text) == text[: min(text.index(text[2]), text.index(text[1:3]))]


def test_bytes_that_are_not_yet_a_character_are_no_match_and_hide_none():
    half, rest = in_bytes("é")
    finder = StopStrings(byte_level(), ["é", "x"])
    assert finder.find([half], 0) is None
    assert finder.find([half, rest], 1) == 2
    assert finder.find([half, *in_bytes("x")], 1) == 2, "a torn character in front of the stop string"


def test_a_space_in_front_of_the_first_word_counts():
    space_cat = word_pieces().encode("the cat")[1:]
    assert word_pieces().continuation(space_cat) == " cat"
    assert StopStrings(word_pieces(), [" cat"]).find(space_cat, 0) == 1


def test_bytes_that_stand_for_a_character_are_joined_before_they_are_searched():
    tokenizer = with_byte_fallback()
    ids = tokenizer.vocabulary()
    tokens = [ids["▁a"], *(ids[f"<0x{byte:02X}>"] for byte in "é日".encode()), ids["b"]]
    assert tokenizer.is_byte(tokens[1]) and not tokenizer.is_byte(tokens[0])
    for sizes in ([1], [2], [3], [7]):
        assert in_blocks(StopStrings(tokenizer, ["日"]), tokens, sizes) == 6
        assert in_blocks(StopStrings(tokenizer, [" aé日b"]), tokens, sizes) == 7
    long_run = [ids["▁a"], *(ids[f"<0x{byte:02X}>"] for byte in "日日日日日日語".encode())]
    assert in_blocks(StopStrings(tokenizer, ["語"]), long_run, [1]) == len(long_run)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stops=st.lists(st.text("ab é日🎉\n", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    bytewise=st.booleans(),
)
def test_the_token_found_is_that_of_the_definition(seed, stops, sizes, bytewise):
    rng = random.Random(seed)
    tokenizer = byte_level() if bytewise else with_byte_fallback()
    text = "".join(rng.choice(["a", "b", " ", "é", "日", "🎉", "\n", *stops]) for _ in range(rng.randint(0, 20)))
    tokens = in_bytes(text) if bytewise else tokenizer.encode(text)
    for _ in range(rng.randint(0, 3)):  # tear some characters
        if tokens:
            tokens.pop(rng.randrange(len(tokens)))
    expected = by_definition(tokenizer, stops, tokens)
    finder = StopStrings(tokenizer, stops)
    assert in_blocks(finder, tokens, sizes) == expected
    if expected is not None:
        kept = finder.cut(tokenizer.continuation(tokens[:expected]))
        assert not any(stop in kept for stop in stops)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_stop_string_among_the_first_tokens_is_ordinary_text(data):
    text = data.draw(st.text("abé日", min_size=1, max_size=12))
    stops = data.draw(st.lists(st.sampled_from(["a", "ab", "é", "日", "b日"]), min_size=1, max_size=2, unique=True))
    min_new, tokens = data.draw(st.integers(0, 8)), in_bytes(text)
    finder = StopStrings(byte_level(), stops, min_new=min_new)
    size, ends = 0, list[tuple[int, int]]()  # by definition: (bytes up to its end, characters before it)
    for stop in stops:
        for start in range(len(text)):
            size = len(text[: start + len(stop)].encode())
            if text.startswith(stop, start) and size > min_new:
                ends.append((size, start))
    expected = min(ends)[0] if ends else None
    assert in_blocks(finder, tokens, data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))) == expected
    if expected is not None:
        kept = byte_level().decode(tokens[:expected])
        assert finder.cut(kept, tokens[:expected]) == text[: min(ends)[1]]


def test_min_tokens_of_a_row_hold_for_the_stop_strings_of_the_job():
    task = Complete(kind="complete", stop=("x",))
    rules = RowRules(recipe_of(task), byte_level(), model_info())
    for body, expected in (({}, None), ({"min_tokens": 2}, 3), ({"min_tokens": 2, "stop": "b"}, None)):
        own = rules.own_settings({"custom_id": "a", "body": {"prompt": "p", **body}})
        finder = rules.settings(own).stop_text
        assert (finder and finder.find(in_bytes("axx"), 0)) == expected
