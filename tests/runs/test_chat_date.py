"""A chat template that prints the date prints that of the plan: in any time zone, over midnight, after a resume."""

import json
import time
from datetime import date

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.plan import resolve
from draftmill.jobs.plan.plan import load_plan
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.runs.causal_jobs import TOKENIZER, job_spec, run_here, save_model
from tests.runs.jobs_here import run, without_ray

TEMPLATE = "{{ strftime_now('%d %b %Y %H:%M') }}{% for m in messages %}{{ m.content }}{% endfor %}"
ROWS: list[dict] = [{"id": str(number), "prompt": f"x = {number}"} for number in range(5)]
CHAT = {"kind": "complete", "max_new_tokens": 4, "chat": True}
ZONES = ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kolkata", "America/New_York")
"""Their clocks show up to three dates at once."""


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    save_model(tmp_path / "model", ends=[2])
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    without_ray(monkeypatch)
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


def on(monkeypatch: pytest.MonkeyPatch, day: date, zone: str = "UTC") -> None:
    """From here on it is that day in UTC, on a machine in that time zone."""
    monkeypatch.setattr(resolve, "today", lambda: day)
    monkeypatch.setenv("TZ", zone)
    time.tzset()


def spec_of(folder, name: str) -> JobSpec:
    return job_spec(folder, ROWS, task=CHAT, output={"path": str(folder / name), "unit_rows": 1})


@pytest.mark.slow
def test_a_run_that_is_resumed_days_later_in_other_time_zones_has_equal_texts(folder, monkeypatch):
    on(monkeypatch, date(2026, 11, 23))
    whole = run_here(spec_of(folder, "whole"))
    resumed: dict[str, dict] = {}
    for unit, zone in enumerate(ZONES):
        on(monkeypatch, date(2026, 11, 23 + unit), zone)
        resumed = run_here(spec_of(folder, "resumed"), only=unit)
    assert {name: (row["prompt_tokens"], row["tokens"]) for name, row in whole.items()} == {
        name: (row["prompt_tokens"], row["tokens"]) for name, row in resumed.items()
    }
    plans = [load_plan(open_store(str(folder / name))) for name in ("whole", "resumed")]
    assert all(plan is not None and plan.results["task"]["chat_date"] == "2026-11-23" for plan in plans)
    assert run(spec_of(folder, "resumed").model_dump(mode="json"), folder / "resumed.yaml") == 0
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
    spec = spec_of(folder, "daily/{date:%Y-%m-%d}").model_dump(mode="json")
    spec["output"]["logical_date"] = "2026-11-20"
    assert run(spec, folder / "daily.yaml") == 0
    plan = load_plan(open_store(str(folder / "daily" / "2026-11-20")))
    assert plan is not None and plan.results["task"]["chat_date"] == "2026-11-20"


def test_a_template_without_a_date_and_a_job_without_a_chat_are_the_same_on_every_day(folder, monkeypatch):
    keys = []
    for day in (date(2026, 11, 23), date(2026, 11, 24)):
        on(monkeypatch, day)
        spec = job_spec(folder, ROWS, output={"path": str(folder / str(day))})
        keys.append(resolve.resolve(spec, open_store(spec.output.path)).results)
    assert keys[0] == keys[1] and "chat_date" not in keys[0]["task"]
