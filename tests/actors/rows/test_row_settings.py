"""What a row may ask for: in the body of an OpenAI request and in columns; honoured, or refused by name, never dropped."""

import pytest

from draftmill.actors.rows.makers import maker_for
from draftmill.actors.rows.row import CHAT, COMPLETIONS, row_key
from draftmill.actors.rows.row_settings import OwnSettings, RowRules
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Complete, Infill, Score, Task
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import NeverStops
from draftmill.decoders.engine.penalties import Penalties
from draftmill.storage.errors import RowError
from draftmill.storage.inputs.lines import openai_request
from tests.actors.rows.test_prompts import chat_folder, chatting  # noqa: F401 - fixtures
from tests.actors.tokenizers_for_tests import byte_level, model_info, recipe_of

COMPLETE = Complete(kind="complete")
INFILL = Infill.model_validate({"kind": "infill", "mask": {"kind": "random"}}, strict=True)


def rules(
    task: Task = COMPLETE,
    *,
    columns: dict[str, str] | None = None,
    decoder: str = "autoregressive",
    sampling: Sampling = Sampling(),  # noqa: B008
    tokenizer: Tokenizer | None = None,
    ends: tuple[int, ...] = (2,),
) -> RowRules:
    recipe = recipe_of(task, columns, decoder, sampling=sampling, ends=ends)
    return RowRules(recipe, tokenizer or byte_level(), model_info())


def request(url: str | None = COMPLETIONS, **body) -> dict:
    """A request as the reader gives it; one without a prompt has messages."""
    if not {"prompt", "messages"} & body.keys():
        said: dict = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "x"}
        body = said | body
    return openai_request({"custom_id": "a", "body": body} | ({} if url is None else {"url": url}))


def refusal(made: RowRules, values: dict) -> str:
    with pytest.raises(RowError) as caught:
        made.own_settings(values)
    assert caught.value.kind in {"unsupported", "bad_setting", "bad_request"} and caught.value.stage == "read"
    return f"{caught.value.kind} {caught.value.message}"


def test_what_a_request_asks_for_is_read_from_its_body():
    body: dict = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "stop": ["\n", "x"],
        "seed": 3,
        "logprobs": 0,
        "model": "m",
    }
    assert rules().own_settings(request(**body)) == OwnSettings(7, 0.0, 0.5, ("\n", "x"), True, COMPLETIONS)
    body = {"max_completion_tokens": 7, "logprobs": True, "top_logprobs": 0, "stop": "x", "user": "u", "stream": False}
    assert rules().own_settings(request(CHAT, **body)) == OwnSettings(7, None, None, ("x",), True, CHAT)
    assert rules().own_settings(request(max_tokens=None, temperature=None, stop=None, logprobs=None)) == OwnSettings(
        endpoint=COMPLETIONS
    )
    assert rules().own_settings({"text": "no request"}) == OwnSettings()
    assert row_key(request(seed=3), Columns(), job_seed=1, sample_id="a") == sample_key(3, "a")
    assert row_key(request(seed=None), Columns(), job_seed=1, sample_id="a") == sample_key(1, "a")
    with pytest.raises(RowError):
        row_key(request(seed="x"), Columns(), job_seed=1, sample_id="a")


NEUTRAL: dict = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "stream": False,
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "structured_outputs": {"regex": None},
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "reasoning_effort": None,
    "a key that nobody knows": None,
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "stream_options": None,
}
CHANGING: dict = {
    "n": 2,
    "best_of": 3,
    "echo": True,
    "suffix": "}",
    "stream": True,
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "response_format": {"type": "xml"},
    "ignore_eos": True,
    "skip_special_tokens": False,
    "reasoning_effort": "low",
    "messages": [{"role": "user", "content": "x"}],
    "a key that nobody knows": 0,
}


def test_keys_that_change_nothing_are_accepted():
    assert rules().own_settings(request(**NEUTRAL)) == OwnSettings(endpoint=COMPLETIONS)
    assert rules().own_settings(request(CHAT, **NEUTRAL)) == OwnSettings(endpoint=CHAT)


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_would_change_the_answer_is_refused_by_name(key):
    said = refusal(rules(), request(**{"prompt": "x", key: CHANGING[key]}))
    assert said.startswith(f"unsupported {key}: ") and "allowed: " in said


def test_all_refused_keys_of_a_body_are_named_together():
    said = refusal(rules(), request(n=2, echo=True, temperature=0.5))
    assert "n: '2'" in said and "echo: 'True'" in said and "temperature" not in said


def test_what_the_whole_job_says_may_be_said_again():
    task = Complete(kind="complete", ignore_eos=True, skip_special_tokens=False)
    made = rules(task)
    body: dict = {"ignore_eos": True, "skip_special_tokens": False}
    assert made.own_settings(request(**body)) == OwnSettings(endpoint=COMPLETIONS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": "hot"}, ["bad_setting temperature: 'hot'", "valid number"]),
        ({"temperature": -1}, ["bad_setting temperature"]),
        ({"temperature": True}, ["bad_setting temperature"]),
        ({"temperature": float("nan")}, ["bad_setting temperature"]),
        ({"top_p": 0}, ["bad_setting top_p", "greater than 0"]),
        ({"top_p": 1.5}, ["bad_setting top_p"]),
        ({"max_tokens": 0}, ["bad_setting max_tokens", "greater than or equal to 1"]),
        ({"max_tokens": 2.5}, ["bad_setting max_tokens"]),
        ({"max_tokens": 5, "max_completion_tokens": 6}, ["unsupported max_completion_tokens: 6"]),
        ({"stop": ""}, ["bad_setting stop"]),
        ({"stop": [1]}, ["bad_setting stop"]),
        ({"stop": "\ufffd"}, ["bad_setting stop", "U+FFFD"]),
        ({"stop": "<sep>"}, ["unsupported stop: '<sep>'", "special token", "skip_special_tokens: false"]),
        ({"logprobs": 21}, ["bad_setting logprobs: '21'", "from 0 to 20"]),
        ({"logprobs": True}, ["bad_setting logprobs"]),
        ({"top_logprobs": 2}, ["unsupported top_logprobs", CHAT]),
        ({"top_k": 2.5}, ["bad_setting top_k"]),
        ({"top_k": -2}, ["bad_setting top_k", "-1"]),
        ({"min_p": 1.5}, ["bad_setting min_p"]),
        ({"presence_penalty": 3}, ["bad_setting presence_penalty: '3'", "less than or equal to 2"]),
        ({"frequency_penalty": "x"}, ["bad_setting frequency_penalty"]),
        ({"repetition_penalty": 0}, ["bad_setting repetition_penalty", "greater than 0"]),
        ({"min_tokens": -1}, ["bad_setting min_tokens", "greater than or equal to 0"]),
        ({"logit_bias": [1]}, ["bad_setting logit_bias"]),
        ({"logit_bias": {"x": 1}}, ["bad_setting logit_bias", "token ids"]),
        ({"logit_bias": {"5": 101}}, ["bad_setting logit_bias", "less than or equal to 100"]),
        ({"bad_words": "x"}, ["bad_setting bad_words"]),
        ({"bad_words": [[5]]}, ["bad_setting bad_words", "non-empty texts"]),
        ({"bad_words": [""]}, ["bad_setting bad_words"]),
        ({"stop_token_ids": ["x"]}, ["bad_setting stop_token_ids"]),
        ({"stop_token_ids": [True]}, ["bad_setting stop_token_ids"]),
    ],
    ids=str,
)
def test_a_value_that_can_not_be_is_refused_by_name(body, words):
    said = refusal(rules(), request(**body))
    assert all(word in said for word in words), said


PENALTIES: dict = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 3,
    "logit_bias": {"5": 1, "6": -100},
    "bad_words": ["x"],
}


def test_what_a_request_says_of_its_distribution_comes_to_the_decoder():
    made = rules(sampling=Sampling(suppress_tokens=(9,), bad_words=((7, 8),)))
    body = PENALTIES | {"top_k": -1, "min_p": 0.25, "stop_token_ids": [4], "logprobs": 3}
    settings = made.settings(made.own_settings(request(**body)))
    x = byte_level().encode("x")[0], byte_level().encode_behind(" x")
    assert settings.penalties == Penalties(
        1.5, 0.5, -0.5, biases=((5, 1.0), (6, -100.0)), banned=((9,), (x[0],), tuple(x[1])), min_new=3, ends=(2, 4)
    )
    assert (settings.top_k, settings.min_p, settings.stop_ids) == (0, 0.25, (4,))
    assert settings.token_logprobs and settings.top_logprobs == 3
    usual = made.settings(made.own_settings(request()))
    assert usual.penalties == Penalties(banned=((9,), (7, 8))) == made.job_penalties
    settings = made.settings(made.own_settings(request(CHAT, logprobs=True, top_logprobs=20)))
    assert settings.top_logprobs == 20


def test_whole_numbers_may_be_spelled_as_texts_and_a_bias_may_be_null():
    own = rules().own_settings(
        request(max_tokens="1e1", top_k="2e0", min_tokens="3", logit_bias={"5": None, "6": "-1.5"})
    )
    assert (own.max_new_tokens, own.top_k, own.penalties["min_new_tokens"]) == (10, 2, 3)
    assert own.penalties["logit_bias"] == {5: 0.0, 6: -1.5}


def test_a_neutral_value_takes_the_jobs_penalty_away():
    made = rules(sampling=Sampling(presence_penalty=1.0, top_k=5, min_p=0.5, bad_words=("x",), min_new_tokens=2))
    body: dict = {"presence_penalty": 0, "top_k": 0, "min_p": 0, "bad_words": [], "min_tokens": 0}
    settings = made.settings(made.own_settings(request(**body)))
    assert (settings.penalties, settings.top_k, settings.min_p) == (None, 0, 0.0)


@pytest.mark.parametrize("key", PENALTIES)
def test_penalties_that_a_decoder_can_not_have_for_one_row_are_refused_by_name(key):
    ratio = rules(sampling=Sampling(acceptance="rejection"))
    assert "acceptance" in refusal(ratio, request(**{key: PENALTIES[key]}))
    both = rules(sampling=Sampling(acceptance="rejection", presence_penalty=0.1))
    assert both.own_settings(request(**{key: PENALTIES[key]})).penalties
    edits = recipe_of(COMPLETE, None, "block_diffusion", ends=(2,), keys={"tau_edit": 0.9})
    editing = RowRules(edits, byte_level(), model_info())
    if key != "logit_bias":
        assert "tau_edit" in refusal(editing, request(**{key: PENALTIES[key]}))


@pytest.mark.parametrize("body", [{"bad_words": ["x"]}, {"min_tokens": 2}, {"stop_token_ids": [4]}], ids=str)
def test_what_could_leave_no_token_beside_a_constraint_is_refused(body):
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}, "name": "n"}}
    assert rules().own_settings(request(CHAT, response_format=form)).constraint
    assert "constraint allows" in refusal(rules(), request(CHAT, response_format=form, **body))


def test_ids_that_the_model_lacks_fail_their_row():
    made = RowRules(recipe_of(COMPLETE, ends=(2,)), byte_level(), model_info(vocab_size=50))
    with pytest.raises(RowError, match="logit_bias: 50 is not an id of the model; allowed: 0 to 49"):
        made.settings(made.own_settings(request(logit_bias={"50": 1})))


def test_a_stop_string_that_spells_an_end_token_is_harmless_since_that_ends_the_text_anyway():
    assert rules().own_settings(request(stop=["</s>", "x"])).stop == ("</s>", "x")
    assert "special token" in refusal(rules(ends=()), request(stop="</s>")), "with ignore_eos it ends nothing"
    assert rules(Complete(kind="complete", skip_special_tokens=False), ends=()).own_settings(request(stop="</s>")).stop


def test_a_decoder_that_draws_all_rows_alike_takes_the_jobs_own_values_only():
    made = rules(decoder="block_diffusion", sampling=Sampling(temperature=0.5))
    assert made.own_settings(request(temperature=0.5, top_p=1.0)).temperature == 0.5
    assert "decoder 'block_diffusion'" in refusal(made, request(temperature=0.6))
    assert "top_p" in refusal(made, request(top_p=0.9))
    assert made.own_settings(request(stop="x", max_tokens=5)).stop == ("x",), (
        "where a row ends is its own in every decoder"
    )


def test_log_probabilities_are_refused_where_they_are_not_recorded():
    assert "stepwise" in refusal(rules(decoder="stepwise"), request(logprobs=0))
    assert "autoregressive" in refusal(rules(decoder="block_diffusion"), request(CHAT, logprobs=True))


def test_other_apis_are_refused_by_their_url():
    for url in ("/v1/embeddings", "/v1/responses", 7):
        assert "url" in refusal(rules(), openai_request({"custom_id": "a", "url": url, "body": {"input": "x"}}))
    for known in (None, "/v1/completions", "https://host/v1/completions/"):
        assert rules().own_settings(request(known)).endpoint == COMPLETIONS


def test_holes_have_their_lengths_so_an_infilled_row_asks_for_none():
    made = rules(INFILL, decoder="assd")
    assert made.own_settings(request(temperature=0.5, top_p=0.9)) == OwnSettings(
        None, 0.5, 0.9, None, False, COMPLETIONS
    )
    assert "max_tokens" in refusal(made, request(max_tokens=5))
    assert "stop" in refusal(made, request(stop="x"))


def test_what_only_a_generation_has_leaves_a_score_as_it_is():
    made = rules(Score(kind="score"))
    assert made.own_settings(request(max_tokens=5, temperature=0.5)) == OwnSettings(endpoint=COMPLETIONS)
    assert "echo" in refusal(made, request(echo=True))


NAMES = {"max_new_tokens": "m", "temperature": "t", "top_p": "p", "top_k": "k", "stop": "s"}


def test_columns_hold_the_same_for_other_inputs():
    made = rules(columns=NAMES)
    row: dict = {"m": 5, "t": 0.25, "p": 1.0, "k": 3, "s": ["a", "b"]}
    assert made.own_settings(row) == OwnSettings(5, 0.25, 1.0, ("a", "b"), top_k=3)
    assert made.own_settings(dict.fromkeys("mtpks")) == OwnSettings(), "null is the job's own value"
    assert made.own_settings({"m": "5", "t": "0.25", "p": "", "k": "0", "s": "a"}) == OwnSettings(
        5, 0.25, None, ("a",), top_k=0
    ), "csv has only texts"
    assert made.own_settings({"m": 5.0, "t": float("nan"), "p": None, "k": None, "s": []}) == OwnSettings(
        5, None, None, ()
    ), "pandas has NaN"
    with pytest.raises(RowError, match="missing_column"):
        made.own_settings({"m": 5, "t": 1.0, "p": 1.0, "k": 2})
    assert "bad_setting t: 'warm'" in refusal(made, row | {"t": "warm"})


def test_a_named_column_comes_before_a_requests_body():
    made = rules(columns={"temperature": "t"})
    assert made.own_settings(request(temperature=0.5) | {"t": 0.9}).temperature == 0.9
    assert made.own_settings(request(temperature=0.5) | {"t": None}).temperature == 0.5


def test_no_stop_strings_at_all_can_be_asked_for_too():
    made = rules(Complete(kind="complete", stop=("x",)), columns={"stop": "s"})
    assert isinstance(made.settings(made.own_settings({"s": []})).stop_text, NeverStops)
    stops = made.settings(made.own_settings({"s": "y"})).stop_text
    assert isinstance(stops, StopStrings) and stops.cut("ayb") == "a"
    assert made.settings(made.own_settings({"s": None})).stop_text is None


def test_conversations_and_prompts_may_stand_in_one_file(chatting: Tokenizer) -> None:  # noqa: F811
    messages = [{"role": "user", "content": "hi"}]
    for chat in (False, True):
        task = Complete(kind="complete", chat=chat)
        make = maker_for(recipe_of(task), chatting, model_info())
        plain, talk = make.make(request(prompt="hi"), 0), make.make(request(CHAT, messages=messages), 0)
        shown = [chatting.decode(canvas.tokens[canvas.tokens >= 0].tolist()) for canvas in (plain, talk)]
        assert shown == ["<s>hi", "<s><cls>user\nhi<sep><cls>assistant\n"], "whatever task.chat says"
        assert (plain.endpoint, talk.endpoint) == (COMPLETIONS, CHAT)


def test_a_conversation_without_a_template_fails_alone():
    make = maker_for(recipe_of(COMPLETE), byte_level(), model_info())
    with pytest.raises(RowError, match="no chat template"):
        make.make(request(CHAT), 0)
    assert make.make(request(), 0).num_masked


def test_a_request_that_asks_nothing_says_so():
    make = maker_for(recipe_of(COMPLETE), byte_level(), model_info())
    for values, words in (
        ({"custom_id": "a", "url": COMPLETIONS}, "body is missing"),
        ({"custom_id": "a", "body": None}, "body is missing"),
        ({"custom_id": "a", "body": ["x"]}, "body is list"),
        ({"custom_id": "a"}, "body is missing"),
        ({"custom_id": "a", "body": {"model": "m"}}, "body has 'model'"),
    ):
        lifted = openai_request(values)
        assert lifted["id"] == "a", "its failure is looked up by its id"
        with pytest.raises(RowError, match=words):
            make.make(lifted, 0)


def test_a_row_gets_the_room_it_asks_for_and_the_plan_knows_it():
    make = maker_for(recipe_of(COMPLETE, {"max_new_tokens": "m"}), byte_level(), model_info(max_length=64))
    rows: list[dict] = [
        {"prompt": "x", "m": 5},
        {"prompt": "x", "m": None},
        {"prompt": "x", "m": 1000},
        {"prompt": "x", "m": 0},
    ]
    lead = make.make(rows[0], 0).holes[0][0]
    assert [make.size(row, 0).masked for row in rows[:3]] == [5, 64 - lead, 64 - lead]
    with pytest.raises(RowError) as caught:
        make.size(rows[3], 0)
    assert caught.value.kind == "bad_setting"
