"""lm-evaluation-harness's options on our command line, read as it reads them."""

import pytest

from draftmill.jobs.cli import main, parser
from draftmill.jobs.eval.options import HINT, EvalOptions, documents, parse_settings, seeds
from draftmill.storage.errors import UserError


def test_settings_are_read_as_lm_eval_reads_them():
    given = ['stop=["x, y"],n=3', "b=true,top_p=0.95", "name=gpt2"]
    assert parse_settings(given, "--x") == {"stop": ["x, y"], "n": 3, "b": True, "top_p": 0.95, "name": "gpt2"}
    assert parse_settings(['{"a": {"b": [1]}}'], "--x") == {"a": {"b": [1]}}


def test_settings_of_another_form_are_refused():
    for bad in (["temperature"], ["=3"], ["{a: 1"]):
        with pytest.raises(UserError, match="--gen_kwargs: "):
            parse_settings(bad, "--gen_kwargs")


def test_documents_come_as_json_or_in_a_file(tmp_path):
    assert documents(None) is None
    assert documents('{"a": [3, 0]}') == {"a": [3, 0]}
    (tmp_path / "chosen.json").write_text('{"b": [1]}')
    assert documents(str(tmp_path / "chosen.json")) == {"b": [1]}
    for bad in ('{"a": [-1]}', '{"a": [1, 1]}', '{"a": []}', '{"a": "x"}', "{", "no/such/file"):
        with pytest.raises(UserError, match="--samples: "):
            documents(bad)


def test_seeds_are_one_number_or_four():
    assert seeds("42") == (42, 42, 42, 42)
    assert seeds("0,None,8,52") == (0, None, 8, 52) and seeds("1,2,3") == (1, 2, 3, 1234)
    for bad in ("a", "1,2", "1,2,3,4,5", ""):
        with pytest.raises(UserError, match="--seed: "):
            seeds(bad)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit": 2.0, "samples": {"a": [0]}}, "--samples"),
        ({"fewshot_as_multiturn": True}, "--fewshot_as_multiturn"),
        ({"limit": 0.0}, "--limit"),
        ({"num_fewshot": -1}, "--num_fewshot"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, field):
    with pytest.raises(UserError, match=f"^{field}: "):
        EvalOptions(("a",), **options)


def test_an_unknown_option_is_refused_with_the_keys_of_the_spec(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "job.yaml", "--tasks", "a", "--batch_size", "8"])
    assert caught.value.code == 2
    assert f"unrecognized arguments: --batch_size 8{HINT}" in capsys.readouterr().err


def test_the_options_of_lm_eval_that_choose_what_is_asked_are_known_here():
    from lm_eval._cli.run import Run

    theirs = Run(__import__("argparse").ArgumentParser().add_subparsers())._parser
    known = {option for action in theirs._actions for option in action.option_strings if option.startswith("--")}
    ours = parser()._subparsers._group_actions[0].choices["eval"]  # type: ignore[union-attr, index]
    assert known - set(ours._option_string_actions) == {
        *("--model", "--model_args", "--batch_size", "--max_batch_size", "--device", "--output_path", "--use_cache"),
        *("--cache_requests", "--trust_remote_code", "--config", "--check_integrity", "--wandb_args", "--trackio_args"),
        *("--hf_hub_log_args", "--show_config", "--verbosity", "--wandb_config_args"),
    }


def test_a_template_has_no_name(capsys):
    assert main(["eval", "job.yaml", "--tasks", "a", "--apply_chat_template", "mine"]) == 2
    assert "--apply_chat_template: 'mine' is not allowed; allowed: true, false" in capsys.readouterr().err
