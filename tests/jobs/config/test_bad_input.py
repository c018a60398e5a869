"""Everything a user can get wrong, in one list: a clear message with exit code 2, or a failed row with its class."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import open_store
from tests.jobs.specs import infilling
from tests.runs.local_pool import without_ray

Change = Callable[[dict, Path], None]

GOOD_ROWS = [{"id": f"good-{number}", "text": f"x = {number}\n"} for number in range(4)]


def job(folder: Path) -> dict:
    """A spec that runs: four rows, a tiny model, one worker."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in GOOD_ROWS))
    return infilling(folder, workers={"count": 1})


def run(spec: dict, folder: Path, command: str = "run") -> int:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(spec))
    return main([command, str(file), *(["--quiet"] if command == "run" else [])])


def setting(dotted: str, value) -> Change:
    def change(spec: dict, folder: Path) -> None:
        *sections, name = dotted.split(".")
        for section in sections:
            spec = spec.setdefault(section, {})
        spec[name] = value

    return change


def rows(*lines: str) -> Change:
    def change(spec: dict, folder: Path) -> None:
        (folder / "rows.jsonl").write_text("\n".join(lines))

    return change


def unwritable(spec: dict, folder: Path) -> None:
    (folder / "file").write_text("not a folder")
    spec["output"]["path"] = str(folder / "file" / "run")


def damaged_weights(spec: dict, folder: Path) -> None:
    golden = Path(__file__).parents[2] / "data" / "xlnet_asarm"
    shutil.copy(golden / "config.json", folder)
    (folder / "model.safetensors").write_bytes((golden / "model.safetensors").read_bytes()[:5000])
    spec["model"] = {"path": str(folder), "tokenizer": "none"}
    spec["input"]["columns"] = {"tokens": "tokens"}
    spec["task"]["mask"] = {"kind": "given"}


def completing(spec: dict, folder: Path) -> None:
    spec |= {"task": {"kind": "complete"}, "decoder": {"kind": "autoregressive"}}


REFUSED: dict[str, tuple[Change, str]] = {
    "missing file": (setting("input.path", "no/such/file.jsonl"), "input.path: "),
    "missing column": (setting("input.columns", {"text": "body"}), "input.columns: no row has all columns: the column 'body'"),
    "empty input": (rows(""), "input.path: "),
    "duplicate ids": (rows('{"id": "a", "text": "x"}', '{"id": "a", "text": "y"}'), "input.columns.id: the id 'a' occurs twice"),
    "unwritable output": (unwritable, "Not a directory"),
    "corrupt weights": (damaged_weights, "model.path: "),
    "missing model": (setting("model.path", "builtin:none"), "model.path: 'builtin:none' does not exist"),
    "more CPUs than there are": (setting("workers", {"cpus": 10**6}), "workers: a worker needs 1e+06 CPUs on one node"),
    "a GPU where there is none": (setting("model.device", "cuda"), "model.device: 'cuda', but workers get no GPU"),
    "model for another task": (completing, "task.kind: models of family 'xlnet' do not support 'complete'; tasks they"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_an_unusable_job_exits_with_2_and_says_why(tmp_path, capsys, change, message):
    spec = job(tmp_path)
    change(spec, tmp_path)
    with without_ray():
        assert run(spec, tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith("draftmill: ") and message in said and "Traceback" not in said
    assert not (tmp_path / "run").is_dir(), "nothing was to be written"


BAD_ROWS: dict[str, tuple[bytes, str, str]] = {
    "invalid UTF-8": (b'{"id": "bad", "text": "\xff<mask:2>"}', "bad_encoding", "read"),
    "not JSON": (b'{"id": "bad", "text": ', "bad_json", "read"),
    "no object": (b'["bad"]', "bad_row", "read"),
    "missing column": (b'{"id": "no text"}', "missing_column", "read"),
    "text that is no text": (b'{"id": "number", "text": 7}', "bad_row", "read"),
    "id that is no id": (b'{"id": true, "text": "x = <mask:1>"}', "bad_row", "read"),
    "longer than the model": (
        json.dumps({"id": "long", "text": "é" * 600 + "<mask:2>"}).encode(),
        "too_long",
        "tokenize",
    ),
    "marker absent": (b'{"id": "whole", "text": "x = 1"}', "marker_absent", "tokenize"),
    "hole of no length": (b'{"id": "zero", "text": "x = <mask:0>"}', "bad_mask", "tokenize"),
}
GOOD_LINES = [b'{"id": "good-1", "text": "x = <mask:2>\\n"}', b'{"id": "good-2", "text": "y = <mask:1>"}']


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, ray_session) -> tuple[int, list[dict], Path]:
    """Exit code, result rows and folder of one job over all bad rows and two good ones."""
    folder = tmp_path_factory.mktemp("bad-rows")
    spec = job(folder)
    spec["task"]["mask"] = {"kind": "marker", "marker": "<mask>"}
    lines = [GOOD_LINES[0], *(line for line, _, _ in BAD_ROWS.values()), GOOD_LINES[1]]
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    code = run(spec, folder)
    results = [row for table in read_results(open_store(spec["output"]["path"])) for row in table.to_pylist()]
    return code, results, folder


@pytest.mark.one_in(2)
@pytest.mark.ray
@pytest.mark.parametrize(
    ("number", "kind", "stage"), [(n, *row[1:]) for n, row in enumerate(BAD_ROWS.values(), 1)], ids=BAD_ROWS
)
def test_a_bad_row_fails_alone_with_its_class(outcome, number, kind, stage):
    line = list(BAD_ROWS.values())[number - 1][0]
    try:
        name = json.loads(line)["id"]
    except (ValueError, TypeError):
        name = None
    name = name if isinstance(name, str) else f"rows.jsonl:{number}"
    (row,) = [row for row in outcome[1] if row["id"] == name]
    assert (row["status"], row["error_kind"], row["error_stage"]) == ("failed", kind, stage)
    assert row["error"] and row["text"] is None and row["new_tokens"] == 0


@pytest.mark.ray
def test_the_good_rows_beside_bad_ones_come_back(outcome):
    code, results, _ = outcome
    assert code == 3, "more rows failed than errors.max_rate allows"
    assert len(results) == len(BAD_ROWS) + 2
    good = {row["id"]: row for row in results if row["status"] == "ok"}
    assert sorted(good) == ["good-1", "good-2"] and good["good-1"]["text"].startswith("x = ")
    assert good["good-1"]["new_tokens"] == 2


def test_results_without_a_plan_are_nothing_to_go_on_from_or_to_write_beside(tmp_path, capsys):
    spec = job(tmp_path)
    with without_ray():
        assert run(spec, tmp_path) == 0
        for name in ("_plan.json", "_manifest.json", "_SUCCESS"):
            (tmp_path / "run" / name).unlink()
        spec["seed"] = 7
        before = sorted((tmp_path / "run").rglob("*"))
        assert run(spec, tmp_path) == 2
    assert "output.path: " in (said := capsys.readouterr().err) and "no _plan.json" in said
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.ray
def test_a_changed_spec_on_an_old_directory_is_refused_by_its_keys(outcome, capsys):
    folder = outcome[2]
    spec = yaml.safe_load((folder / "job.yaml").read_text())
    spec["decoder"]["k"] = 3
    (folder / "changed.yaml").write_text(yaml.safe_dump(spec))
    assert main(["run", str(folder / "changed.yaml"), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "output.path: " in said and "decoder.k was 5, is 3" in said


def test_validate_finds_what_run_would(tmp_path, capsys):
    spec = job(tmp_path)
    setting("input.columns", {"text": "body"})(spec, tmp_path)
    assert run(spec, tmp_path, "validate") == 2
    assert "input.columns" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
