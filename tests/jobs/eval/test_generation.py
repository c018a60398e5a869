"""generation_kwargs become a job's settings, and what no decoder does is refused with the task's name."""

import pytest

from draftmill.decoders.common_settings import Sampling
from draftmill.jobs.eval.requests import Generation, generation_of
from draftmill.jobs.eval.spec import EvalSpec
from draftmill.storage.errors import UserError

PLAIN = Sampling(temperature=1.0, top_k=None, top_p=None)
CUT = Sampling(temperature=1.0, top_k=40, top_p=0.9)


def of(given: dict, *, sampling: Sampling = PLAIN, **own) -> Generation:
    return generation_of(given, "task", sampling=sampling, temperature=own.get("temperature"), most=own.get("most"))


def test_without_settings_a_task_is_greedy_for_256_tokens():
    assert of({}) == Generation(256, (), 0.0)
    assert of({}, most=64, temperature=0.7) == Generation(64, (), 0.0)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens_has_four_names(name):
    assert of({name: 32}, most=64).max_new_tokens == 32


def test_stop_strings_are_a_list_without_empty_ones():
    assert of({"until": "\n"}).stop == ("\n",)
    assert of({"until": ["b", "", "a", "b"]}).stop == ("b", "a")
    assert of({"until": None}).stop == ()


def test_do_sample_and_temperature_are_read_as_lm_eval_does():
    """normalize_gen_kwargs: no sampling means temperature 0; a temperature alone means sampling."""
    from lm_eval.models.utils import normalize_gen_kwargs

    for given in (
        {},
        {"do_sample": False, "temperature": 0.7},
        {"temperature": 0.3},
        {"do_sample": True, "temperature": 0.5},
    ):
        assert of(given).temperature == normalize_gen_kwargs(dict(given)).get("temperature", 0.0)
    assert of({"do_sample": True}).temperature == 1.0 and of({"do_sample": True}, temperature=0.4).temperature == 0.4


def test_the_specs_cuts_of_the_distribution_count_where_the_task_has_none():
    sampled = {"do_sample": True, "temperature": 0.8}
    assert of(sampled, sampling=CUT) == Generation(256, (), 0.8, 40, 0.9)
    assert of(sampled | {"top_p": 1.0, "top_k": 0}, sampling=CUT) == Generation(256, (), 0.8)
    assert of({}, sampling=CUT) == Generation(256, (), 0.0)  # without noise they change nothing


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_length": 100}, "max_length"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"max_gen_toks": "many"}, "max_gen_toks"),
        ({"temperature": -1}, "temperature"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"until": [3]}, "until"),
        ({"do_sample": True, "top_p": 1.5}, "top_p"),
        ({"do_sample": True, "top_k": 2.5}, "top_k"),
    ],
)
def test_what_no_decoder_does_is_refused_by_task_and_key(given, key):
    with pytest.raises(UserError, match=rf"task: generation_kwargs\.{key}: .* is not supported; allowed: "):
        of(given)


def test_settings_that_change_nothing_pass():
    assert of({"num_beams": 1, "use_cache": True, "min_p": None}) == of({})


def test_a_task_may_have_a_constraint_of_its_own():
    assert of({"guided_choice": ["yes", "no"]}).constraint == '{"choice":["yes","no"]}'
    assert of({"guided_regex": None}).constraint is None
    with pytest.raises(UserError, match=r"task: generation_kwargs: constraint: "):
        of({"guided_regex": "[0-9]+", "guided_choice": ["a"]})


def test_penalties_of_a_task_count_in_place_of_the_specs():
    given = of({"repetition_penalty": 1.0, "frequency_penalty": 0.5})
    assert given.others == (("repetition_penalty", 1.0), ("frequency_penalty", 0.5))
    spec = EvalSpec(
        {
            "name": "e",
            "model": {"path": "builtin:ar-tiny"},
            "decoder": {"kind": "autoregressive"},
            "sampling": {"repetition_penalty": 1.2, "presence_penalty": 0.1},
            "output": {"path": "runs/e"},
        },
        {},
    )
    sampling = spec.completing(given).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.1, 0.5)
