"""What a manifest can't be made from is refused before anything is written, in one line, with the option or the key to change."""

import os
import sys
from pathlib import Path

import pytest

from draftmill.jobs.exit_codes import UNUSABLE
from draftmill.jobs.remote.manifest import APPLIES, KINDS, Options
from draftmill.storage.errors import UserError
from tests.jobs.remote.made import printed, text_of, write_spec

CLUSTERS = ("rayjob", "raycluster", "cronjob")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("output.path", {"output": {"path": "runs/here"}}),
        ("output.path", {"output": {"path": "/tmp/here"}}),
        ("input.path", {"input": {"path": "rows/*.jsonl"}}),
        ("input.path.1", {"input": {"path": ["s3://b/a.jsonl", "~/rows.jsonl"]}}),
        ("model.path", {"model": {"path": "/models/seven"}}),
        ("model.path", {"model": {"path": "./seven"}}),
        ("model.path", {"model": {"path": "../weights.gguf"}}),
        ("model.adapter", {"model": {"path": "builtin:ar-tiny", "adapter": "/adapters/one"}}),
        ("model.tokenizer", {"model": {"path": "builtin:ar-tiny", "tokenizer": "/tokenizers/one"}}),
        (
            "decoder.drafter.path",
            {"decoder": {"kind": "speculative", "drafter": {"kind": "model", "path": "/models/small"}}},
        ),
        ("metrics.0.path", {"metrics": [{"kind": "file", "path": "mine.py"}]}),
    ],
)
@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_path_of_this_machine_is_refused_with_its_key(kind, field, changes, tmp_path):
    with pytest.raises(UserError) as refused:
        text_of(write_spec(tmp_path, **changes), kind)
    assert refused.value.field == field
    assert "the cluster can't see" in str(refused.value)


def test_a_path_that_the_cluster_sees_is_allowed(tmp_path):
    spec = write_spec(
        tmp_path,
        input={"path": ["/data/in/*.jsonl", "hf://datasets/some/rows", "s3://b/a.jsonl"]},
        model={"path": "some-org/some-model"},
        output={"path": "/data/out"},
    )
    assert text_of(spec, "rayjob", volume=("claim:/data",))
    assert text_of(spec, "rayjob", shared_path=("/data/in/", "/data/out"))
    with pytest.raises(UserError, match=r"^output\.path"):
        text_of(spec, "rayjob", shared_path=("/data/in", "/data/ou"))
    with pytest.raises(UserError, match=r"^input\.path\.0"):
        text_of(write_spec(tmp_path, input={"path": ["/data/../etc/passwd"]}), "rayjob", shared_path=("/data",))


def test_a_hub_id_that_is_also_a_folder_here_is_that_folder(tmp_path, monkeypatch):
    """A run here would read the folder; a cluster would fetch another model from the hub."""
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^model\.path"):
        text_of(write_spec(tmp_path, model={"path": "org/model"}), "rayjob")


def test_results_that_end_with_the_process_are_refused_everywhere(tmp_path):
    for kind in KINDS:
        with pytest.raises(UserError, match=r"^output\.path"):
            text_of(write_spec(tmp_path, output={"path": "memory://x"}), kind)


def test_on_slurm_with_several_nodes_a_folder_of_each_node_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = (str(tmp_path), "/home", sys.prefix)
    spec = write_spec(tmp_path, output={"path": "/var/tmp/runs"})
    with pytest.raises(UserError, match=r"^output\.path.*each node has for itself"):
        text_of(spec, "slurm", nodes=2, shared_path=shared)
    assert text_of(spec, "slurm", nodes=1)
    assert text_of(write_spec(tmp_path, output={"path": "runs/one"}), "slurm", nodes=2, shared_path=shared)
    outside = os.path.relpath("/tmp/one")
    with pytest.raises(UserError, match=r"^output\.path"):
        text_of(write_spec(tmp_path, output={"path": outside}), "slurm", nodes=2, shared_path=shared)
    with pytest.raises(UserError, match=r"^SPEC\.yaml.*each node has for itself"):
        text_of(write_spec(tmp_path), "slurm", nodes=2)


BAD_VALUES: list[tuple] = [
    ("rayjob", "image", "two words"),
    ("rayjob", "image", "a\nb"),
    ("rayjob", "image", ""),
    ("rayjob", "service_account", "a b"),
    ("rayjob", "volume", ("claim",)),
    ("rayjob", "volume", ("claim:relative",)),
    ("rayjob", "volume", ("Claim!:/data",)),
    ("rayjob", "shared_path", ("data",)),
    ("cronjob", "schedule", "every day"),
    ("cronjob", "schedule", "0 3 * *"),
    ("cron", "schedule", "0 3 * * *\n* * * * *"),
    ("cron", "schedule", "0 3 * * * root;"),
    ("cronjob", "ray_cluster", "Big"),
]


@pytest.mark.parametrize(("kind", "field", "value"), BAD_VALUES)
def test_a_value_that_can_not_be_is_refused_with_its_option(kind, field, value, tmp_path):
    workers = {"count": 4, "gpus": 1.0, "cpus": 2}
    with pytest.raises(UserError) as refused:
        text_of(write_spec(tmp_path, workers=workers), kind, **{field: value})
    assert refused.value.field == f"--{field.replace('_', '-')}"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", list(APPLIES))
def test_an_option_that_would_do_nothing_is_refused(field, tmp_path):
    spec = write_spec(tmp_path)
    sample = ("x:/y",) if isinstance(getattr(Options("cron"), field), tuple) else "x"
    for kind in set(KINDS) - APPLIES[field]:
        with pytest.raises(UserError, match="does not apply to") as refused:
            text_of(spec, kind, **{field: sample})
        assert refused.value.field == f"--{field.replace('_', '-')}"


def test_nodes_for_workers_of_several_shapes_are_refused(tmp_path):
    spec = write_spec(tmp_path, workers=[{"count": 1, "gpus": 1.0}, {"count": 2}])
    assert text_of(spec, "rayjob")
    with pytest.raises(UserError, match=r"^workers: 2 shapes; allowed with --nodes: one shape"):
        text_of(spec, "rayjob", nodes=2)


def test_a_command_that_is_too_long_for_cron_is_refused(tmp_path):
    overrides = [f"name=n{'a' * 100}"] * 10
    with pytest.raises(UserError, match="cron's limit is"):
        text_of(write_spec(tmp_path), "cron", overrides)


def test_a_spec_that_is_too_long_for_an_annotation_is_refused(tmp_path):
    spec = write_spec(tmp_path)
    Path(spec).write_text(Path(spec).read_text() + "# long\n" * 20_000)
    with pytest.raises(UserError, match="is longer than 100,000 bytes"):
        text_of(spec, "rayjob")
    assert text_of(spec, "slurm")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.yaml", "--for", "rayjob"], "missing.yaml: No such file"),
        (["SPEC", "--for", "rayjob", "--set", "output.paht=x"], "output.paht"),
        (["SPEC", "--for", "cron", "--nodes", "2"], "--nodes: does not apply to cron"),
        (["SPEC", "--for", "rayjob", "--set", "name=a\nb"], "name"),
        (["SPEC", "--for", "cron", "--secret", ""], "--secret"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(words, said, tmp_path, capsys):
    spec = write_spec(tmp_path)
    code, out, errors = printed(capsys, *(spec if word == "SPEC" else word for word in words))
    assert (code, out) == (UNUSABLE, "")
    assert said in errors and len(errors.splitlines()) == 1


def test_an_unknown_kind_is_refused_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit) as refused:
        printed(capsys, "job.yaml", "--for", "nomad")
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert all(kind in said for kind in KINDS)
