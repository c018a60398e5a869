"""What `draftmill verify` is for: every kind of damage to a finished run, made on purpose, is found and said in words."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.decoders.base import Outcome
from draftmill.jobs.cli import main
from draftmill.jobs.results import verify
from draftmill.storage.runs.unit_facts import unit_name
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.local_pool import without_ray

ROWS, UNIT_ROWS = 12, 4

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three units."""
    folder = tmp_path_factory.mktemp("sound")
    rows = write_rows(folder / "rows.jsonl", ROWS, longest=8)
    spec = write_spec(folder, rows=rows, output={"path": str(folder / "run"), "unit_rows": UNIT_ROWS})
    with without_ray():
        assert main(["run", str(spec), "--quiet"]) == 0
    return folder / "run"


def copied(sound: Path, run: Path) -> Path:
    """A copy of the run whose manifest has the etags of the copied files."""
    shutil.copytree(sound, run)

    def update(manifest) -> None:
        for one in manifest["units"]:
            one["etag"] = etag_of(run / one["object"])

    edited("_manifest.json", update)(run)
    return run


def etag_of(path: Path) -> str:
    """As a store on disk makes it."""
    stat = open_store(str(path.parent)).stat(path.name)
    assert stat is not None
    return stat.etag


def unit(run: Path, number: int = 1) -> Path:
    return run / "data" / f"unit-{number:08d}.parquet"


def edited(name: str, change: Callable) -> Damage:
    """A JSON file of which something is changed."""

    def damage(run: Path) -> None:
        found = json.loads((run / name).read_text())
        change(found)
        (run / name).write_text(json.dumps(found))

    return damage


def set_in_manifest(key: str, value) -> Damage:
    return edited("_manifest.json", lambda found: found["units"][1].update({key: value}))


def bytes_of(change: Callable[[bytes], bytes]) -> Damage:
    """A unit's file of which some bytes are changed."""
    return lambda run: void(unit(run).write_bytes(change(unit(run).read_bytes())))


def flipped(at: float) -> Damage:
    """One bit, so far (0 to 1) into the file."""

    def flip(data: bytes) -> bytes:
        place = int(at * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return bytes_of(flip)


def rows_changed(change: Callable[[pa.Table], pa.Table], *, covered: bool = True) -> Damage:
    """Other rows in a unit's file; `covered`: by one who also writes its new hash, etag and size into the manifest."""

    def damage(run: Path) -> None:
        table = pq.read_table(unit(run))
        pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), unit(run))
        data = unit(run).read_bytes()
        facts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "etag": etag_of(unit(run))}
        if covered:
            edited("_manifest.json", lambda found: found["units"][1].update(facts))(run)

    return damage


def column(table: pa.Table, name: str, value) -> pa.Table:
    index, field = table.column_names.index(name), table.schema.field(name)
    values = [value, *table.column(name).to_pylist()[1:]]
    return table.set_column(index, field, pa.array(values, field.type))


def metadata(key: str, value: str) -> Damage:
    """Another word in what a unit's file says of itself."""

    def damage(run: Path) -> None:
        table = pq.read_table(unit(run))
        told = {**table.schema.metadata, f"draftmill.{key}".encode(): value.encode()}
        pq.write_table(table.replace_schema_metadata(told), unit(run))

    return damage


def void(_: object) -> None:
    """Whatever came back is not wanted."""


DAMAGES: dict[str, tuple[Damage, str]] = {
    "other sums in the manifest": (
        edited("_manifest.json", lambda found: found["sums"].update(nfe=1)),
        "the manifest's sums differ",
    ),
    "a bit of the data": (flipped(0.1), ""),
    "a bit of the middle": (flipped(0.5), ""),
    "a bit of the footer": (flipped(0.9), ""),
    "a file cut short": (bytes_of(lambda data: data[:-30]), "can't be read"),
    "an empty file": (bytes_of(lambda data: b""), "can't be read"),
    "another kind of file": (bytes_of(lambda data: b"not a table" * 50), "can't be read"),
    "a file that is gone": (lambda run: unit(run).unlink(), "can't be read"),
    "a file too many": (lambda run: void(shutil.copy(unit(run), unit(run, 9))), "not in the manifest"),
    "the file of another unit": (lambda run: void(shutil.copy(unit(run, 2), unit(run))), "SHA-256"),
    "a row twice": (rows_changed(lambda t: pa.concat_tables([t, t.slice(0, 1)])), "duplicates or were never planned"),
    "a row in the place of another": (
        rows_changed(lambda t: pa.concat_tables([t.slice(0, 3), t.slice(0, 1)])),
        "1 planned rows are missing",
    ),
    "a row less": (rows_changed(lambda t: t.slice(1)), "1 planned rows are missing"),
    "rows in another order": (rows_changed(lambda t: t.take([1, 0, 2, 3])), "order of the plan"),
    "a row that was not planned": (rows_changed(lambda t: column(t, "id", "other")), "never planned"),
    "a status": (rows_changed(lambda t: column(t, "status", "failed")), "rows are ok, the manifest has"),
    "a status that there is not": (rows_changed(lambda t: column(t, "status", "odd")), "rows are ok"),
    "rows of another unit": (rows_changed(lambda t: column(t, "unit", 7)), "rows name another unit"),
    "rows of another pass": (rows_changed(lambda t: column(t, "pass", 2)), "rows name another pass"),
    "a column less": (rows_changed(lambda t: t.drop_columns(["status"])), "schema"),
    "a column more": (rows_changed(lambda t: t.append_column("more", t["id"])), "schema"),
    "a text, its hash left": (rows_changed(lambda t: column(t, "text", "x"), covered=False), "SHA-256"),
    "the fingerprint of a file": (metadata("fingerprint", "f00"), "its fingerprint is"),
    "a manifest's fingerprint": (
        edited("_manifest.json", lambda m: m.update(fingerprint="f00")),
        "belongs to another job",
    ),
    "a unit not listed": (edited("_manifest.json", lambda m: m["units"].pop()), "the manifest does not list it"),
    "a unit listed twice": (edited("_manifest.json", lambda m: m["units"].append(m["units"][0])), "twice"),
    "a unit that was not planned": (
        edited("_manifest.json", lambda m: m["units"].append(m["units"][0] | {"unit": 9, "object": unit_name(9)})),
        "not in the plan",
    ),
    "a hash": (set_in_manifest("sha256", "0" * 64), "SHA-256"),
    "an etag": (set_in_manifest("etag", "0"), "etag"),
    "a size": (set_in_manifest("bytes", 7), "bytes"),
    "a number of rows": (set_in_manifest("rows", 5), "rows"),
    "a number of failed rows": (set_in_manifest("failed", 1), "rows are failed"),
    "totals that are not the sum": (edited("_manifest.json", lambda m: m["totals"].update(ok=1)), "totals"),
    "a manifest that is no JSON": (lambda run: void((run / "_manifest.json").write_text("{")), "damaged"),
    "a manifest of another shape": (lambda run: void((run / "_manifest.json").write_text("[]")), "damaged"),
    "_SUCCESS gone": (lambda run: (run / "_SUCCESS").unlink(), "no _SUCCESS"),
    "_SUCCESS of another job": (edited("_SUCCESS", lambda s: s.update(fingerprint="f00")), "_SUCCESS"),
    "_SUCCESS empty": (lambda run: void((run / "_SUCCESS").write_text("")), "_SUCCESS"),
}


def test_verify_finds_a_sound_run_sound(sound):
    assert main(["verify", str(sound)]) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", DAMAGES)
def test_verify_finds(sound, tmp_path, capsys, kind):
    run = copied(sound, tmp_path / "run")
    damage, words = DAMAGES[kind]
    damage(run)
    assert main(["verify", str(run)]) == 1
    told = capsys.readouterr()
    assert "unexpected" not in told.err
    assert words in told.out + told.err


@pytest.mark.parametrize("name", ["_plan.json", "plan"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"PAR1 and no more"])
def test_a_damaged_plan_is_said_in_words(sound, tmp_path, capsys, name, content):
    run = shutil.copytree(sound, tmp_path / "run")
    path = run / name if name.startswith("_") else next((run / name).iterdir())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for command in (["verify", str(run)], ["status", str(run)], ["rerun", str(run), "--failed"]):
        code = main(command)
        told = capsys.readouterr().err
        assert "unexpected" not in told, f"{command[0]}: {told}"
        assert code in {0, 1, 2} and (code or command[0] != "verify")


def test_a_copied_run_is_as_good_as_the_first_and_its_damage_is_found_too(sound, tmp_path, capsys):
    run = shutil.copytree(sound, tmp_path / "run")
    assert main(["verify", str(run)]) == 0
    assert "the run was copied" in capsys.readouterr().out
    with unit(run).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    assert main(["verify", str(run)]) == 1
    told = capsys.readouterr().out
    assert unit(run).name in told and "etag is" not in told


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "gone"])
def test_export_names_a_damaged_file_in_one_line_and_a_remedy(sound, tmp_path, capsys, damage):
    run, spec = copied(sound, tmp_path / "run"), tmp_path / "spec.yaml"
    data = unit(run).read_bytes()
    half = len(data) // 2
    unit(run).write_bytes(data[:half] if damage == "cut off" else data[:half] + b"\xff" * 64 + data[half + 64 :])
    if damage == "gone":
        unit(run).unlink()
    spec.write_text(sound.with_suffix(".yaml").read_text())
    export = ["export", str(run), "--format", "jsonl", "--out", str(tmp_path / "all.jsonl")]
    assert main(export) == 2
    said = capsys.readouterr().err
    remedy = "delete it, _manifest.json and _SUCCESS, and the next run repeats its unit"
    assert said.count("\n") == 1 and f"{unit(run)} is damaged: " in said and remedy in said
    assert ("it does not exist" in said) == (damage == "gone")
    assert main(["verify", str(run)]) == 1 and (damage != "gone" or remedy in capsys.readouterr().out)
    for name in (str(unit(run)), "_manifest.json", "_SUCCESS"):
        (run / name).unlink(missing_ok=True)
    with without_ray():
        assert main(["run", str(spec), "--set", f"output.path={run}", "--quiet"]) == 0
    assert main(["verify", str(run)]) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["_manifest.json", "_lease.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"units": [{"unit": 0}]}', "\\udc80"])
def test_damaged_bookkeeping_is_exit_code_2_and_may_go(sound, tmp_path, capsys, name, content):
    run = copied(sound, tmp_path / "run")
    (run / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    export = ["export", str(run), "--format", "jsonl", "--out", str(tmp_path / "all.jsonl")]
    start = ["run", str(sound.with_suffix(".yaml")), "--set", f"output.path={run}", "--quiet"]
    told = 0
    capsys.readouterr()
    for arguments in (start, ["status", str(run)], ["verify", str(run)], ["rerun", str(run), "--failed"], export):
        code, said = main(arguments), capsys.readouterr()
        told += name in said.err + said.out
        assert code == 0 or name in said.err + said.out, arguments
        lines = [line for line in said.err.splitlines() if not line.startswith("hashing the model: ")]
        assert code in ({0, 1} if arguments[0] == "verify" else {0, 2}) and len(lines) <= 1, arguments
    assert told or name == "_lease.json"
    (run / name).unlink()
    (run / "_SUCCESS").unlink()
    with without_ray():
        assert main(start) == 0
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize("gone", [["_manifest.json"], ["_SUCCESS"], ["_manifest.json", "data/unit-00000001.parquet"]])
def test_a_run_that_lacks_its_manifest_or_success_is_not_finished_and_gets_them_again(sound, tmp_path, capsys, gone):
    run = copied(sound, tmp_path / "run")
    for name in gone:
        (run / name).unlink()
    assert main(["status", str(run)]) == 0
    assert "interrupted; `draftmill run` resumes it" in capsys.readouterr().out
    with without_ray():
        assert main(["run", str(sound.with_suffix(".yaml")), "--set", f"output.path={run}", "--quiet"]) == 0
    assert main(["verify", str(run)]) == 0


def test_samples_are_not_decoded_again_from_inputs_that_have_changed(sound, capsys):
    rows = sound.with_name("rows.jsonl")
    before, content = rows.stat(), rows.read_text()
    try:
        rows.write_text(content.replace("row-7", "row-8"))
        os.utime(rows, (before.st_atime, before.st_mtime + 10))
        assert main(["verify", str(sound), "--invariance", "2"]) == 2
        assert "the inputs changed" in capsys.readouterr().err
    finally:
        rows.write_text(content)
    assert main(["verify", str(sound), "--invariance", "2"]) == 0
    assert "2 samples again, each alone: 2 equal" in capsys.readouterr().out


@pytest.mark.parametrize(("exact", "code"), [(True, 1), (False, 0)])
def test_a_sample_that_differs_alone_breaks_the_promise(sound, tmp_path, capsys, monkeypatch, exact, code):
    run = copied(sound, tmp_path / "run")
    edited("_manifest.json", lambda found: [one.update(exact=exact) for one in found["units"]])(run)
    real, asked = verify.result_of, list[int]()

    def other_date(outcome: Outcome, *, scores: bool = False) -> verify.Result:
        tokens, each, together = real(outcome, scores=scores)
        asked.append(len(tokens))
        return [*tokens, 1] if len(asked) == 2 else tokens, each, together

    monkeypatch.setattr(verify, "result_of", other_date)
    assert main(["verify", str(run), "--invariance", "4"]) == code
    out = capsys.readouterr().out
    assert "decoded 4 samples again, each alone: 3 equal (75.0%)" in out
    assert ("all promises hold" in out) == (not exact)
    assert ("BROKEN: the run is `exact: true`, but" in out) == exact


def test_a_trace_of_another_attempt_is_found_and_a_deleted_one_is_not_missed(tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", 8, longest=8)
    spec = write_spec(tmp_path, rows=rows, output={"path": str(tmp_path / "run"), "unit_rows": 4, "trace": "steps"})
    with without_ray():
        assert main(["run", str(spec), "--quiet"]) == 0
    first, second = sorted((tmp_path / "run" / "traces").iterdir())
    assert main(["verify", str(tmp_path / "run")]) == 0
    second.write_bytes(first.read_bytes())
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert f"BROKEN: data/{second.name}: its trace is damaged, or that of another attempt" in capsys.readouterr().out
    second.unlink()
    assert main(["verify", str(tmp_path / "run")]) == 0
