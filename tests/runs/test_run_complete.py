"""Whole jobs of completions on a tiny random model: greedy ones equal transformers' own, and every decoder's the same text."""

import dataclasses
import json

import pytest
import torch
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.drive.log import shown
from draftmill.jobs.results.runs import status
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.jobs.run.validate import validate
from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import (
    LONGEST,
    ROOM,
    TOKENIZER,
    World,
    job_spec,
    make_world,
    results_of,
    run_here,
    save_model,
)
from tests.runs.local_pool import without_ray

PROMPTS = {
    "one": "def f(x):\n    return x\n",
    "two": "import os\n\n\nclass Path:\n",
    "three": "# a comment, and no more",
    "letter": "x",
    "empty": "",
    "tight": "for value in values:\n    total = total + value\n" * 3 + "print(total)\n",
    "long": "the quick brown fox jumps over the lazy dog, " * 20,
}
ROWS: list[dict] = [{"id": name, "prompt": text} for name, text in PROMPTS.items()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its second end token is one that the model says in the middle of its first completion."""
    world = make_world(tmp_path_factory.mktemp("causal"))
    free = world.expected(PROMPTS["one"], ends=[])
    end = next(token for n, token in enumerate(free) if n >= 3 and token not in free[:n])
    (world.folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    return dataclasses.replace(world, ends=[2, end])


@pytest.fixture(scope="module")
def completed(world: World, ray_session) -> dict[str, dict]:
    """Results of a run by the command line, with Ray."""
    spec = job_spec(world.folder, ROWS)
    (world.folder / "job.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert main(["run", str(world.folder / "job.yaml"), "--quiet"]) == 3, "one row is too long"
    return results_of(spec)


@pytest.mark.ray
@pytest.mark.slow
def test_greedy_completions_are_those_of_transformers(world, completed):
    assert sorted(completed) == sorted(PROMPTS)
    for name, row in completed.items():
        if name == "long":
            continue
        expected = world.expected(PROMPTS[name])
        assert row["tokens"] == expected and row["new_tokens"] == len(expected) == row["nfe"], name
        assert row["prompt_tokens"] == len(world.ids(PROMPTS[name]))
        ended = expected[-1] in world.ends
        assert row["finish"] == ("eos" if ended else "length")
        assert row["text"] == world.tokenizer.decode(expected[:-1] if ended else expected)
        assert row["fills"] is None and row["token_logprobs"] is None and row["logprob"] < 0
    assert completed["one"]["finish"] == "eos" and {row["finish"] for row in completed.values()} >= {"eos", "length"}


@pytest.mark.ray
@pytest.mark.slow
def test_a_prompt_with_little_room_ends_with_the_model_and_one_without_any_fails(completed):
    tight, long = completed["tight"], completed["long"]
    assert LONGEST - ROOM < tight["prompt_tokens"] < LONGEST, "the row is to be cut short"
    assert tight["new_tokens"] <= LONGEST - tight["prompt_tokens"]
    assert (long["status"], long["error_kind"], long["text"]) == ("failed", "too_long", None)


@pytest.mark.slow
@pytest.mark.ray
def test_a_finished_run_is_verified_and_decoded_again(world, completed, capsys):
    assert main(["verify", str(world.folder / "run"), "--invariance", "7"]) == 0
    assert "decoded 6 samples again, each alone: 6 equal (100.0%)" in capsys.readouterr().out
    assert main(["verify", str(world.folder / "run"), "--invariance", "5"]) == 0
    assert "decoded 5 samples again" in capsys.readouterr().out, "samples that are ok, however many failed"
    assert main(["run", str(world.folder / "job.yaml"), "--quiet"]) == 3
    out = capsys.readouterr().out
    assert "is already finished" in out and "6 ok, 1 failed" in out and "NFE per token" in out


def test_a_prompt_that_is_too_long_is_cut_and_the_row_says_how_much(world, tmp_path):
    text = "x = 1\n" * LONGEST
    source = {"path": str(tmp_path / "rows.jsonl"), "truncate": "left"}
    job = world.spec(tmp_path, [{"id": "long", "prompt": text}, ROWS[0]], input=source)
    rows = run_here(job)
    ids = world.tokenizer.encode(text)
    kept = ids[-(LONGEST - ROOM) :]
    expected = world.model.generate(
        torch.tensor([kept]), do_sample=False, max_new_tokens=ROOM, eos_token_id=world.ends, pad_token_id=5
    )[0, len(kept) :].tolist()
    assert rows["long"]["tokens"] == expected and rows["long"]["prompt_tokens"] == LONGEST - ROOM
    assert rows["long"]["truncated_tokens"] == len(ids) - len(kept) and rows["one"]["truncated_tokens"] == 0


def test_end_tokens_are_tokens_like_others_where_they_are_ignored(world, tmp_path):
    task = {"kind": "complete", "max_new_tokens": ROOM, "ignore_eos": True}
    rows = run_here(world.spec(tmp_path, ROWS[:1], task=task))
    assert rows["one"]["tokens"] == world.expected(PROMPTS["one"], ends=[]) and rows["one"]["finish"] == "length"


def test_a_stop_string_ends_a_completion_where_the_text_holds_it(world, tmp_path):
    free = world.expected(PROMPTS["two"], ends=[])
    text = world.tokenizer.decode(free)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    task = {"kind": "complete", "max_new_tokens": ROOM, "ignore_eos": True, "stop": [stop]}
    row = run_here(world.spec(tmp_path, ROWS[1:2], task=task))["two"]
    assert row["finish"] == "stop" and row["text"] == text[: text.index(stop)]
    assert row["tokens"] == free[: row["new_tokens"]] and stop in world.tokenizer.decode(row["tokens"])
    assert stop not in world.tokenizer.decode(row["tokens"][:-1]) and row["nfe"] == row["new_tokens"]


def other_vocabulary(folder) -> None:
    save_model(folder, ends=[2])
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in {300, 301}]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def no_weights(folder) -> None:
    save_model(folder, ends=[2])
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (other_vocabulary, "and of the model differ, for example in the token"),
        (lambda folder: folder.symlink_to(TOKENIZER), "is of family 'xlnet', which is not a causal model"),
        (no_weights, "lacks model.safetensors"),
    ],
)
def test_a_drafter_that_can_not_draft_is_refused_at_the_start(world, tmp_path, make, message):
    make(tmp_path / "small")
    drafter = {"kind": "model", "path": str(tmp_path / "small")}
    spec = world.spec(tmp_path, ROWS, decoder={"kind": "speculative", "drafter": drafter})
    with pytest.raises(UserError) as caught:
        run_here(spec)
    assert caught.value.field == "decoder.drafter.path" and message in str(caught.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").rglob("*"))


def test_a_drafter_with_the_same_tokens_under_another_template_is_taken(world, tmp_path):
    save_model(tmp_path / "small", ends=[2])
    settings = json.loads((tmp_path / "small" / "tokenizer_config.json").read_text())
    (tmp_path / "small" / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": "{{ bos_token }}"})
    )
    drafter = {"kind": "model", "path": str(tmp_path / "small")}
    spec = world.spec(tmp_path, ROWS[:1], decoder={"kind": "speculative", "drafter": drafter})
    assert run_here(spec)["one"]["status"] == "ok"


def test_rows_of_messages_without_a_chat_are_an_error_of_the_spec(world, tmp_path):
    rows = [{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "x"}]}}]
    with pytest.raises(UserError, match=r"input\.columns: no row has all columns: the row has messages"):
        run_here(world.spec(tmp_path, rows))
    with pytest.raises(UserError, match=r"task\.chat: the tokenizer has no chat template"):
        run_here(world.spec(tmp_path, rows, task={"kind": "complete", "chat": True}))


def test_a_dry_run_shows_the_prompt_and_the_room_behind_it(world, tmp_path, capsys):
    spec = world.spec(tmp_path, ROWS)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(check_spec(spec.model_dump(mode="json")).model_dump(mode="json")))
    assert main(["validate", str(tmp_path / "job.yaml")]) == 0
    said = capsys.readouterr().out
    count = len(world.ids(PROMPTS["one"]))
    for part in (
        "complete, decoder autoregressive",
        f"canvas    one: {count + ROOM} tokens, {count} of them the prompt, up to {ROOM} to generate",
        "  |     return x",
        f"  | [{ROOM}]",
        "to generate, at most",
        "1 of those read: too_long 1",
    ):
        assert part in said, f"{part!r} is not in\n{said}"
    assert not (tmp_path / "run").exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "exact"), [("float32", "true:"), ("bfloat16", "false:")])
def test_validate_the_run_and_status_say_whether_results_are_exact(world, tmp_path, capsys, dtype, exact):
    model = {"path": str(world.folder / "model"), "device": "cpu", "dtype": dtype}
    spec = world.spec(tmp_path, ROWS[:2], model=model)

    def said() -> set[str]:
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return {line[1] for line in lines if line[:1] == ["exact"]}

    assert validate(spec) == 0 and said() == {exact}
    with without_ray(), shown():
        assert run_job(spec, RunOptions()) == 0 and said() == {exact}
    assert status(spec.place(spec.output.path)) == 0 and said() == {exact}
