"""Jobs with a template, a system message, few-shot examples or the date: planned and decoded alike, by the plan's contents."""

import json
import re
import time
from datetime import date
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from draftmill.actors.rows.canvas import Canvas
from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.plan.planning import first_rows
from draftmill.jobs.plan.resolve import resolve
from draftmill.jobs.run.validate import canvas_lines, prompt_text
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.runs.causal_jobs import TOKENIZER, World, job_spec, run_here, save_model
from tests.runs.jobs_here import run, without_ray

SHOTS = [{"q": str(number), "a": f"a{number}"} for number in range(9)]
TEMPLATE = "{% for e in examples %}{{ e.q }}:{{ e.a }} {% endfor %}{{ row['the q'] }}:"


def spec_of(world: World, name: str, *, examples: dict, template: str = TEMPLATE) -> JobSpec:
    """A job over a Parquet file with a column that no prompt needs."""
    rows = pa.table({"id": ["a", "b"], "the q": ["x", "yy"], "other": [1, 2], "prompt": ["never", "never"]})
    pq.write_table(rows, world.folder / "rows.parquet")
    return job_spec(
        world.folder,
        [],
        task={"kind": "complete", "max_new_tokens": 4},
        prompt={"template": template, "examples": examples},
        input={"path": str(world.folder / "rows.parquet")},
        output={"path": str(world.folder / name)},
    )


def write_shots(world: World, shots: list[dict]) -> dict:
    path = world.folder / "shots.jsonl"
    path.write_text("\n".join(map(json.dumps, shots)))
    return {"path": str(path), "k": 2}


def test_planning_and_workers_make_the_same_prompt_of_a_template_and_examples(world):
    rows = run_here(spec_of(world, "first", examples=write_shots(world, SHOTS)))
    for name, question in (("a", "x"), ("b", "yy")):
        prompt = f"0:a0 1:a1 {question}:"
        assert rows[name]["status"] == "ok" and rows[name]["prompt_tokens"] == len(world.ids(prompt))
        assert rows[name]["tokens"] == world.expected(prompt, room=4)
    plan = load_plan(open_store(str(world.folder / "first")))
    assert plan is not None and plan.totals.tokens == sum(row["prompt_tokens"] + 4 for row in rows.values())
    assert plan.results["prompt"] == {"template": TEMPLATE, "examples": {"rows": SHOTS[:2]}}


def test_examples_count_by_content_and_a_seed_draws_them_once(world):
    shots = write_shots(world, SHOTS)
    run_here(spec_of(world, "kept", examples=shots))
    store = open_store(str(world.folder / "kept"))
    (world.folder / "moved.jsonl").write_text((world.folder / "shots.jsonl").read_text())
    resolve(spec_of(world, "kept", examples=shots | {"path": str(world.folder / "moved.jsonl")}), store)
    write_shots(world, [*SHOTS[:2], {"q": "another third", "a": "that nobody chose"}])
    resolve(spec_of(world, "kept", examples=shots), store)
    write_shots(world, SHOTS[1:])
    with pytest.raises(UserError, match=r"holds another job: prompt\.examples\.rows was"):
        resolve(spec_of(world, "kept", examples=shots), store)
    with pytest.raises(UserError, match=r"holds another job: prompt\.template was"):
        resolve(spec_of(world, "kept", examples={"rows": SHOTS[:2]}, template=TEMPLATE + " "), store)
    write_shots(world, SHOTS)
    drawn = []
    for seed in (1, 1, 2):
        spec = spec_of(world, "none", examples=shots | {"seed": seed})
        resolved = resolve(spec, open_store(spec.output.path))
        examples = resolved.recipe.prompt.examples
        assert examples is not None and examples.rows is not None and len(examples.rows) == 2
        assert resolved.spec is spec and resolved.recorded.prompt.examples == examples != spec.prompt.examples
        drawn.append(examples.rows)
    assert drawn[0] == drawn[1] != drawn[2] and all(row in SHOTS for rows in drawn for row in rows)


def test_examples_that_are_not_there_and_columns_that_no_row_has_are_refused_before_any_work(world):
    for examples, message in (
        ({"path": str(world.folder / "absent.jsonl"), "k": 1}, r"prompt\.examples\.path: nothing is at"),
        (write_shots(world, SHOTS) | {"k": 10}, r"prompt\.examples\.k: 10, but .* has 9 rows"),
    ):
        spec = spec_of(world, "never", examples=examples)
        with pytest.raises(UserError, match=message):
            resolve(spec, open_store(spec.output.path))
    (world.folder / "shots.jsonl").write_text('{"q": 1}\n{broken\n')
    spec = spec_of(world, "never", examples={"path": str(world.folder / "shots.jsonl"), "k": 2})
    with pytest.raises(UserError, match=r"prompt\.examples\.path: row 1 of .*can't be read: bad_json"):
        resolve(spec, open_store(spec.output.path))
    with pytest.raises(
        UserError, match=r"input\.columns: no row has all columns: prompt\.template: 'answer' is undefined; the row has"
    ):
        run_here(spec_of(world, "never", examples={"rows": SHOTS}, template="{{ examples }}{{ answer }}"))
    with pytest.raises(UserError, match=r"no row has all columns: prompt\.template: .*has no attribute 'qq'"):
        run_here(
            spec_of(world, "never", examples={"rows": SHOTS}, template="{% for e in examples %}{{ e.qq }}{% endfor %}")
        )
    assert not (world.folder / "never" / "_plan.json").exists()


def test_validate_shows_the_finished_first_prompt(world, monkeypatch, capsys):
    without_ray(monkeypatch)
    spec = spec_of(world, "shown", examples=write_shots(world, SHOTS)).model_dump(mode="json")
    assert run(spec, world.folder / "shown.yaml", "validate") == 0
    assert "  | 0:a0 1:a1 x:[4]\n" in capsys.readouterr().out


def test_the_guide_s_job_makes_the_guide_s_prompt(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text()
    rows = re.findall(r"^    (\S.*)$", guide.partition("```yaml")[0], re.MULTILINE)
    (tmp_path / "questions.csv").write_text("\n".join(rows))
    (job, *others), (shown, *_) = (re.findall(rf"```{kind}\n(.*?)```", guide, re.DOTALL) for kind in ("yaml", "text"))
    monkeypatch.chdir(tmp_path)
    spec = check_spec(yaml.safe_load(job))
    resolved = resolve(spec, open_store(spec.output.path))
    (first, second), tokenizer = islice(first_rows(resolved, None), 2), resolved.tokenizer
    assert shown.splitlines() == list(canvas_lines(resolved, [first]))[2:]
    assert tokenizer is not None and isinstance(second.made, Canvas)
    assert "(count down)\nAnswer:[8]" in prompt_text(second.made, tokenizer)
    for part in (part for part in map(yaml.safe_load, others) if "base" not in part):
        kept = {} if "template" in part["prompt"] else {"template": spec.prompt.template}
        check_spec(spec.model_dump(mode="json") | part | {"prompt": kept | part["prompt"]})


DATED = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"
ROWS: list[dict] = [{"id": str(number), "prompt": f"x = {number}"} for number in range(5)]
CHAT = {"kind": "complete", "max_new_tokens": 4, "chat": True}
ZONES = ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kolkata", "America/New_York")
"""Their clocks show up to three dates at once."""


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    save_model(tmp_path / "model", ends=[2])
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": DATED}))
    without_ray(monkeypatch)
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


def on(monkeypatch: pytest.MonkeyPatch, day: date, zone: str = "UTC") -> None:
    """From here on it is that day in UTC, on a machine in that time zone."""
    monkeypatch.setattr("draftmill.jobs.plan.resolve.today", lambda: day)
    monkeypatch.setenv("TZ", zone)
    time.tzset()


def dated_spec(folder, name: str) -> JobSpec:
    return job_spec(folder, ROWS, task=CHAT, output={"path": str(folder / name), "unit_rows": 1})


@pytest.mark.slow
def test_a_run_that_is_resumed_days_later_in_other_time_zones_has_equal_texts(folder, monkeypatch):
    on(monkeypatch, date(2026, 11, 23))
    whole = run_here(dated_spec(folder, "whole"))
    resumed: dict[str, dict] = {}
    for unit, zone in enumerate(ZONES):
        on(monkeypatch, date(2026, 11, 23 + unit), zone)
        resumed = run_here(dated_spec(folder, "resumed"), only=unit)
    assert {name: (row["prompt_tokens"], row["tokens"]) for name, row in whole.items()} == {
        name: (row["prompt_tokens"], row["tokens"]) for name, row in resumed.items()
    }
    plans = [load_plan(open_store(str(folder / name))) for name in ("whole", "resumed")]
    assert all(plan is not None and plan.results["task"]["chat_date"] == "2026-11-23" for plan in plans)
    assert run(dated_spec(folder, "resumed").model_dump(mode="json"), folder / "resumed.yaml") == 0
    assert main(["verify", str(folder / "resumed"), "--invariance", "4"]) == 0


@pytest.mark.slow
def test_another_date_is_another_job_and_the_spec_may_name_one(folder, monkeypatch):
    on(monkeypatch, date(2026, 11, 23))
    texts = []
    for number, task in enumerate((CHAT, CHAT | {"chat_date": "2026-11-23"}, CHAT | {"chat_date": "1999-01-01"})):
        output = {"path": str(folder / f"run-{number}")}
        texts.append(
            {name: row["tokens"] for name, row in run_here(job_spec(folder, ROWS, task=task, output=output)).items()}
        )
    assert texts[0] == texts[1] != texts[2]
    spec = job_spec(folder, ROWS, task=CHAT | {"chat_date": "1999-01-01"}, output={"path": str(folder / "run-0")})
    with pytest.raises(UserError, match=r"task\.chat_date was .*2026-11-23.*1999-01-01"):
        run_here(spec)
    with pytest.raises(UserError, match=r"task\.chat_date.*'soon' is not a date"):
        job_spec(folder, ROWS, task=CHAT | {"chat_date": "soon"})


def test_a_job_with_a_logical_date_prints_that_one(folder, monkeypatch):
    on(monkeypatch, date(2026, 11, 23))
    spec = dated_spec(folder, "daily/{date:%Y-%m-%d}").model_dump(mode="json")
    spec["output"]["logical_date"] = "2026-11-20"
    assert run(spec, folder / "daily.yaml") == 0
    plan = load_plan(open_store(str(folder / "daily" / "2026-11-20")))
    assert plan is not None and plan.results["task"]["chat_date"] == "2026-11-20"


def test_a_template_without_a_date_and_a_job_without_a_chat_are_the_same_on_every_day(folder, monkeypatch):
    keys = []
    for day in (date(2026, 11, 23), date(2026, 11, 24)):
        on(monkeypatch, day)
        spec = job_spec(folder, ROWS, output={"path": str(folder / str(day))})
        keys.append(resolve(spec, open_store(spec.output.path)).results)
    assert keys[0] == keys[1] and "chat_date" not in keys[0]["task"]
