"""`draftmill eval`: the answers of a slow plain model, resumed without decoding twice, and what is refused before any work."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.eval.options import EvalOptions
from draftmill.storage.stores.store import Place, S3Options, open_store
from tests.conftest import ROOT
from tests.jobs.eval.tasks_of_tests import (
    DOCUMENTS,
    GENERATES,
    TASKS,
    results_of,
    samples_of,
    write_eval_spec,
    write_tasks,
)
from tests.runs.jobs_of_tests import contents, logged

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory):
    """No hub, and a cache of our own for data sets."""
    import datasets
    import huggingface_hub.constants as hub

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("TQDM_DISABLE", "1")
        patch.setattr(hub, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        # lm_eval describes the machine with other programs, which takes seconds.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
        yield


@dataclass(frozen=True)
class World:
    """An evaluation of every kind of task, and the plain model's answers to the same."""

    folder: Path
    tasks: Path
    expected: dict


def evaluated(folder: Path, tasks: Path, names: list[str], *options: str) -> int:
    command = ["eval", str(folder / "job.yaml"), "--tasks", *names, "--include_path", str(tasks), "--local", "--quiet"]
    return main([*command, *options])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from tests.jobs.eval.plain_model import Plain

    folder = tmp_path_factory.mktemp("eval")
    tasks = write_tasks(folder / "tasks")
    write_eval_spec(folder, decoder={"kind": "speculative"})
    assert evaluated(folder, tasks, list(TASKS)) == 0
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    plain = Plain(seed=7)
    expected = lm_eval.simple_evaluate(
        model=plain, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, torch_random_seed=None
    )
    return World(folder, tasks, expected)


def values(results: dict) -> dict[str, float]:
    return {
        f"{task}.{name}": value
        for task, found in results["results"].items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_answers_and_metrics_are_those_of_a_plain_model(world):
    assert values(results_of(world.folder)) == pytest.approx(values(world.expected), abs=1e-4)
    scored = [
        answer
        for task in ("choose", "bare")
        for sample in world.expected["samples"][task]
        for answer in sample["resps"]
    ]
    assert {greedy for of in scored for _, greedy in of} == {True, False}
    for task in TASKS:
        ours, theirs = samples_of(world.folder, task), world.expected["samples"][task]
        assert len(ours) == len(theirs) == DOCUMENTS
        for found, expected in zip(ours, theirs, strict=True):
            assert found["doc_hash"] == expected["doc_hash"] and found["prompt_hash"] == expected["prompt_hash"]
            for answers, expected_answers in zip(found["resps"], expected["resps"], strict=True):
                check_answers(task, answers, expected_answers)


def test_an_evaluation_with_the_fastest_decoder_has_the_baselines_answers(world, tmp_path, capsys):
    write_eval_spec(tmp_path, decoder="fastest")
    assert "names its baseline" in refused(world, tmp_path, capsys, ["gen"])
    write_eval_spec(tmp_path, decoder={"kind": "fastest", "like": "autoregressive"})
    assert evaluated(tmp_path, world.tasks, ["gen", "choose"]) == 0
    for task in ("gen", "choose"):
        assert [one["resps"] for one in samples_of(tmp_path, task)] == [
            one["resps"] for one in samples_of(world.folder, task)
        ]


def check_answers(task: str, found: list, expected: list) -> None:
    """The answers to one request, a list of repeats; lm_eval writes scores as texts."""
    if TASKS[task]["output_type"] == "generate_until":
        assert found == expected
    elif task == "roll":
        assert [float(one) for one in found] == pytest.approx(expected, abs=1e-3)
    else:
        for (logprob, greedy), (expected_logprob, expected_greedy) in zip(found, expected, strict=True):
            assert float(logprob) == pytest.approx(expected_logprob, abs=1e-3)
            assert greedy == str(expected_greedy)


def test_repeats_draw_with_noise_of_their_own_and_equal_greedy_requests_are_decoded_once(world):
    repeated = [sample["resps"][0] for sample in samples_of(world.folder, "repeated")]
    assert all(len(answers) == 3 for answers in repeated)
    assert sum(len(set(answers)) > 1 for answers in repeated) >= DOCUMENTS // 2
    for number, sample in enumerate(samples_of(world.folder, "repeated")):
        assert [one["id"] for one in sample["draftmill"][0]] == [f"repeated:{number}:0:{k}" for k in range(3)]
    sums = results_of(world.folder)["draftmill"]
    assert (sums["repeated"]["rows"], sums["repeated"]["answers"]) == (3 * DOCUMENTS, 3 * DOCUMENTS)
    # Without a context, the choices that all documents share are one row each.
    assert (sums["bare"]["rows"], sums["bare"]["answers"]) == (3 + DOCUMENTS, 4 * DOCUMENTS)


def test_samples_say_what_each_answer_took_and_where_its_row_is(world):
    for task in TASKS:
        for sample in samples_of(world.folder, task):
            assert [len(of) for of in sample["draftmill"]] == [len(of) for of in sample["resps"]]
            for one in (one for of in sample["draftmill"] for one in of):
                store = open_store(one["run_dir"])
                assert store.exists("_SUCCESS") and one["status"] == "ok"
                assert one["nfe"] >= 1 and one["device_s"] > 0 and one["total_s"] > 0
    windows = [sample["draftmill"][0][0] for sample in samples_of(world.folder, "roll")]
    for one in windows:  # 512 tokens each, of which the first is the begin token, or context
        assert one["windows"] == one["nfe"] == -(-one["new_tokens"] // 511)
    assert windows[0]["windows"] > 1
    sums = results_of(world.folder)["draftmill"]["gen"]
    assert sums["failed"] == 0 and sums["nfe"] < sums["new_tokens"] and 0 < sums["accepted"] <= sums["proposed"]


def test_one_job_for_each_kind_of_request_and_setting(world):
    runs = sorted(path.name.split("-")[0] for path in (world.folder / "eval" / "runs").iterdir())
    assert runs == ["complete", "complete", "score", "score"]  # greedy and sampled; continuations and rolling texts


def test_a_finished_evaluation_decodes_nothing_again(world, capsys):
    before = written(world.folder)
    assert evaluated(world.folder, world.tasks, list(TASKS)) == 0
    out, err = capsys.readouterr()
    assert written(world.folder) == before and err.count("is already finished") == 4
    assert "|choose" in out and "answers from" in out


def written(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of the runs, with its content and time."""
    return contents(folder / "eval" / "runs")


def units(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {name: facts for name, facts in written(folder).items() if "/data/" in name}


@pytest.mark.parametrize("failpoint", ["commit.after_data=kill:2", "local.before_link=kill:14"])
def test_a_killed_evaluation_goes_on_and_decodes_nothing_twice(world, tmp_path, failpoint):
    path = write_eval_spec(tmp_path, decoder={"kind": "speculative"}, batching={"max_rows": 2})
    command = [sys.executable, "-m", "draftmill.jobs.cli", "eval", str(path), "--tasks", *TASKS]
    command += ["--include_path", str(world.tasks), "--local", "--quiet"]
    environment = os.environ | {"DRAFTMILL_FAILPOINTS": failpoint, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == -9, process.stderr[-2000:]
    before = units(tmp_path)
    assert before and not (tmp_path / "eval" / "builtin__ar-tiny").exists()
    assert evaluated(tmp_path, world.tasks, list(TASKS)) == 0
    after = units(tmp_path)
    assert {name: after[name] for name in before} == before and len(after) > len(before)
    for run in (tmp_path / "eval" / "runs").iterdir():
        done = [event["unit"] for event in logged(run, "done")]
        assert len(set(done)) == len(done) > 0, f"{run.name} committed a unit twice"
    assert values(results_of(tmp_path)) == pytest.approx(values(world.expected), abs=1e-4)


def test_other_settings_decode_into_directories_of_their_own(world, capsys):
    before = written(world.folder)
    assert evaluated(world.folder, world.tasks, ["gen"], "--gen_kwargs", "max_gen_toks=4", "--limit", "2") == 0
    after = written(world.folder)
    assert {name: after[name] for name in before} == before
    assert len({name.split("/")[0] for name in after}) == 5
    assert [len(sample["draftmill"]) for sample in samples_of(world.folder, "gen")] == [1, 1]
    assert all(sample["draftmill"][0][0]["new_tokens"] <= 4 for sample in samples_of(world.folder, "gen"))
    capsys.readouterr()


def test_a_jobs_run_directory_is_refused(world, tmp_path, capsys):
    run = next((world.folder / "eval" / "runs").glob("complete-*"))
    write_eval_spec(tmp_path, output={"path": str(run)})
    assert evaluated(tmp_path, world.tasks, ["gen"], "--limit", "1") == 2
    assert "output.path: " in capsys.readouterr().err and not (run / "requests").exists()


def test_chosen_documents_keep_their_ids(world, tmp_path):
    write_eval_spec(tmp_path)
    assert evaluated(tmp_path, world.tasks, ["gen"], "--samples", '{"gen": [4, 1]}') == 0
    whole = samples_of(world.folder, "gen")
    found = {sample["doc_id"]: sample["draftmill"][0][0]["id"] for sample in samples_of(tmp_path, "gen")}
    assert found == {4: "gen:4:0:0", 1: "gen:1:0:0"}
    assert len(whole) >= 2


MASKED = {"kind": "stepwise", "block_length": 4}


def test_answers_match_a_constraint_and_are_not_cut_by_until(world, tmp_path):
    """The task ends texts at a line end, which the constraint asks for in the middle."""
    task = {"kind": "complete", "constraint": {"regex": r"a\n[0-9]{3}\nb"}}
    write_eval_spec(tmp_path, task=task)
    assert evaluated(tmp_path, world.tasks, ["gen"], "--limit", "3") == 0
    for sample in samples_of(tmp_path, "gen"):
        assert re.fullmatch(r"a\n[0-9]{3}\nb", sample["resps"][0][0])


def test_a_chat_has_the_examples_as_turns_and_may_begin_the_answer(world, tmp_path):
    """The prompts are those that transformers makes with the checkpoint's own template."""
    import shutil

    from transformers import PreTrainedTokenizerFast

    from draftmill.actors.checkpoints.models import fetch_model

    model = tmp_path / "model"
    shutil.copytree(fetch_model("builtin:ar-tiny"), model)
    template = "{{ bos_token }}{% for m in messages %}<cls>{{ m.role }}\n{{ m.content }}<sep>{% endfor %}"
    template += "{% if add_generation_prompt %}<cls>assistant\n{% endif %}"
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    tasks = write_tasks(
        tmp_path / "tasks",
        {"asked": GENERATES | shots, "begun": GENERATES | shots | {"gen_prefix": "return width"}},
    )
    write_eval_spec(tmp_path, model={"path": str(model), "device": "cpu"})
    options = ["--apply_chat_template", "--num_fewshot", "1", "--system_instruction", "Go on.", "--limit", "2"]
    assert evaluated(tmp_path, tasks, ["asked", "begun"], *options) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    for name in ("asked", "begun"):
        for sample in samples_of(tmp_path, name):
            prompt = sample["arguments"]["gen_args_0"]["arg_0"]
            assert prompt.startswith("<s><cls>system\nGo on.<sep><cls>user\n")
            assert prompt.count("<cls>user") == prompt.count("<cls>assistant") == 2
            assert prompt.endswith("<cls>assistant\n" if name == "asked" else "<cls>assistant\nreturn width")
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert sample["draftmill"][0][0]["prompt_tokens"] == len(ids)


@pytest.mark.s3
def test_requests_runs_and_results_may_be_on_s3(world, s3_server, tmp_path):
    url = f"s3://{s3_server.new_bucket()}/eval"
    options = S3Options(endpoint=s3_server.endpoint, region="us-east-1")
    server = {"endpoint": s3_server.endpoint, "region": "us-east-1"}
    write_eval_spec(tmp_path, output={"path": url}, s3=server)
    assert evaluated(tmp_path, world.tasks, ["gen"], "--limit", "2") == 0
    names = [stat.name for stat in open_store(Place(url, options)).list()]
    kinds = {name.split("/")[0] for name in names}
    assert kinds == {"requests", "runs", "builtin__ar-tiny"} and any("/samples_gen_" in name for name in names)


FAMILIES: dict[str, dict] = {
    "mdm-tiny": {"kind": "ssd", "draft_length": 2},
    "block-tiny": {"kind": "s2d2"},
    "asarm-tiny": {"kind": "assd"},
}


@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_scores_continuations_and_texts(world, tmp_path, model):
    """The same log-probabilities as an ordinary job that scores the texts as prompt and completion, under the same ids."""
    from tests.runs.causal_jobs import job_spec, run_here

    checkpoint = {"path": f"builtin:{model}", "device": "cpu"}
    task = {"kind": "score"} | ({} if model == "asarm-tiny" else {"estimate": {"samples": 8}})
    write_eval_spec(tmp_path, model=checkpoint, decoder=FAMILIES[model], task=task)
    assert evaluated(tmp_path, world.tasks, ["choose", "roll"], "--samples", '{"choose": [1, 3], "roll": [1, 2]}') == 0
    rows, found = [], {}
    for sample in [*samples_of(tmp_path, "choose"), *samples_of(tmp_path, "roll")]:
        for arguments, answers, of in zip(
            sample["arguments"].values(), sample["resps"], sample["draftmill"], strict=True
        ):
            name, scores = of[0]["id"], answers[0]
            found[name] = float(scores) if isinstance(scores, str) else float(scores[0])
            context, text = (
                (arguments["arg_0"], arguments.get("arg_1")) if len(arguments) == 2 else ("", arguments["arg_0"])
            )
            bare = context.rstrip()
            rows.append({"id": name, "prompt": bare, "completion": context[len(bare) :] + text})
            assert ("logprob_stderr" in of[0]) == (model != "asarm-tiny" and of[0]["new_tokens"] > 1)
    kind = {"mdm-tiny": "stepwise", "block-tiny": "block_diffusion", "asarm-tiny": "any_subset"}[model]
    spec = job_spec(tmp_path, rows, task=task, model=checkpoint, decoder={"kind": kind}, seed=7)
    expected = {name: row["logprob"] for name, row in run_here(spec).items()}
    assert len(found) == 10 and found == pytest.approx(expected, abs=1e-4)


def refused(world: World, folder: Path, capsys: pytest.CaptureFixture[str], names: list[str], *options: str) -> str:
    """The message of a refused evaluation, which wrote nothing."""
    assert evaluated(folder, world.tasks, names, *options) == 2
    assert not (folder / "eval").exists()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_an_unknown_task_is_refused_with_the_nearest_names(world, tmp_path, capsys, monkeypatch):
    from draftmill.jobs.eval import model

    managers = model._managers  # the whole index takes a minute
    monkeypatch.setattr(model, "_managers", lambda *given: islice(managers(*given), 1))
    write_eval_spec(tmp_path)
    said = refused(world, tmp_path, capsys, ["repeatd"])
    assert "--tasks: 'repeatd' is no task of lm-evaluation-harness; nearest: repeated" in said


def test_a_data_set_of_the_hub_without_a_network_is_one_line(world, tmp_path, capsys):
    write_eval_spec(tmp_path)
    task = {"task": "far", "dataset_path": "somebody/no_such_data", "test_split": "test"} | GENERATES
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(task))
    said = refused(world, tmp_path, capsys, [str(tmp_path / "far.yaml")])
    assert "data set or metric is on the Hugging Face hub, which can't be reached" in said and said.count("\n") == 1
    assert "somebody/no_such_data" in said


def test_requests_that_a_model_or_a_decoder_can_not_do_are_refused_by_name(world, tmp_path, capsys):
    write_eval_spec(tmp_path, model={"path": "builtin:asarm-tiny", "device": "cpu"}, decoder={"kind": "any_subset"})
    said = refused(world, tmp_path, capsys, ["gen"])
    assert "--tasks: gen (generate_until): models of family 'xlnet' do not support 'complete'" in said
    write_eval_spec(tmp_path)
    for option, reason in {
        "beam=2": "gen: generation_kwargs.beam: 2 is not supported; allowed: max_gen_toks",
        "num_beams=4": "gen: generation_kwargs.num_beams: 4 is not supported; allowed: 1",
        "max_gen_toks=512": "gen: generation_kwargs.max_gen_toks: 512 leaves no room for a prompt; the model's length is 512",
    }.items():
        assert reason in refused(world, tmp_path, capsys, ["choose", "gen"], "--gen_kwargs", option)
    assert "the tokenizer has no chat template" in refused(world, tmp_path, capsys, ["gen"], "--apply_chat_template")


def test_without_the_extra_the_message_names_it(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftmill.jobs.eval.options.find_spec", lambda name: None)
    write_eval_spec(tmp_path)
    assert "pip install 'draftmill[lm-eval]'" in refused(world, tmp_path, capsys, ["gen"])


def test_rows_that_fail_are_empty_answers_only_if_the_spec_allows_failures(world, tmp_path, capsys):
    """A prompt with the mask itself: masked models can't take it."""
    from draftmill.actors.checkpoints.models import fetch_model
    from draftmill.actors.rows.text import load_tokenizer
    from draftmill.decoders.backbones.checkpoint import inspect_model

    folder = fetch_model("builtin:mdm-tiny")
    tokenizer, mask = load_tokenizer(folder), inspect_model(folder).mask_id
    assert tokenizer is not None and mask is not None
    task = GENERATES | {"doc_to_text": f"{{{{q}}}}{{{{ '{tokenizer.decode([mask])}' if a == '0' else '' }}}}"}
    tasks = write_tasks(tmp_path / "tasks", {"masked": task})
    sections: dict = {"model": {"path": "builtin:mdm-tiny", "device": "cpu"}, "decoder": MASKED}
    write_eval_spec(tmp_path, **sections)
    assert evaluated(tmp_path, tasks, ["masked"]) == 3
    assert "1 of 6 samples failed" in capsys.readouterr().err and not list((tmp_path / "eval").glob("*/results_*"))
    write_eval_spec(tmp_path, **sections, errors={"max_rate": 0.5})
    assert evaluated(tmp_path, tasks, ["masked"]) == 0
    out, err = capsys.readouterr()
    assert "1 answers failed and count as empty" in out and "failed: masked:0:0:0: id 6 is the model's mask" in err
    assert samples_of(tmp_path, "masked")[0]["resps"] == [[""]]


def test_nothing_imports_torch_before_the_first_job(tmp_path):
    path = write_eval_spec(tmp_path)
    code = "import sys; from draftmill.jobs.cli import main; main(sys.argv[1:]); "
    code += "sys.exit({'lm_eval', 'torch'} & {*sys.modules} != {'lm_eval'})"
    command = [sys.executable, "-c", code, "eval", str(path), "--tasks", str(tmp_path / "missing.yaml"), "--local"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "missing.yaml' is no file" in done.stderr, done.stderr[-2000:]


def test_options_in_code_are_those_of_the_command_line():
    assert EvalOptions(("a",)).multiturn is False and EvalOptions(("a",), apply_chat_template=True).multiturn is True
