"""What may stand where a spec names a place, and what a broken spec's message may say of it."""

import copy
import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from draftmill.decoders.common_settings import PathMark
from draftmill.jobs.config.paths import path_problem
from draftmill.jobs.config.spec import JobSpec, check_spec, load_spec
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.jobs.specs import completion

SECRET = "hunter2-hunter2"
SPEC = completion(decoder={"kind": "speculative", "drafter": {"kind": "model", "path": "builtin:ar-micro"}})


def refusal(key: str, value: Any) -> str:
    data = copy.deepcopy(SPEC)
    if key == "input.run":
        del data["input"]["path"]
    if key == "prompt.examples.path":
        data["prompt"] = {"examples": {"k": 1}}
    if key == "decoder.head":
        data |= {"task": {"kind": "infill", "mask": {"kind": "random"}}, "decoder": {"kind": "assd"}}
    *sections, name = key.split(".")
    inside = data
    for section in sections:
        inside = inside.setdefault(section, {})
    inside[name] = value
    with pytest.raises(UserError) as caught:
        check_spec(data)
    return str(caught.value)


PLACES = [
    *("input.path", "input.run", "prompt.examples.path", "model.path", "model.adapter", "model.tokenizer"),
    *("decoder.head", "decoder.drafter.path", "output.path", "task.constraint.json_schema"),
]


def settings_below(kind: Any, *keys: str):
    """Every field of a settings class, with its dotted key, and of all settings in it."""
    for name, info in kind.model_fields.items():
        yield ".".join([*keys, name]), info
        waiting = [info.annotation]
        while waiting:
            inner = waiting.pop()
            waiting += get_args(inner)
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from settings_below(inner, *keys, name)


NO_PLACES = {"name", "input.columns.id"}
"""Keys whose descriptions speak of files and folders, though they name none that a job reads or writes by itself."""


def test_every_key_that_names_a_file_is_in_the_list_of_places():
    found = dict(settings_below(JobSpec))
    named = re.compile(r"\b(file|folder|path|bucket|hub id|finished run)\b|model\.path|s3://")
    texts = {key: info for key, info in found.items() if str in {info.annotation, *get_args(info.annotation)}}
    speaks = {key for key, info in texts.items() if named.search(info.description or "") or key.endswith("path")}
    marked = {key for key, info in found.items() if any(isinstance(mark, PathMark) for mark in info.metadata)}
    assert speaks - marked <= NO_PLACES
    assert marked >= {*PLACES, "metrics.path", "metrics.model"}


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (f"s3://key:{SECRET}@bucket/x", "no credentials in a URL"),
        (f"https://user:{SECRET}@host/x", "no credentials in a URL"),
        (f"https://host/x?X-Amz-Signature={SECRET}", "https:// is not allowed; allowed: a local path"),
        ("a\0b", "has control characters"),
        ("\x1b[2Jgone", "has control characters"),
        ("x" * 300, "is longer than a path can be"),
        ("x/" * 3000, "is longer than a path can be"),
    ],
    ids=["key", "password", "signature", "nul", "escape", "long name", "long path"],
)
def test_what_is_no_place_is_refused_without_repeating_secrets(key, value, message):
    said = refusal(key, value)
    assert said.startswith(f"{key}: ") and message in said
    assert SECRET not in said and said.isprintable() and len(said) < 300


@pytest.mark.parametrize(
    ("inputs", "output", "among"),
    [
        (".", "runs/a", True),
        ("data", "data/run", True),
        ("data/", "./data/../data/run", True),
        ("data/**", "data/run", True),
        ("data/**/*.parquet", "data/run", True),
        ("s3://b/data", "s3://b/data/run", True),
        ("s3://b/data/*/data/*", "s3://b/data/run", True),
        ("in [a]", "in [a]/run", True),
        ("x[2024-11].jsonl", "run", False),
        ("data", "data-run", False),
        ("data/rows.jsonl", "data/run", False),
        ("data/*.jsonl", "data/run", False),
        ("data/**/*.jsonl", "data/run", False),
        ("s3://b/data", "data/run", False),
        ("s3://b/data", "s3://c/data/run", False),
        ("builtin:python-stdlib", "run", False),
    ],
)
def test_results_do_not_lie_among_the_inputs(inputs, output, among):
    data = copy.deepcopy(SPEC) | {"input": {"path": inputs}, "output": {"path": output}}
    if among:
        with pytest.raises(UserError, match=r"output\.path: .* is inside the inputs"):
            check_spec(data)
    else:
        check_spec(data)


def test_places_are_what_they_were():
    for path in ("a b/ü.jsonl", "~/x", "../x", "s3://bucket/a@b/c?.jsonl", "builtin:x", "org/name", "x" * 255):
        assert path_problem(path, ("s3",)) is None, path


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@h", f"http://h/?key={SECRET}"])
def test_an_endpoint_carries_no_credentials(url):
    said = refusal("s3.endpoint", url)
    assert "no credentials in the spec" in said and SECRET not in said


@pytest.mark.parametrize(
    "text",
    [
        f"s3: {{secret_access_key: {SECRET}}}",
        f"s3: {{endpoint: [{SECRET}]}}",
        f"s3: {{region: {{{SECRET}: 1}}}}",
        f"s3: {SECRET}",
        f"s3:\n  key: {SECRET}\n  other: 'open",
        f"s3:\n  key: {SECRET}\n  key: 2",
    ],
)
def test_a_broken_spec_is_not_read_out(tmp_path, text):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path / "job.yaml")
    assert SECRET not in str(caught.value)


def test_a_home_is_a_home_in_an_output_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    open_store("~/run").put("a", b"1")
    assert (tmp_path / "home" / "run" / "a").read_bytes() == b"1" and not (tmp_path / "~").exists()
