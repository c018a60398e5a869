"""OpenAI batch requests and rows with columns of settings, through whole jobs: each row as in a job that has its settings."""

import json
import shutil

import numpy as np
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.jobs.run.validate import validate
from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import TOKENIZER, job_spec, results_of, run_here, save_model
from tests.runs.jobs_here import run, without_ray

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SAME = ("text", "tokens", "finish", "logprob", "key", "prompt_tokens", "token_logprobs")
DECODERS: dict[str, dict] = {
    "autoregressive": {"kind": "autoregressive"},
    "speculative": {"kind": "speculative", "k": 4, "drafter": {"kind": "ngram", "max_n": 2}},
    "jacobi": {"kind": "jacobi", "block_size": 4},
    "multiblock_jacobi": {"kind": "multiblock_jacobi", "block_size": 4},
}
PROMPTS = ["def f(x):", "x = 1\n", "import os\n", "for i in range(", "class A:"]
OWN: list[dict] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_p": 0.8, "max_tokens": 5},
    {"temperature": 0.7, "seed": 11},
    {"stop": [" ", "e"], "max_completion_tokens": 12},
    {"stop": "\n", "temperature": 0.9},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5, "bad_words": ["e", "self."]},
    {"top_k": 3, "min_p": 0.1, "logit_bias": {"50": 4.0, "51": -100}, "min_tokens": 4},
]
SAMPLED = {
    **{
        key: key
        for key in ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "top_k", "min_p")
    },
    **{"logit_bias": "logit_bias", "min_tokens": "min_new_tokens", "top_p": "top_p"},
}
"""Keys of a body, and those of `sampling`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made = tmp_path_factory.mktemp("requests")
    save_model(made / "model", ends=[2])
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (made / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return made


def requests_of(own: list[dict]) -> list[dict]:
    """Every prompt with every settings, in turn as a prompt and as a conversation."""
    made = []
    for number, (settings, prompt) in enumerate((settings, prompt) for settings in own for prompt in PROMPTS):
        chat = number % 2 == 1
        said: dict = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = {"model": "m", "logprobs": True if chat else 0} | said | settings
        made.append({"custom_id": f"r{number}", "method": "POST", "url": CHAT if chat else COMPLETIONS, "body": body})
    return made


def spec_of(folder, rows: list[dict], name: str, **sections) -> JobSpec:
    place = folder / name
    place.mkdir()
    (place / "model").symlink_to(folder / "model")
    sections = {"sampling": {"temperature": 0.8}} | sections
    return job_spec(place, rows, **sections)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.slow
def test_each_request_is_answered_as_by_a_job_with_its_settings(folder, decoder):
    requests = requests_of(OWN)
    found = run_here(spec_of(folder, requests, f"mixed-{decoder}", decoder=DECODERS[decoder]))
    assert all(row["status"] == "ok" for row in found.values())
    for number, settings in enumerate(OWN):
        mine = requests[number * len(PROMPTS) : (number + 1) * len(PROMPTS)]
        bare = [one | {"body": {key: one["body"][key] for key in one["body"] if key not in settings}} for one in mine]
        task = {
            "kind": "complete",
            "max_new_tokens": settings.get("max_tokens") or settings.get("max_completion_tokens", 16),
        }
        spec = spec_of(
            folder,
            bare,
            f"{decoder}-{number}",
            task=task | {"stop": settings.get("stop", [])},
            sampling={"temperature": settings.get("temperature", 0.8)}
            | {SAMPLED[key]: value for key, value in settings.items() if key in SAMPLED},
            **({"seed": settings["seed"]} if "seed" in settings else {}),
        )
        for name, row in run_here(spec).items():
            # Candidates of several blocks are read through other columns, which moves the last bits.
            exact = SAME if decoder != "multiblock_jacobi" else ("text", "tokens", "finish", "key", "prompt_tokens")
            assert {key: found[name][key] for key in exact} == {key: row[key] for key in exact}
            assert found[name]["logprob"] == pytest.approx(row["logprob"], abs=1e-4)
            assert len(row["token_logprobs"]) == row["new_tokens"]
            assert row["logprob"] == pytest.approx(sum(row["token_logprobs"]), abs=1e-4)
    assert {row["finish"] for row in found.values()} >= {"stop", "length"}


def test_a_batch_of_both_endpoints_is_exported_in_the_form_of_each(folder, monkeypatch):
    without_ray(monkeypatch)
    bad: list[dict] = [
        {"custom_id": "many", "url": COMPLETIONS, "body": {"prompt": "x", "n": 3}},
        {"custom_id": "tools", "url": CHAT, "body": {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}},
        {"custom_id": "no body", "url": COMPLETIONS, "method": "POST"},
    ]
    silent = {"custom_id": "silent", "url": COMPLETIONS, "body": {"prompt": "x = ", "max_tokens": 3}}
    best = requests_of([{"max_tokens": 6}])
    best[1]["body"]["top_logprobs"], best[2]["body"]["logprobs"] = 5, 5
    place = folder / "both"
    spec = spec_of(folder, [*best, silent, *bad], "both").model_dump(mode="json")
    assert run(spec | {"errors": {"max_rate": 1.0}}, place / "job.yaml") == 0
    out = place / "answers.jsonl"
    assert main(["export", str(place / "run"), "--format", "openai", "--out", str(out)]) == 0
    answers = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    errors = [json.loads(line) for line in (place / "answers.errors.jsonl").read_text().splitlines()]
    assert {one["custom_id"]: one["error"]["code"] for one in errors} == {
        "many": "unsupported",
        "tools": "unsupported",
        "no body": "bad_request",
    }
    assert len(answers) == len(PROMPTS) + 1
    for name, answer in answers.items():
        body = answer["response"]["body"]
        (choice,) = body["choices"]
        told, count = choice["logprobs"], body["usage"]["completion_tokens"]
        if name == "silent":
            assert told is None and count == 3 and choice["finish_reason"] == "length"
        elif int(name[1:]) % 2:
            assert body["object"] == "chat.completion" and choice["message"]["role"] == "assistant"
            assert len(told["content"]) == count <= 6
            for token in told["content"]:
                assert token["logprob"] < 0 and bytes(token["bytes"]).decode() == token["token"]
                scores = [one["logprob"] for one in token["top_logprobs"]]
                assert len(scores) == 5 * (name == "r1") and scores == sorted(scores, reverse=True)
                assert not scores or max(scores) >= token["logprob"] - 1e-6
            if choice["finish_reason"] == "length":
                assert "".join(token["token"] for token in told["content"]).startswith(choice["message"]["content"])
        else:
            assert body["object"] == "text_completion" and "message" not in choice
            assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == count
            joined = np.cumsum([0, *map(len, told["tokens"])])[:-1]
            assert told["text_offset"] == joined.tolist()
            assert [len(one) for one in told["top_logprobs"] or []] == [5] * count * (name == "r2")


def test_a_changed_column_of_settings_is_another_job(folder):
    made = spec_of(folder, [{"id": "a", "prompt": "x", "t": 0.5}], "fingerprint")
    with_column = made.input.model_copy(update={"columns": made.input.columns.model_copy(update={"temperature": "t"})})
    other = made.model_copy(update={"input": with_column})
    assert made.results_key() != other.results_key()
    shown = made.model_copy(update={"task": made.task.model_copy(update={"skip_special_tokens": False})})
    assert made.results_key() != shown.results_key()


def test_a_stop_string_that_text_can_never_hold_is_refused_before_anything_is_written(folder):
    from draftmill.jobs.plan.resolve import resolve
    from draftmill.storage.errors import UserError
    from draftmill.storage.stores.store import open_store

    task = {"kind": "complete", "stop": ["<sep>"]}
    spec = spec_of(folder, [{"id": "a", "prompt": "x"}], "unseen", task=task)
    with pytest.raises(UserError, match=r"task\.stop: '<sep>' contains the special token"):
        resolve(spec, open_store(spec.output.path))
    shown = check_spec(spec.model_dump(mode="json") | {"task": task | {"skip_special_tokens": False}})
    assert resolve(shown, open_store(shown.output.path)).plan is None


def test_what_a_checkpoint_recommends_is_shown_and_used_only_if_the_spec_says_so(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    recommended = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "eos_token_id": 2}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended))
    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(PROMPTS)]

    def job(out: str, sampling: dict) -> JobSpec:
        spec = job_spec(tmp_path, rows, sampling=sampling)
        return spec.model_copy(update={"output": spec.output.model_copy(update={"path": str(tmp_path / out)})})

    asked = {"from_checkpoint": True, "temperature": 0.9}
    same, texts = {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.3}, []
    for spec in (job("used", asked), job("said", same), job("plain", {"temperature": 0.9})):
        assert run_job(spec, RunOptions(local=True)) == OK
        texts.append({name: row["text"] for name, row in results_of(spec).items()})
    assert texts[0] == texts[1] != texts[2]
    assert validate(job("used", asked)) == 0, "the same job again"
    assert "top_k 5, repetition_penalty 1.3 (where the spec leaves them out)" in capsys.readouterr().out
    assert validate(job("plain", {"temperature": 0.9})) == 0
    assert "(not used: sampling.from_checkpoint is false)" in capsys.readouterr().out
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended | {"top_k": 6}))
    with pytest.raises(UserError, match=r"sampling\.top_k was 5, is 6"):
        validate(job("used", asked))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended | {"num_beams": 4}))
    with pytest.raises(UserError, match="num_beams = '4', which is not supported"):
        validate(job("other", asked))
