"""What a result row says of an outcome: texts without what ended them, scores per token, and what is left open."""

import math
from dataclasses import replace

import numpy as np
import pytest

from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.samples import Sample, tally_of
from draftmill.actors.rows.stop_text import stop_strings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.rows.unit_io import decoded_columns
from draftmill.actors.task import Complete, Infill, Score
from draftmill.decoders.base import HOLE, Outcome, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.runs.records import SCHEMA, table_from_rows
from tests.actors.fakes import outcome
from tests.actors.tokenizers_for_tests import byte_level, word_pieces

EOS = 2
PROMPT = byte_level().encode("x = ")
ROOM = 12


def completion(
    text: str,
    finish: str,
    *,
    extra: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
    skip_special: bool = True,
) -> dict:
    """The columns of a completion of PROMPT by the tokens of `text` and `extra`."""
    task = Complete(kind="complete", stop=stop, skip_special_tokens=skip_special)
    tokenizer = tokenizer or byte_level()
    canvas = completable()
    tokens = np.asarray([*tokenizer.encode(text), *extra], dtype=np.int32)
    found = replace(outcome(Request(0, 0, canvas.tokens), 0.0), tokens=tokens, finish=finish)
    return decoded_columns(task, canvas, found, tokenizer, stop_strings(task, Sampling(), tokenizer))


def completable() -> Canvas:
    tokens = np.asarray([*PROMPT, *[HOLE] * ROOM], dtype=np.int32)
    return Canvas(tokens, ((len(PROMPT), len(tokens)),))


def test_a_completion_is_what_stands_behind_the_prompt():
    row = completion("1\n", "length")
    assert row["text"] == "1\n" and row["finish"] == "length" and "fills" not in row
    assert (row["prompt_tokens"], row["new_tokens"]) == (len(PROMPT), len(byte_level().encode("1\n")))


def test_an_end_token_is_kept_among_the_tokens_and_left_out_of_the_text():
    row = completion("1\n", "eos", extra=(EOS,))
    assert row["text"] == "1\n" and row["tokens"][-1] == EOS and row["new_tokens"] == len(row["tokens"])
    assert completion("", "eos", extra=(EOS,))["text"] == ""
    kept = completion("1", "length", extra=(EOS,), skip_special=False)
    assert kept["text"] == "1</s>", "with ignore_eos it is a token like others"


def test_special_tokens_that_were_generated_are_left_out_of_the_text_and_kept_among_the_tokens():
    between = (EOS, 3, *byte_level().encode("2"))
    row = completion("1", "length", extra=between)
    assert row["text"] == "12" and row["tokens"].tolist()[-len(between) :] == list(between)
    assert completion("1", "length", extra=between, skip_special=False)["text"] == "1</s><cls>2"


def test_stop_strings_are_looked_for_in_the_text_as_it_is_shown():
    tokens = [*byte_level().encode("a"), EOS, *byte_level().encode("b"), *byte_level().encode("c")]
    for skip, kept in ((True, len(tokens) - 1), (False, None)):
        task = Complete(kind="complete", stop=("ab",), skip_special_tokens=skip)
        stops = stop_strings(task, Sampling(), byte_level())
        assert stops is not None and stops.find(tokens, 0) == kept
    assert completion("a", "stop", extra=(EOS, *byte_level().encode("b")), stop=("ab",))["text"] == ""


def test_special_tokens_in_a_hole_are_left_out_and_those_that_the_row_gave_stay():
    task = Infill.model_validate({"kind": "infill", "mask": {"kind": "given"}}, strict=True)
    ids = byte_level().encode("ab")
    canvas = Canvas(np.asarray([3, HOLE, ids[0], HOLE, HOLE], dtype=np.int32), ((1, 2), (3, 5)))
    filled = np.asarray([EOS, ids[0], 4], dtype=np.int32)
    found = replace(outcome(Request(0, 0, canvas.tokens), 0.0), tokens=filled)
    shown = byte_level().decode([ids[0]])
    row = decoded_columns(task, canvas, found, byte_level())
    assert row["text"] == f"<cls>{shown}{shown}" and [fill["text"] for fill in row["fills"]] == ["", shown]
    whole = decoded_columns(task.model_copy(update={"skip_special_tokens": False}), canvas, found, byte_level())
    assert whole["text"] == f"<cls></s>{shown}{shown}<sep>" and whole["fills"][0]["text"] == "</s>"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [("a\n\n", ("\n\n",), "a"), ("a b", ("b", " b"), "a"), ("stop", ("stop",), ""), ("a. B", (".",), "a")],
)
def test_the_text_ends_in_front_of_the_stop_string(text, stop, shown):
    row = completion(text, "stop", stop=stop)
    assert row["text"] == shown and byte_level().decode(row["tokens"].tolist()) == text


def test_a_space_between_prompt_and_completion_is_part_of_the_completion():
    with_space = word_pieces().encode("the cat")[1:]
    row = completion("", "length", extra=tuple(with_space), tokenizer=word_pieces())
    assert row["text"] == " cat"


def test_without_a_tokenizer_there_is_no_text():
    canvas = completable()
    found = replace(outcome(Request(0, 0, canvas.tokens), 0.0), tokens=np.asarray([7], dtype=np.int32), finish="eos")
    assert decoded_columns(Complete(kind="complete"), canvas, found, None)["text"] is None


def scored(text: str | None, *, tokenizer: Tokenizer | None = None) -> dict:
    tokens = np.asarray([1, *byte_level().encode("é = 1")], dtype=np.int32)
    canvas = Canvas(tokens, (), score_from=1, text=text)
    count = len(tokens) - 1
    found = replace(
        outcome(Request(0, 0, tokens, score_from=1), 0.0),
        tokens=tokens[1:],
        logprob=-6 * math.log(2),
        token_logprobs=np.full(count, -6 * math.log(2) / count, dtype=np.float32),
    )
    return decoded_columns(Score(kind="score"), canvas, found, tokenizer)


@pytest.mark.parametrize("text", ["é = 1", None])
def test_a_score_has_a_log_probability_for_each_token_and_bits_for_each_byte(text):
    row = scored(text, tokenizer=byte_level())
    assert row["text"] == "é = 1" and row["prompt_tokens"] == 1 and row["new_tokens"] == len(row["tokens"])
    assert row["metrics"]["bits_per_byte"] == pytest.approx(1.0) and row["finish"] == "filled"
    table = table_from_rows([row | {"id": "a", "unit": 0, "pass": 1, "attempt": 1, "status": "ok"}])
    assert table.schema.equals(SCHEMA) and sum(table["token_logprobs"][0].as_py()) == pytest.approx(row["logprob"])


def test_scored_ids_without_a_text_have_no_bits_per_byte():
    row = scored(None)
    assert row["text"] is None and row["metrics"] is None and row["token_logprobs"] is not None


def test_infilled_rows_have_no_scores_of_tokens():
    task = Infill.model_validate({"kind": "infill", "mask": {"kind": "random"}}, strict=True)
    canvas = Canvas(np.asarray([7, HOLE], dtype=np.int32), ((1, 2),))
    found: Outcome = replace(outcome(Request(0, 0, canvas.tokens), 0.0), tokens=np.asarray([9], dtype=np.int32))
    row = decoded_columns(task, canvas, found, byte_level())
    assert "token_logprobs" not in row and [fill["start"] for fill in row["fills"]] == [1]


def test_given_tokens_are_counted_without_the_room_that_was_not_used():
    canvas = completable()
    ended = replace(outcome(Request(0, 0, canvas.tokens), 0.0), tokens=np.asarray([7, EOS], dtype=np.int32))
    completed = Sample(0, canvas=canvas.tokens, outcome=ended)
    tokens = np.asarray([1, 7, 8], dtype=np.int32)
    found = replace(outcome(Request(0, 0, tokens), 0.0), tokens=tokens[1:])
    judged = Sample(1, canvas=tokens, score_from=1, outcome=found)
    assert judged.request(5).score_from == 1
    tally = tally_of([completed, judged])
    assert (tally.prompt_tokens, tally.new_tokens) == (len(PROMPT) + 1, 4)
