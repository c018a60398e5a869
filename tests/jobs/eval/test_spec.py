"""The spec of an evaluation, without rows and task, and lm-evaluation-harness's options, read as it reads them."""

from dataclasses import replace

import pytest
import yaml

from draftmill.actors.task import Complete, Score
from draftmill.jobs.cli import main, parser
from draftmill.jobs.eval.options import HINT, EvalOptions, documents, parse_settings, seeds
from draftmill.jobs.eval.requests import Generation
from draftmill.jobs.eval.spec import EvalSpec, JobRows, name_of, read_eval_spec
from draftmill.storage.errors import UserError

PLAIN: dict = {
    "model": {"path": "m"},
    "decoder": {"kind": "speculative", "k": 4},
    "sampling": {"top_p": 0.9, "acceptance": "rejection"},
    "workers": {"count": 3},
    "output": {"path": "runs/e"},
}


def read(folder, *overrides: str, **sections) -> EvalSpec:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(PLAIN | sections))
    return read_eval_spec(path, overrides)


def test_a_spec_makes_a_job_for_each_kind_of_request(tmp_path):
    spec = read(tmp_path, "seed=5")
    job = spec.completing(Generation(32, ("\n",), 0.5, None, 0.8))
    assert isinstance(job.task, Complete)
    assert (job.task.kind, job.task.max_new_tokens, job.task.stop) == ("complete", 32, ("\n",))
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.acceptance) == (0.5, 0.8, "rejection")
    assert (job.seed, job.decoder.kind, job.workers.count, job.input.truncate) == (5, "speculative", 3, "left")
    scoring = spec.scoring()
    assert (scoring.task.kind, scoring.decoder.kind) == ("score", "autoregressive")
    assert (scoring.input.columns.tokens, scoring.input.columns.reference) == ("tokens", "reference")


def test_a_task_section_may_hold_settings_that_all_tasks_share(tmp_path):
    spec = read(tmp_path, task={"kind": "complete", "max_new_tokens": 64, "ignore_eos": True})
    job = spec.completing(Generation(16, (), 0.0))
    assert isinstance(job.task, Complete)
    assert spec.max_new_tokens == 64 and job.task.ignore_eos and job.task.max_new_tokens == 16


def test_a_tasks_own_constraint_comes_before_the_specs(tmp_path):
    spec = read(tmp_path, task={"kind": "complete", "constraint": {"regex": "[a-z]+"}})
    for own, expected in ((None, "regex"), ('{"choice":["yes","no"]}', "choice")):
        job = spec.completing(Generation(16, (), 0.0, constraint=own))
        assert isinstance(job.task, Complete) and job.task.constraint is not None
        assert job.task.constraint.kind == expected


def test_scores_use_the_decoder_that_scores_and_what_its_scores_depend_on(tmp_path):
    estimate = {"kind": "score", "estimate": {"samples": 16}}
    spec = read(tmp_path, decoder={"kind": "ssd", "draft_length": 2}, sampling={}, task=estimate)
    scoring = spec.scoring()
    assert isinstance(scoring.task, Score) and scoring.task.estimate is not None and scoring.task.estimate.samples == 16
    assert (scoring.decoder.kind, scoring.input.truncate) == ("stepwise", "left")
    assert spec.completing(Generation(8, (), 0.0)).decoder.kind == "ssd"
    blocks = read(tmp_path, decoder={"kind": "s2d2", "block_size": 1}, sampling={}).scoring().decoder
    assert (blocks.kind, getattr(blocks, "block_size", None)) == ("block_diffusion", 1)
    filling = read(tmp_path, decoder={"kind": "parallel"}, sampling={}).scoring()
    assert filling.decoder.kind == "any_subset"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"prompt": {"system": "x"}}, "prompt: the tasks have prompts of their own"),
        ({"chat": {"template_kwargs": {"tools": []}}}, "chat.template_kwargs: 'tools' is not allowed"),
        ({"chat": {"template": "x"}}, "chat.template: unknown key"),
        ({"input": {"path": "a.jsonl"}}, "input: the tasks give the rows; remove the section"),
        ({"task": {"kind": "fill"}}, "task: evaluation has tasks of its own"),
        (
            {"task": {"kind": "infill", "mask": {"kind": "lines"}}},
            "task.mask.kind: 'lines'; the tasks say where holes are",
        ),
        ({"task": {"kind": "complete", "stop": ["a"]}}, "task.stop: the tasks decide this; remove the key"),
        ({"task": {"kind": "score", "chat": True}}, "task.chat: the tasks decide this; remove the key"),
        ({"task": {"kind": "complete", "max_new": 3}}, "task.max_new: unknown key"),
        (
            {"task": {"kind": "score", "estimate": {"samples": 8}}},
            "task.estimate: the decoder 'autoregressive' gives exact",
        ),
        ({"decoder": {"kind": "quick"}}, "decoder.kind: "),
        ({"decoder": None}, "decoder: "),
        ({"output": None}, "output: "),
        (
            {"output": {"path": "runs/{date:%Y-%m-%d}"}},
            "output.path: 'runs/{date:%Y-%m-%d}' has a date, which only `draftmill run` fills in",
        ),
        ({"sampling": {"n": 4}}, "sampling.n: a task's own `repeats` say how many samples it takes"),
    ],
)
def test_a_spec_that_can_not_be_used_is_refused_with_the_path(sections, message, tmp_path):
    with pytest.raises(UserError) as caught:
        read(tmp_path, **sections)
    assert str(caught.value).startswith(message), str(caught.value)


def test_an_override_of_the_decoders_kind_that_leaves_its_settings_is_explained(tmp_path):
    with pytest.raises(UserError, match=r"decoder\.k"):
        read(tmp_path, "decoder.kind=jacobi")


def test_arguments_of_the_chat_template_are_for_the_prompts_and_not_in_the_jobs(tmp_path):
    spec = read(tmp_path, chat={"template_kwargs": {"enable_thinking": False}})
    assert spec.chat.template_kwargs == {"enable_thinking": False}
    assert spec.any_job().chat.template_kwargs == {}


def test_a_jobs_name_depends_on_what_decides_its_results_alone(tmp_path):
    def name(spec: EvalSpec, lines: bytes = b"rows", **how) -> str:
        return name_of(spec.completing(replace(Generation(8, (), 0.0), **how)), lines)

    spec = read(tmp_path)
    assert name(spec) == name(read(tmp_path, "workers.count=1", "batching.max_rows=3", "model.device=cpu", "name=b"))
    others = [
        name(read(tmp_path, override))
        for override in ("seed=1", "decoder.k=3", "model.path=n", "model.dtype=bfloat16", "sampling.acceptance=coupled")
    ]
    others += [name(spec, b"other"), name(spec, stop=("a",)), name(spec, temperature=1.0)]
    assert len({name(spec), *others}) == 1 + len(others)


def test_equal_requests_share_a_row_only_where_their_answers_must_be_equal():
    rows = JobRows()
    assert rows.add("a:0:0:0", {"tokens": (1, 2)}, same=(1, 2)) == "a:0:0:0"
    assert rows.add("a:0:0:1", {"tokens": (1, 2)}, same=(1, 2)) == "a:0:0:0"
    assert rows.add("a:0:0:1", {"tokens": (1, 2)}) == "a:0:0:1"
    assert rows.add("a:0:0:1", {"tokens": (3,)}) == "a:0:0:1:2"  # a task that numbers two requests alike
    assert len(rows) == 3 and rows.lines().splitlines()[0] == b'{"id":"a:0:0:0","tokens":[1,2]}'


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((["--seed", bad], "--seed: ") for bad in ("a", "1,2", "1,2,3,4,5", "")),
        (["--limit", "2", "--samples", '{"a": [0]}'], "--samples: not allowed with argument --limit"),
        (["--limit", "0"], "--limit: '0' is not allowed; allowed: a number above 0"),
        (["--num_fewshot", "-1"], "--num_fewshot: '-1' is not allowed"),
        (["--apply_chat_template", "mine"], "--apply_chat_template: 'mine' is not allowed; allowed: true, false"),
    ],
)
def test_a_wrong_option_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "job.yaml", "--tasks", "a", *options])
    assert caught.value.code == 2 and f"argument {message}" in capsys.readouterr().err


def test_examples_as_turns_need_a_chat():
    with pytest.raises(UserError, match=r"^--fewshot_as_multiturn: "):
        EvalOptions(("a",), fewshot_as_multiturn=True)


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
