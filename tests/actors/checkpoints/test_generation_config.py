"""No key of a checkpoint's generation config, or of an OpenAI request, is silently ignored: honoured, neutral, or refused."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from draftmill.actors.checkpoints.generation import ELSEWHERE, HONOURED, NEUTRAL, from_checkpoint
from draftmill.actors.rows import row
from draftmill.decoders.backbones.checkpoint import read_generation
from draftmill.decoders.common_settings import Sampling

PATH = Path("generation_config.json")

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}
OTHER_VALUE: dict = {
    "sequence_bias": [[[5], 1.5], [[7], -2.0]],
    "bad_words_ids": [[1, 2], [3]],
    "suppress_tokens": [4],
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "do_sample": False,
    "repetition_penalty": 1.5,
}


def test_every_key_of_transformers_generation_config_is_honoured_read_elsewhere_or_refused():
    for key in GenerationConfig().to_dict():
        assert sum((key in HONOURED, key in ELSEWHERE, key in NEUTRAL)) == 1, key
        if key in NEUTRAL:
            for value in (None, *NEUTRAL[key]):
                assert from_checkpoint(Sampling(), {key: value}, PATH) == Sampling()
            with pytest.raises(ValueError, match=f"generation_config.json has {key} = "):
                from_checkpoint(Sampling(), {key: 17}, PATH)
        elif key in HONOURED:
            assert from_checkpoint(Sampling(), {key: OTHER_VALUE.get(key, 3)}, PATH) != Sampling()
        else:
            assert from_checkpoint(Sampling(), {key: 17}, PATH) == Sampling()
    with pytest.raises(ValueError, match="nobody_knows"):
        from_checkpoint(Sampling(), {"nobody_knows": 1}, PATH)


def test_what_transformers_calls_neutral_by_default_is_not_refused():
    defaults = GenerationConfig._get_default_generation_params()
    assert from_checkpoint(Sampling(), defaults, PATH) == Sampling(temperature=0.0, top_k=50, top_p=1.0)


def test_a_spec_comes_before_its_checkpoint():
    found = from_checkpoint(Sampling(), QWEN3, PATH)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.6, 20, 0.95, 1.0)
    own = Sampling(temperature=1.0, top_k=None, from_checkpoint=True)
    found = from_checkpoint(own, QWEN3 | {"repetition_penalty": 1.05}, PATH)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (1.0, None, 0.95, 1.05)
    assert found.from_checkpoint
    assert from_checkpoint(Sampling(), {"do_sample": False, "temperature": 0.6}, PATH).temperature == 0.0
    assert from_checkpoint(Sampling(), {"sequence_bias": [[[5], 1.5]]}, PATH).logit_bias == {5: 1.5}
    for bad in ({"temperature": -1.0}, {"sequence_bias": [[[5, 6], 1.5]]}, {"top_k": "x"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            from_checkpoint(Sampling(), bad, PATH)


def test_the_file_is_read_from_the_folder_of_the_model(tmp_path):
    assert read_generation(tmp_path) == {}
    (tmp_path / PATH).write_text(json.dumps(QWEN3))
    assert read_generation(tmp_path) == QWEN3


OPENAI: dict[str, tuple[str, ...]] = {
    row.COMPLETIONS: (
        *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
        *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
    ),
    row.CHAT: (
        *("messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs"),
        *("max_completion_tokens", "max_tokens", "metadata", "modalities", "n", "parallel_tool_calls", "prediction"),
        *("presence_penalty", "prompt_cache_key", "reasoning_effort", "response_format", "safety_identifier", "seed"),
        *("service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools"),
        *("top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
    ),
}
"""The bodies of OpenAI's API."""
VLLM = (
    *("use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "priority"),
    *(
        "truncate_prompt_tokens",
        "allowed_token_ids",
        "prompt_logprobs",
        "bad_words",
        "add_special_tokens",
        "request_id",
    ),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "logits_processors"),
    *("return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs", "documents"),
    *(
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "continue_final_message",
        "add_generation_prompt",
    ),
)
"""What vLLM's API knows beside."""


@pytest.mark.parametrize("endpoint", OPENAI)
def test_every_key_of_a_request_is_honoured_without_effect_or_refused_by_name(endpoint):
    strange = {"strange": "value"}
    for key in (*OPENAI[endpoint], *VLLM):
        problems = list(row.problems_of({key: strange}, {}, endpoint))
        if key in row.HONOURED or key in row.WITHOUT_EFFECT:
            assert not problems or problems == [f"{key}: does not belong to {endpoint}; allowed: null, or leave it out"]
        else:
            assert len(problems) == 1 and problems[0].startswith(f"{key}: "), key
    assert not row.HONOURED & row.WITHOUT_EFFECT
