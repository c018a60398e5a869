"""Dates in a path: `output.path: base/{date:%Y-%m-%d}` gives a recurring job a run directory for each date. Pure.

`input.path` and `input.run` may have the same date, that of their data. The folder before the date is the job's base path. The
date is in UTC, and a folder's name gives its date back.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

EXAMPLE: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""A date for checks of paths."""

PERIODS: Final = {"%Y-%m-%d": "day", "%Y-%m-%dT%H": "hour"}
"""The formats of a date in an output path, each with the period between two dates."""

_FIELDS: Final = "YmdH"
_FORM: Final = re.compile(r"\{date\b(?![^:{}]*,)([^{}]*)\}?")
"""A date in a path; `{date,time}` are alternatives of a glob."""
_ALLOWED: Final = " and ".join(f"{{date:{form}}}" for form in PERIODS)


def has_date(path: str) -> bool:
    """Whether a path has a date to fill in."""
    return _FORM.search(path) is not None


def date_problem(path: str) -> str | None:
    """What is wrong with the date in an output path; None if nothing is, or if there is none."""
    forms = list(_FORM.finditer(path))
    if not forms:
        return None
    if wrong := [form[0] for form in forms if not form[0].endswith("}") or form[1][1:] not in PERIODS]:
        return f"{path!r}: {wrong[0]!r} is not a date; allowed: {_ALLOWED}"
    if len(forms) > 1 or not re.search(r"(^|/)\0(/|$)", _FORM.sub("\0", path)):
        return f"{path!r}: the date must be a folder, below a base path of this job alone: base/{{date:%Y-%m-%d}}"
    if {"", ".", ".."} & set(path[forms[0].start() :].strip("/").split("/")):
        return f"{path!r}: after a date no folder may be '..', '.' or empty, or dates would share a run directory"
    if not base_of(path).strip("./~"):
        return f"{path!r} has no base path before the date; allowed: base/{{date:%Y-%m-%d}}"
    return None


def given_problem(path: str, output: str) -> str | None:
    """What is wrong with the dates in a path that a run reads; None if nothing is. The date is that of the `output` path."""
    forms = list(_FORM.finditer(path))
    if not forms:
        return None
    if not has_date(output):
        return f"{path!r} has a date, but output.path has none; allowed: with output.path: base/{{date:%Y-%m-%d}}"
    for form in forms:
        if not re.fullmatch(rf"\{{date:([^%{{}}]|%[{_FIELDS}])+\}}", form[0]):
            return f"{path!r}: {form[0]!r} is not a date; allowed: {_ALLOWED}, and other orders of %Y, %m, %d and %H"
        if "%H" in form[0] and period_of(output) == "day":
            return f"{path!r}: '%H' is finer than the day in output.path, of which each has one run"
    return None


def base_of(path: str) -> str:
    """The folder that holds the runs of all dates; for a path without a date the path itself."""
    form = _FORM.search(path)
    return path if form is None else path[: form.start()].rpartition("/")[0]


def below_base(path: str) -> str:
    """What of the path is below its base, without empty parts: the name of a run there, with the date still to be filled in."""
    return "/".join(filter(None, path.removeprefix(base_of(path)).split("/")))


def with_date(path: str, date: datetime) -> str:
    """The path with a date (UTC) filled in."""
    values = {"Y": f"{date.year:04}", "m": f"{date.month:02}", "d": f"{date.day:02}", "H": f"{date.hour:02}"}
    return _FORM.sub(lambda form: re.sub(f"%([{_FIELDS}])", lambda field: values[field[1]], form[1][1:]), path)


def period_of(path: str) -> str:
    """The period between two dates that an output path tells apart: day or hour."""
    form = _FORM.search(path)
    assert form is not None, path
    return PERIODS[form[1][1:]]


def date_in(path: str, place: str) -> datetime | None:
    """The date (UTC) for which `path` becomes `place`; None if there is none."""
    for found in re.finditer(r"\d{4}-\d\d-\d\d(T\d\d)?", place):
        try:
            date = read_date(found[0])
        except ValueError:  # 2026-02-30
            continue
        if with_date(path, date) == place:
            return date
    return None


def depth_of(path: str) -> int:
    """How many folders a run directory is below the base path."""
    return below_base(path).count("/") + 1


def following(date: datetime, period: str) -> datetime:
    """The date one period, day or hour, later."""
    return date + timedelta(**{f"{period}s": 1})


def floor_date(date: datetime, path: str) -> datetime:
    """The date without what the path does not show of it."""
    return date.replace(hour=date.hour * (period_of(path) == "hour"), minute=0, second=0, microsecond=0)


def read_date(text: str) -> datetime:
    """A date or time as users and schedulers write it (ISO 8601), in UTC and whole seconds; ValueError if it is none."""
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a date; allowed: 2026-11-22, 2026-11-22T03:00:00Z, 2026-11-22T03:00:00+01:00"
        ) from None
    date = date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
    return date.replace(microsecond=0)


def format_date(date: datetime) -> str:
    """A date as it is stored: 2026-11-22T03:00:00Z."""
    return date.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
