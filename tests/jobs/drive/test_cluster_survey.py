"""Planning by Ray tasks: the plan is that of one process, byte for byte, whatever the inputs are and whatever is lost."""

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.actors.planning import survey_pool
from draftmill.actors.planning.survey_pool import SurveyedRows
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.drive import backend as surveys
from draftmill.jobs.drive.allocation import NodeRoom
from draftmill.jobs.drive.backend import LocalBackend, RayBackend, cluster_survey
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import make_plan, survey
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.jobs.plan import grouped_jobs
from tests.jobs.plan.grouped_jobs import write_questions
from tests.jobs.specs import infilling

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(count)]


def lines(count: int, seed: int = 0, *, bad: bool = True) -> bytes:
    """Rows as lines of JSON: some without an id, blank lines, windows' line ends, texts of many bytes, and broken ones."""
    out = []
    for number, text in enumerate(texts(count, seed)):
        row: dict = {"text": text, "n": number if number < count // 2 else number / 2, "tag": {"a": number}}
        if number % 3:
            row["id"] = f"{seed}-{number}"
        if number == count - 3:
            row["tag"] = {"b": "late"}
        line = json.dumps(row).encode() + (b"\r\n" if number % 7 == 0 else b"\n")
        out.append(line + (b"\n" if number % 11 == 0 else b""))
        if bad and number % 40 == 7:
            out.append(b'{"text": "broken\n' + b'"\xff\xfe"\n' + b"[1, 2]\n")
    return b"".join(out).removesuffix(b"\n")


def as_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(300))
    (folder / "b.jsonl").write_bytes(lines(5, 1))
    (folder / "c.jsonl").write_bytes(b"")


def as_parquet(folder: Path) -> None:
    table = pa.table({"text": [*texts(400), None], "other": list(range(401))})
    pq.write_table(table, folder / "a.parquet", row_group_size=37)
    pq.write_table(table.slice(0, 20).set_column(1, "other", pa.array([1.5] * 20)), folder / "b.parquet")


def as_csv(folder: Path) -> None:
    rows = [f'{number},"{text}\nand a line"' for number, text in enumerate(texts(200))]
    (folder / "a.csv").write_text("\n".join(["id,text", *rows, "broken,too,many"]))


def as_txt(folder: Path) -> None:
    (folder / "a.txt").write_text("\n".join(texts(300)) + "\n\n")
    (folder / "b.txt").write_bytes(b"no end \xff")


def as_gz(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(300)))
    (folder / "b.jsonl").write_bytes(lines(100, 1))


def as_sources(folder: Path) -> None:
    for number, text in enumerate(texts(40)):
        (folder / f"{number:02d}.py").write_text(text)


def as_arrow(folder: Path) -> None:
    table = pa.table({"text": texts(100)})
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


KINDS: list[tuple] = [
    (as_jsonl, {}),
    (as_jsonl, {"keep": ["n", "tag"]}),
    (as_jsonl, {"limit": 222, "keep": ["n", "tag"]}),
    (as_jsonl, {"limit": 1}),
    (as_parquet, {"keep": ["other"]}),
    (as_parquet, {"limit": 111}),
    (as_csv, {}),
    (as_txt, {}),
    (as_txt, {"chunk_chars": 50}),
    (as_gz, {"keep": ["tag"]}),
    (as_sources, {}),
    (as_arrow, {"limit": 50}),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few rows, cut in this process; the tasks' own sizes are those of their processes."""
    monkeypatch.setattr(survey_pool, "CHUNK_BYTES", 4000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def spec_for(folder: Path, out: Path, inputs: dict | None = None, **more) -> JobSpec:
    given, output = {"path": str(folder)} | (inputs or {}), {"path": str(out), "unit_rows": 8}
    return check_spec(infilling(input=given, batching={"window": 64}, output=output) | more)


def files_of(place: Path) -> dict[str, bytes]:
    """The plan's files; the path of the run directory is part of the spec in `_plan.json`."""
    found = {path.name: path.read_bytes() for path in sorted(place.glob("plan/*"))}
    return found | {"_plan.json": (place / "_plan.json").read_bytes().replace(str(place).encode(), b"RUN")}


def planned_here(spec: JobSpec) -> dict[str, bytes]:
    store = open_store(spec.output.path)
    make_plan(resolve(spec, store), store, Display(), survey=survey)
    return files_of(Path(spec.output.path))


def planned_there(spec: JobSpec, **changes) -> dict[str, bytes]:
    """The plan made by tasks; `changes` replace attributes of the pool."""
    store = open_store(spec.output.path)
    make_plan(resolve(spec, store), store, Display(), survey=surveyed_there(spec, **changes))
    return files_of(Path(spec.output.path))


def surveyed_there(spec: JobSpec, **changes):
    resolved = resolve(spec, open_store(spec.output.path))
    found = cluster_survey(resolved, 2, is_ours=False, note=changes.pop("note", lambda message: None))

    def surveyed(*given):
        with pytest.MonkeyPatch.context() as patch:
            if changes:
                make = survey_pool.SurveyPool
                patch.setattr(survey_pool, "SurveyPool", lambda *a, **k: make(*a, **{**k, **changes}))
            yield from found(*given)

    return surveyed


def noting(note: Callable[[SurveyedRows], None], of_task=survey_pool.SurveyPool._from_task):
    """The items of a chunk's task, each of which is noted."""

    def noted(pool, stream):
        items = of_task(pool, stream)
        while True:
            try:
                item = next(items)
            except StopIteration as end:
                return end.value
            note(item)
            yield item

    return noted


@pytest.mark.parametrize(("write", "inputs"), KINDS)
@pytest.mark.slow
def test_the_plan_of_tasks_is_the_plan_of_one_process(ray_session, folder, tmp_path, write, inputs, monkeypatch):
    write(folder)
    here = planned_here(spec_for(folder, tmp_path / "here", inputs))
    arrived: list[SurveyedRows] = []
    monkeypatch.setattr(survey_pool.SurveyPool, "_from_task", noting(arrived.append))
    assert planned_there(spec_for(folder, tmp_path / "there", inputs)) == here
    assert arrived, "tasks did it"
    if "limit" not in inputs and write in {as_jsonl, as_parquet, as_txt} and "chunk_chars" not in inputs:
        assert len(arrived) > 4, "a large file was cut"


@pytest.mark.slow
def test_several_samples_of_a_row_are_planned_alike(ray_session, folder, tmp_path):
    as_jsonl(folder)
    here = planned_here(spec_for(folder, tmp_path / "here", sampling={"n": 3}))
    assert planned_there(spec_for(folder, tmp_path / "there", sampling={"n": 3})) == here


@pytest.mark.slow
def test_a_template_with_examples_is_planned_alike(ray_session, folder, tmp_path):
    as_parquet(folder)
    (tmp_path / "shots.jsonl").write_text("\n".join(json.dumps({"a": text}) for text in texts(9, 1)))
    examples = {"path": str(tmp_path / "shots.jsonl"), "k": 2, "seed": 1}
    prompt = {"template": "{% for e in examples %}{{ e.a }};{% endfor %}{{ text }} {{ other }}", "examples": examples}
    here = planned_here(spec_for(folder, tmp_path / "here", prompt=prompt))
    assert planned_there(spec_for(folder, tmp_path / "there", prompt=prompt)) == here


@pytest.mark.parametrize("samples", [1, 3])
def test_rows_that_begin_alike_are_planned_alike(ray_session, folder, tmp_path, samples):
    write_questions(folder / "a.jsonl", 60)
    more = {"task": {"kind": "complete", "max_new_tokens": 8}, "sampling": {"n": samples}}
    here = planned_here(grouped_jobs.spec_for(folder, str(tmp_path / "here"), **more))
    assert planned_there(grouped_jobs.spec_for(folder, str(tmp_path / "there"), **more)) == here


@pytest.mark.slow
def test_the_rest_of_a_task_that_is_killed_in_the_middle_is_done_by_the_driver(
    ray_session, folder, tmp_path, monkeypatch
):
    """One file that can't be cut, of several items: the driver leaves out what has arrived."""
    rows = [json.dumps({"id": str(number), "text": "a b"}) for number in range(20_000)]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode(), 1))
    (folder / "b.jsonl").write_bytes(lines(200, 1))
    changes: dict = {"output": {"path": str(tmp_path / "x"), "unit_rows": 512}, "batching": {"window": 4096}}
    killed: list[int] = []

    def kill(item: SurveyedRows) -> None:
        for process in psutil.Process().children(recursive=True):
            if len(killed) < 2 and process.pid not in killed and "ray::survey_chunk" in " ".join(process.cmdline()):
                killed.append(process.pid)
                process.kill()

    monkeypatch.setattr(survey_pool.SurveyPool, "_from_task", noting(kill))
    plans = []
    for name, plan in (("here", planned_here), ("there", planned_there)):
        changes["output"]["path"] = str(tmp_path / name)
        plans.append(plan(check_spec(spec_for(folder, tmp_path / name).model_dump(mode="json") | changes)))
    assert len(killed) == 2 and plans[0] == plans[1]


def error_of(spec: JobSpec, survey) -> tuple[str, str | None]:
    store = open_store(spec.output.path)
    with pytest.raises(UserError) as raised:
        make_plan(resolve(spec, store), store, Display(), survey=survey)
    assert not list(Path(spec.output.path).glob("plan/*")), "nothing is left"
    return raised.value.message.replace(spec.output.path, "RUN"), raised.value.field


def damaged_parquet(folder: Path) -> None:
    as_parquet(folder)
    data = bytearray((folder / "a.parquet").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 200] = bytes(200)
    (folder / "a.parquet").write_bytes(data)


def twice(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines(200, 3, bad=False))
    (folder / "b.jsonl").write_bytes(lines(50, 3, bad=False))


def without_texts(folder: Path) -> None:
    rows = [json.dumps({"word": text}) for text in texts(300)]
    (folder / "a.jsonl").write_text("\n".join(rows))


def torn_gz(folder: Path) -> None:
    as_gz(folder)
    (folder / "a.jsonl.gz").write_bytes((folder / "a.jsonl.gz").read_bytes()[:-900])


def an_array(folder: Path) -> None:
    (folder / "b.jsonl").write_text("[" + ",\n".join(json.dumps({"text": text}) for text in texts(300)) + "]")
    shutil.move(folder / "b.jsonl", folder / "b.json")


@pytest.mark.parametrize("write", [damaged_parquet, twice, without_texts, torn_gz, an_array])
def test_errors_are_those_of_one_process(ray_session, folder, tmp_path, write):
    write(folder)
    path = folder / "b.json" if write is an_array else folder
    here = error_of(spec_for(path, tmp_path / "run"), survey)
    spec = spec_for(path, tmp_path / "run")
    assert error_of(spec, surveyed_there(spec)) == here


def test_a_damaged_file_behind_the_limit_is_no_error(ray_session, folder, tmp_path):
    (folder / "a.jsonl").write_bytes(lines(50))
    (folder / "b.jsonl.gz").write_bytes(b"\x1f\x8b and no more")
    here = planned_here(spec_for(folder, tmp_path / "here", {"limit": 40}))
    assert planned_there(spec_for(folder, tmp_path / "there", {"limit": 40})) == here


@pytest.mark.slow
def test_where_tasks_fail_or_get_no_cpu_the_driver_plans_alone(ray_session, folder, tmp_path, monkeypatch):
    as_jsonl(folder)
    here = planned_here(spec_for(folder, tmp_path / "here", {"keep": ["tag"]}))
    notes: list[str] = []
    monkeypatch.setattr(survey_pool, "FIRST_S", 0.5)
    spec = spec_for(folder, tmp_path / "there", {"keep": ["tag"]})
    assert planned_there(spec, cpus=99, note=notes.append, _wait_s=0.5) == here
    assert notes == ["the cluster has had no room for planning for 0 s: planning here"]
    bad = survey_pool.SurveyJob(*(None for _ in range(4)))  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "there")
    monkeypatch.setattr(ray_session, "put", lambda job, put=ray_session.put: put(bad))
    assert planned_there(spec) == here


def test_small_jobs_and_local_ones_are_planned_by_the_driver(folder, tmp_path, monkeypatch):
    as_jsonl(folder)
    spec = spec_for(folder, tmp_path / "run")
    resolved = resolve(spec, open_store(spec.output.path))
    assert not surveys.pays(resolved, 8, is_ours=False)
    monkeypatch.setattr(surveys, "LEAST_BYTES", 1000)
    assert surveys.pays(resolved, 2, is_ours=False) and not surveys.pays(resolved, 1, is_ours=False)
    few = resolve(spec_for(folder, tmp_path / "run", {"limit": 10}), open_store(spec.output.path))
    assert not surveys.pays(few, 8, is_ours=False)
    assert LocalBackend().survey(resolved, Display()) is survey
    monkeypatch.setattr("draftmill.jobs.drive.backend.cluster_nodes", lambda: [NodeRoom(1, 0)])
    assert RayBackend(None).survey(resolved, Display()) is survey
