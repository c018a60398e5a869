"""Dates in output paths: filled in and read back without loss, and refused where two dates would meet or leave the base path."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.jobs.harness.spec import read_eval_spec
from draftmill.jobs.spec.dated_path import (
    base_of,
    below_base,
    date_in,
    date_problem,
    depth_of,
    floor_date,
    following,
    format_date,
    period_of,
    read_date,
    with_date,
)
from draftmill.jobs.spec.job_spec import at_date, check_spec, with_logical_date
from draftmill.jobs.spec.sweep_spec import load_sweep
from draftmill.storage.errors import UserError

NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


def spec_of(path: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": {"kind": "complete"},
        "input": {"path": "in.jsonl"},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": path},
    } | changes


@pytest.mark.parametrize(
    ("path", "base", "place", "period", "depth"),
    [
        ("runs/{date:%Y-%m-%d}", "runs", "runs/2026-11-22", "day", 1),
        ("runs/{date:%F}/out", "runs", "runs/2026-11-22/out", "day", 2),
        ("s3://b/p/{date:%Y/%m/%d}", "s3://b/p", "s3://b/p/2026/11/22", "day", 3),
        ("r/{date:%Y}/{date:%m-%d}", "r", "r/2026/11-22", "day", 2),
        ("r/{date:%Y%j}", "r", "r/2026326", "day", 1),
        ("r/{date:%Y-%m}", "r", "r/2026-11", "month", 1),
        ("r/{date:%Y}", "r", "r/2026", "year", 1),
        ("r/{date:%FT%H}", "r", "r/2026-11-22T03", "hour", 1),
        ("r/{date:%F-%H%M%S}", "r", "r/2026-11-22-030405", "second", 1),
    ],
)
def test_a_date_is_filled_in_and_read_back(path: str, base: str, place: str, period: str, depth: int) -> None:
    assert date_problem(path) is None
    assert (base_of(path), with_date(path, NOW), period_of(path), depth_of(path)) == (base, place, period, depth)
    found = date_in(path, place)
    assert found is not None and with_date(path, found) == place and found <= NOW
    assert with_date(path, following(found, period)) != place
    assert date_in(path, f"{place}x") is None
    folder = place.removeprefix(f"{base}/")
    assert date_in(below_base(f"{path}//"), folder) == found and depth_of(f"{path}/") == depth, (
        "slashes at the end do not count"
    )


def test_every_day_of_years_has_a_folder_of_its_own_that_gives_the_day_back() -> None:
    days = [datetime(2023, 12, 1, tzinfo=UTC) + timedelta(days=number) for number in range(1200)]
    for path in ("r/{date:%F}", "r/{date:%Y%j}", "r/{date:%Y/%m/%d}"):
        places = [with_date(path, day) for day in days]
        assert len(set(places)) == len(days)
        assert [date_in(path, place) for place in places] == days
        assert all(following(a, "day") == b for a, b in pairwise(days))
    assert date_in("r/{date:%F}", "r/2026-02-30") is None
    assert floor_date(NOW, "r/{date:%Y-%m}") == datetime(2026, 11, 1, tzinfo=UTC)
    assert following(datetime(2026, 12, 1, tzinfo=UTC), "month") == datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("r/{date}", "is not a date"),
        ("r/{date:}", "is not a date"),
        ("r/{date:%Y-%m-%d", "is not a date"),
        ("r/{date:%A}", "'%A' is not a field"),
        ("r/{date:%G-W%V}", "'%G' is a field of weeks; give a week the date of its first day: {date:%Y-%m-%d}"),
        ("r/{date:%Y%}", "'%' is not a field"),
        ("r/{date:%d}", "two dates would have the same run directory"),
        ("r/{date:%Y-%d}", "two dates would have the same run directory"),
        ("r/{date:%Y-%m %H}", "not safe"),
        ("r/{date:%Y-%m-%H}", "two dates would have the same run directory"),
        ("r/{date:../%F}", "not safe"),
        ("r/{date:%Y//%m}", "not safe"),
        ("r/{date:_%F}", "not safe"),
        ("r/{date:%H:%M}", "not safe"),
        ("r/x-{date:%F}", "a folder of its own"),
        ("r/{date:%Y/%m}-x", "a folder of its own"),
        ("r/{date:%F}/../same", "after a date no folder may be"),
        ("r/{date:%F}/..", "after a date no folder may be"),
        ("r/{date:%Y}/../{date:%m-%d}", "after a date no folder may be"),
        ("r/{date:%F}/./x", "after a date no folder may be"),
        ("s3://bucket/r/{date:%F}//x", "after a date no folder may be"),
        ("{date:%F}", "no base path"),
        ("/{date:%F}", "no base path"),
    ],
)
def test_a_date_that_is_not_safe_or_not_unique_is_refused_with_the_key(path: str, said: str) -> None:
    with pytest.raises(UserError, match=r"^output.path: ") as refused:
        check_spec(spec_of(path))
    assert said in str(refused.value)


def test_the_inputs_of_a_recurring_job_are_not_its_own_results() -> None:
    for inputs in ("runs", "runs/**/*.parquet", "runs/*/data/*.parquet"):
        with pytest.raises(UserError, match=r"output.path: .* is inside the inputs"):
            check_spec(spec_of("runs/{date:%F}", input={"path": inputs}))
    check_spec(spec_of("runs/{date:%F}", input={"path": "landing/*.jsonl"}))


def test_a_spec_is_dated_once_by_its_logical_date_or_the_clock() -> None:
    spec = check_spec(spec_of("runs/{date:%F}"))
    assert at_date(spec, NOW).output.path == "runs/2026-11-22"
    assert at_date(spec, NOW).output.logical_date == "2026-11-22T03:04:05Z"
    chosen = with_logical_date(spec, "2026-01-31T23:30:00-01:00")
    assert at_date(chosen, NOW).output.path == "runs/2026-02-01", "the date is in UTC"
    plain = check_spec(spec_of("runs/one"))
    assert at_date(plain, NOW) is plain
    with pytest.raises(UserError, match=r"^--logical-date: .* output.path has no date"):
        with_logical_date(plain, "2026-01-31")
    with pytest.raises(UserError, match=r"^--logical-date: 'yesterday' is not a date"):
        with_logical_date(spec, "yesterday")
    with pytest.raises(UserError, match=r"^output.logical_date: .*'soon' is not a date"):
        check_spec(spec_of("runs/{date:%F}", output={"path": "runs/{date:%F}", "logical_date": "soon"}))
    again = at_date(spec, NOW).model_dump(mode="json")
    assert check_spec(again).output == at_date(spec, NOW).output, "a plan's spec is read back"


def test_inputs_have_the_date_of_their_run() -> None:
    paths = ["landing/{date:%Y/%m/%d}/*.{jsonl,csv}", "{date,time}/rows.csv"]
    dated = at_date(check_spec(spec_of("runs/{date:%F}", input={"path": paths})), NOW).input
    assert dated.path == ("landing/2026/11/22/*.{jsonl,csv}", "{date,time}/rows.csv")
    one = spec_of("runs/{date:%F}", input={"path": "in/{date:%j}.csv"})
    assert at_date(check_spec(one), NOW).input.path == "in/326.csv"


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("runs/one", {"path": "in/{date:%F}"}, "input.path: .* has a date, but output.path has none"),
        ("runs/one", {"run": "other/{date:%F}"}, "input.run: .* has a date, but output.path has none"),
        ("runs/{date:%F}", {"path": ["a", "in/{date:%Y-%m-%dT%H}"]}, "input.path.1: .*'%H' is finer than the day"),
        ("runs/{date:%Y-%m}", {"path": "in/{date:%j}"}, "input.path: .*'%j' is finer than the month"),
        ("runs/{date:%F}", {"run": "in/{date:%Q}"}, "input.run: .*'%Q' is not a field"),
        ("runs/{date:%F}", {"path": "in/{date}"}, "input.path: .* is not a date"),
        ("runs/{date:%F}", {"path": "in/{date:%F}", "since": "last_success"}, "input.since: input.path has a date"),
        ("runs/{date:%F}", {"path": "in/{date:%F}", "dedupe": "ids"}, "input.dedupe: .*input.columns.id"),
        ("in/{date:%F}", {"path": "in/{date:%F}"}, "output.path: .* is inside the inputs"),
    ],
)
def test_a_date_in_an_input_that_its_run_does_not_give_is_refused(
    path: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_spec(spec_of(path, input=given))


def test_sweeps_and_evaluations_take_no_dates(tmp_path: Path) -> None:
    base = spec_of("runs/{date:%F}", input={"path": "in.jsonl", "since": "last_success"})
    sweep = {"base": base, "grid": {"seed": [1, 2]}, "output": {"path": "sweeps/one"}}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    assert {type(case.error) for case in load_sweep(file).cases} == {UserError}
    assert "input.since: 'last_success' needs a run directory for each date" in str(load_sweep(file).cases[0].error)
    file.write_text(yaml.safe_dump(sweep | {"output": {"path": "sweeps/{date:%F}"}}))
    with pytest.raises(UserError, match=r"^output.path: .* only `draftmill run` fills in"):
        load_sweep(file)
    file.write_text(yaml.safe_dump({key: base[key] for key in ("model", "decoder", "output")}))
    with pytest.raises(UserError, match=r"^output.path: .* only `draftmill run` fills in"):
        read_eval_spec(file)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-22", "2026-11-22T00:00:00Z"),
        ("2026-11-22T03:00:00Z", "2026-11-22T03:00:00Z"),
        ("2026-11-22 03:00:00.7+01:00", "2026-11-22T02:00:00Z"),
    ],
)
def test_dates_are_read_as_schedulers_write_them(text: str, utc: str) -> None:
    assert format_date(read_date(text)) == utc
