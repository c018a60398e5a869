"""Dates in a path: `output.path: base/{date:%Y-%m-%d}` gives a recurring job a run directory for each date. Pure.

`input.path` and `input.run` may have the same date, that of their data. The folder before the first date is the job's base path.
The date is in UTC. A format has only fields that mean the same in every locale, and together they name one date, so that no two
dates share a run directory and a folder's name gives its date back.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

EXAMPLE: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""A date for checks of paths."""

_DIGITS: Final = {"Y": 4, "m": 2, "d": 2, "j": 3, "H": 2, "M": 2, "S": 2}
"""The fields of a format, from coarse to fine, with the digits of each."""

_WEEKS: Final = tuple("GVuUWw")

_DAYS: Final = ("Ymd", "Yj")
_DATES: Final = {"Y": "year", "Ym": "month"} | dict.fromkeys(_DAYS, "day")
"""The sets of date fields that name one date, with the period between two dates."""

_TIMES: Final = {"": "day", "H": "hour", "HM": "minute", "HMS": "second"}
"""The sets of time fields, which need a day."""

_LAST_FIELD: Final = {"year": "Y", "month": "m", "day": "j", "hour": "H", "minute": "M", "second": "S"}
"""The last field, in the order of _DIGITS, that a period decides."""

_FORM: Final = re.compile(r"\{date\b(?![^:{}]*,)([^{}]*)\}?")
"""A date in a path; `{date,time}` are alternatives of a glob."""
_SAFE: Final = re.compile(r"[A-Za-z0-9._=+,-]+")
_ALLOWED: Final = "{date:%Y-%m-%d}, with %Y %m %d %j %H %M %S %F"


def has_date(path: str) -> bool:
    """Whether a path has a date to fill in."""
    return _FORM.search(path) is not None


def date_problem(path: str) -> str | None:
    """What is wrong with the dates in a path; None if nothing is, or if there are none."""
    if not has_date(path):
        return None
    for form in _FORM.finditer(path):
        if problem := _form_problem(form[0], form[1]):
            return f"{path!r}: {problem}"
    if any("\0" in part and part != "\0" for part in _FORM.sub("\0", path).split("/")):
        return (
            f"{path!r}: a date must be a folder of its own, below a base path that belongs to this job alone: "
            "base/{date:%Y-%m-%d}"
        )
    if {"", ".", ".."} & set(path[len(base_of(path)) :].strip("/").split("/")):
        return f"{path!r}: after a date no folder may be '..', '.' or empty, or dates would share a run directory"
    if not base_of(path).strip("./~"):
        return f"{path!r} has no base path before the date; allowed: base/{{date:%Y-%m-%d}}"
    if _period(path) is None:
        return (
            f"{path!r}: two dates would have the same run directory, or the fields do not fit together; allowed are year, month "
            "and day (%Y %m %d), also as %Y %j, then hour, minute and second (%H %M %S); each may be left out with all after it"
        )
    if date_in(path, with_date(path, EXAMPLE)) is None:
        return f"{path!r}: the date can't be read back from the folder's name; separate its fields"
    return None


def given_problem(path: str, output: str) -> str | None:
    """What is wrong with the dates in a path that a run reads; None if nothing is. The date is that of the `output` path."""
    forms = list(_FORM.finditer(path))
    if not forms:
        return None
    if not has_date(output):
        return f"{path!r} has a date, but output.path has none; allowed: with output.path: base/{{date:%Y-%m-%d}}"
    if problem := next(filter(None, (_form_problem(form[0], form[1]) for form in forms)), None):
        return f"{path!r}: {problem}"
    period = period_of(output)
    fields = "".join(_DIGITS)
    shown = fields[: fields.index(_LAST_FIELD[period]) + 1]
    more = [field for form in forms for field in re.findall("%(.)", _expand(form[1])) if field not in shown]
    if more:
        return f"{path!r}: '%{more[0]}' is finer than the {period} in output.path, of which each has one run"
    return None


def _form_problem(form: str, inside: str) -> str | None:
    if not form.endswith("}") or not inside.startswith(":") or len(inside) == 1:
        return f"{form!r} is not a date; allowed: {_ALLOWED}"
    rest = _expand(inside[1:])
    for field in re.findall(r"%(.?)", rest):
        if field in _WEEKS:
            return f"'%{field}' is a field of weeks; give a week the date of its first day: {{date:%Y-%m-%d}}"
        if field not in _DIGITS:
            return f"'%{field}' is not a field of a date; allowed: {_ALLOWED}"
    for name in re.sub(r"%.", "0", rest).split("/"):
        if not _SAFE.fullmatch(name) or name[0] in "._":
            return (
                f"{form!r} gives a name that is not safe for a folder; allowed beside the fields: letters, digits, . = + , - _ "
                "and /, not starting with . or _"
            )
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
    return _FORM.sub(lambda form: _render(form[1][1:], date), path)


def period_of(path: str) -> str:
    """The period between two dates that the path tells apart: year, month, day, hour, minute or second."""
    period = _period(path)
    assert period is not None, path
    return period


def date_in(path: str, place: str) -> datetime | None:
    """The date (UTC) for which `path` becomes `place`; None if there is none."""
    match = _pattern(path).fullmatch(place)
    if match is None:
        return None
    values = {key: int(value) for key, value in match.groupdict().items()}
    try:
        start = datetime(values["Y"], values.get("m", 1), values.get("d", 1), tzinfo=UTC)
        start += timedelta(days=values.get("j", 1) - 1)
        date = start.replace(hour=values.get("H", 0), minute=values.get("M", 0), second=values.get("S", 0))
    except ValueError:  # 2026-02-30
        return None
    return date if with_date(path, date) == place else None


def depth_of(path: str) -> int:
    """How many folders a run directory is below the base path."""
    return with_date(below_base(path), EXAMPLE).count("/") + 1


def following(date: datetime, period: str) -> datetime:
    """The date one period later."""
    if period == "year":
        return date.replace(year=date.year + 1)
    if period == "month":
        return date.replace(year=date.year + date.month // 12, month=date.month % 12 + 1)
    return date + timedelta(**{f"{period}s": 1})


def floor_date(date: datetime, path: str) -> datetime:
    """The date without what the path does not show of it."""
    floor = date_in(path, with_date(path, date))
    assert floor is not None
    return floor


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


# ---- formats


def _expand(form: str) -> str:
    """The format without fields that stand for several others."""
    return form.replace("%F", "%Y-%m-%d")


def _render(form: str, date: datetime) -> str:
    values = dict(zip("YmdHMSj", (*date.timetuple()[:6], date.timetuple().tm_yday), strict=True))
    return re.sub(r"%(.)", lambda field: f"{values[field[1]]:0{_DIGITS[field[1]]}d}", _expand(form))


@lru_cache(maxsize=64)
def _pattern(path: str) -> re.Pattern[str]:
    """A pattern of the paths with a date, with a group for each field. A field that occurs twice must have the same value."""
    out, at, fields = "", 0, set[str]()
    for form in _FORM.finditer(path):
        out += re.escape(path[at : form.start()])
        for piece in re.split(r"(%.)", _expand(form[1][1:])):
            if not piece.startswith("%"):
                out += re.escape(piece)
            elif (name := piece[1]) in fields:
                out += f"(?P={name})"
            else:
                fields.add(name)
                out += rf"(?P<{name}>\d{{{_DIGITS[name]}}})"
        at = form.end()
    return re.compile(out + re.escape(path[at:]))


def _period(path: str) -> str | None:
    fields = _pattern(path).groupindex.keys()
    dates = next((names for names in _DATES if set(names) == fields - set("HMS")), None)
    times = next((names for names in _TIMES if set(names) == fields & set("HMS")), None)
    if dates is None or times is None or (times and dates not in _DAYS):
        return None
    return _TIMES[times] if times else _DATES[dates]
