"""Dates in output paths: filled in and read back without loss, and refused where two dates would meet or leave the base path."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import yaml

from draftmill.jobs.config.dates import (
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
from draftmill.jobs.config.spec import at_date, check_spec, with_logical_date
from draftmill.jobs.config.sweep_spec import load_sweep
from draftmill.jobs.eval.spec import read_eval_spec
from draftmill.storage.errors import UserError
from tests.jobs.specs import completion

NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


def spec_of(path: str, **changes) -> dict:
    return completion(output={"path": path}) | changes


@pytest.mark.parametrize(
    ("path", "base", "place", "period", "depth"),
    [
        ("runs/{date:%Y-%m-%d}", "runs", "runs/2026-11-22", "day", 1),
        ("runs/{date:%Y-%m-%d}/out", "runs", "runs/2026-11-22/out", "day", 2),
        ("s3://b/2026-01-01/{date:%Y-%m-%d}/x", "s3://b/2026-01-01", "s3://b/2026-01-01/2026-11-22/x", "day", 2),
        ("r/{date:%Y-%m-%dT%H}", "r", "r/2026-11-22T03", "hour", 1),
    ],
)
def test_a_date_is_filled_in_and_read_back(path, base, place, period, depth):
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


def test_every_day_of_years_has_a_folder_of_its_own_that_gives_the_day_back():
    days = [datetime(2023, 12, 1, tzinfo=UTC) + timedelta(days=number) for number in range(1200)]
    path = "r/{date:%Y-%m-%d}"
    places = [with_date(path, day) for day in days]
    assert len(set(places)) == len(days)
    assert [date_in(path, place) for place in places] == days
    assert all(following(a, "day") == b for a, b in pairwise(days))
    assert date_in(path, "r/2026-02-30") is None
    assert floor_date(NOW, path) == datetime(2026, 11, 22, tzinfo=UTC)
    assert floor_date(NOW, "r/{date:%Y-%m-%dT%H}") == datetime(2026, 11, 22, 3, tzinfo=UTC)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("r/{date}", "is not a date"),
        ("r/{date:}", "is not a date"),
        ("r/{date:%Y-%m-%d", "is not a date"),
        ("r/{date:%A}", "'{date:%A}' is not a date; allowed: {date:%Y-%m-%d} and {date:%Y-%m-%dT%H}"),
        ("r/{date:%Y-%m}", "is not a date"),
        ("r/{date:%Y/%m/%d}", "is not a date"),
        ("r/x-{date:%Y-%m-%d}", "must be a folder"),
        ("r/{date:%Y-%m-%d}-x", "must be a folder"),
        ("r/{date:%Y-%m-%d}/{date:%Y-%m-%d}", "must be a folder"),
        ("r/{date:%Y-%m-%d}/../same", "after a date no folder may be"),
        ("r/{date:%Y-%m-%d}/..", "after a date no folder may be"),
        ("r/{date:%Y-%m-%d}/./x", "after a date no folder may be"),
        ("s3://bucket/r/{date:%Y-%m-%d}//x", "after a date no folder may be"),
        ("{date:%Y-%m-%d}", "no base path"),
        ("/{date:%Y-%m-%d}", "no base path"),
    ],
)
def test_a_date_that_is_not_safe_or_not_unique_is_refused_with_the_key(path, said):
    with pytest.raises(UserError, match=r"^output.path: ") as refused:
        check_spec(spec_of(path))
    assert said in str(refused.value)


def test_the_inputs_of_a_recurring_job_are_not_its_own_results():
    for inputs in ("runs", "runs/**/*.parquet", "runs/*/data/*.parquet"):
        with pytest.raises(UserError, match=r"output.path: .* is inside the inputs"):
            check_spec(spec_of("runs/{date:%Y-%m-%d}", input={"path": inputs}))
    check_spec(spec_of("runs/{date:%Y-%m-%d}", input={"path": "landing/*.jsonl"}))


def test_a_spec_is_dated_once_by_its_logical_date_or_the_clock():
    spec = check_spec(spec_of("runs/{date:%Y-%m-%d}"))
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
        check_spec(spec_of("runs/{date:%Y-%m-%d}", output={"path": "runs/{date:%Y-%m-%d}", "logical_date": "soon"}))
    again = at_date(spec, NOW).model_dump(mode="json")
    assert check_spec(again).output == at_date(spec, NOW).output, "a plan's spec is read back"


def test_inputs_have_the_date_of_their_run():
    paths = ["landing/{date:%Y/%m/%d}/*.{jsonl,csv}", "{date,time}/rows.csv"]
    dated = at_date(check_spec(spec_of("runs/{date:%Y-%m-%d}", input={"path": paths})), NOW).input
    assert dated.path == ("landing/2026/11/22/*.{jsonl,csv}", "{date,time}/rows.csv")
    one = spec_of("runs/{date:%Y-%m-%d}", input={"path": "in/day={date:%d}.csv"})
    assert at_date(check_spec(one), NOW).input.path == "in/day=22.csv"


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("runs/one", {"path": "in/{date:%Y-%m-%d}"}, "input.path: .* has a date, but output.path has none"),
        ("runs/one", {"run": "other/{date:%Y-%m-%d}"}, "input.run: .* has a date, but output.path has none"),
        (
            "runs/{date:%Y-%m-%d}",
            {"path": ["a", "in/{date:%Y-%m-%dT%H}"]},
            "input.path.1: .*'%H' is finer than the day",
        ),
        ("runs/{date:%Y-%m-%d}", {"run": "in/{date:%Q}"}, "input.run: .* is not a date"),
        ("runs/{date:%Y-%m-%d}", {"path": "in/{date}"}, "input.path: .* is not a date"),
        (
            "runs/{date:%Y-%m-%d}",
            {"path": "in/{date:%Y-%m-%d}", "since": "last_success"},
            "input.since: input.path has a date",
        ),
        ("runs/{date:%Y-%m-%d}", {"path": "in/{date:%Y-%m-%d}", "dedupe": "ids"}, "input.dedupe: .*input.columns.id"),
        ("in/{date:%Y-%m-%d}", {"path": "in/{date:%Y-%m-%d}"}, "output.path: .* is inside the inputs"),
    ],
)
def test_a_date_in_an_input_that_its_run_does_not_give_is_refused(path, given, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check_spec(spec_of(path, input=given))


def test_sweeps_and_evaluations_take_no_dates(tmp_path):
    base = spec_of("runs/{date:%Y-%m-%d}", input={"path": "in.jsonl", "since": "last_success"})
    sweep = {"base": base, "grid": {"seed": [1, 2]}, "output": {"path": "sweeps/one"}}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    assert {type(case.error) for case in load_sweep(file).cases} == {UserError}
    assert "input.since: 'last_success' needs a run directory for each date" in str(load_sweep(file).cases[0].error)
    file.write_text(yaml.safe_dump(sweep | {"output": {"path": "sweeps/{date:%Y-%m-%d}"}}))
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
def test_dates_are_read_as_schedulers_write_them(text, utc):
    assert format_date(read_date(text)) == utc
