"""When a job runs: a cron expression, checked, in the form that every cron program reads alike, and as systemd's calendar.

Cron programs differ: day 7, names in lists, `*/2` beside another day field. What they read differently is rewritten or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from draftmill.storage.errors import UserError

OPTION = "--schedule"

MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a cron expression: its name, its limits, and the names that stand for numbers from `low`."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


FIELDS = (
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of week", 0, 7, DAYS),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron expression: the values of each field, and its text. A day field that is `*` restricts nothing."""

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]
    any_day: bool
    any_weekday: bool

    @property
    def gap_s(self) -> int:
        """The least number of seconds between two starts."""
        times = sorted(hour * 60 + minute for hour in self.hours for minute in self.minutes)
        return 60 * min(later - earlier for earlier, later in zip(times, [*times[1:], times[0] + 1440], strict=True))

    def calendars(self, time_zone: str | None) -> list[str]:
        """The same times as systemd's OnCalendar values: two if cron matches days of the month or days of the week."""
        zone = f" {time_zone}" if time_zone else ""
        clock = f"{_values(self.hours, 24)}:{_values(self.minutes, 60)}:00{zone}"
        months = _values(self.months, 12)
        by_day = f"*-{months}-{_values(self.days, 31)} {clock}"
        by_weekday = f"{','.join(DAYS[day].title() for day in self.weekdays)} *-{months}-* {clock}"
        if self.any_weekday:
            return [by_day]
        return [by_weekday] if self.any_day else [by_day, by_weekday]


def _values(values: tuple[int, ...], all_of_them: int) -> str:
    return "*" if len(values) == all_of_them else ",".join(f"{value:02d}" for value in values)


def parse_schedule(text: str) -> Schedule:
    """Return a checked schedule; UserError if the text is not one that all cron programs read alike."""
    fields = MACROS.get(text.strip().lower(), text).split()
    if len(fields) != len(FIELDS):
        raise _wrong(
            text,
            "it must have five fields: minute, hour, day of month, month, day of week, "
            "for example '0 3 * * *' for every day at 03:00; or one of " + ", ".join(MACROS),
        )
    values = [_parse(text, part, field) for part, field in zip(fields, FIELDS, strict=True)]
    values[4] = tuple(sorted({day % 7 for day in values[4]}))
    any_day, any_weekday = fields[2] == "*", fields[4] == "*"
    _check_days(text, fields, values, any_day=any_day, any_weekday=any_weekday)
    rewritten = [*fields[:4], "*" if any_weekday else ",".join(map(str, values[4]))]
    rewritten[3] = fields[3] if not re.search("[A-Za-z]", fields[3]) else ",".join(map(str, values[3]))
    minutes, hours, days, months, weekdays = values
    return Schedule(" ".join(rewritten), minutes, hours, days, months, weekdays, any_day, any_weekday)


def _check_days(
    text: str, fields: list[str], values: list[tuple[int, ...]], *, any_day: bool, any_weekday: bool
) -> None:
    starred = any(part.startswith("*/") for part in (fields[2], fields[4]))
    if starred and not any_day and not any_weekday:
        raise _wrong(
            text,
            "cron programs read '*/N' in one day field beside another day field differently; write the days as a list",
        )
    if any_weekday and all(min(values[2]) > LONGEST_MONTHS[month - 1] for month in values[3]):
        raise _wrong(text, "none of its months has such a day, so that it never runs")


def _parse(text: str, part: str, field: Field) -> tuple[int, ...]:
    chosen: set[int] = set()
    for piece in part.split(","):
        match = re.fullmatch(r"(\*|[0-9A-Za-z]+)(?:-([0-9A-Za-z]+))?(?:/([0-9]{1,3}))?", piece)
        if match is None or (match[1] == "*" and match[2]) or (match[3] and match[1] != "*" and not match[2]):
            raise _wrong(text, f"{piece!r} is not a {field.name}; allowed: *, N, A-B, */N, A-B/N, and lists of them")
        low = field.low if match[1] == "*" else _number(text, match[1], field)
        high = _last(field) if match[1] == "*" else _number(text, match[2], field) if match[2] else low
        step = int(match[3] or 1)
        if low > high or step == 0:
            raise _wrong(text, f"{piece!r} is not a {field.name}: it has no value")
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))


def _last(field: Field) -> int:
    return 6 if field.names is DAYS else field.high


def _number(text: str, word: str, field: Field) -> int:
    if word.upper() in field.names:
        return field.names.index(word.upper()) + field.low
    if not word.isdecimal() or not word.isascii() or not field.low <= int(word[:4]) <= field.high:
        names = f", {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise _wrong(text, f"{word!r} is not a {field.name}; allowed: {field.low} to {field.high}{names}")
    return int(word)


def _wrong(text: str, why: str) -> UserError:
    return UserError(f"{text[:80]!r} is not a schedule: {why}", field=OPTION)


def check_time_zone(name: str) -> str:
    """Return the name of a time zone; UserError if there is none of that name."""
    if not re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", name) or name == "Local" or not _is_zone(name):
        raise UserError(
            f"{name[:80]!r} is not a time zone; allowed: names like UTC or Europe/Berlin", field="--time-zone"
        )
    return name


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return not _has_zones()
    return True


def _has_zones() -> bool:
    """Whether this machine has a database of time zones; without one a name can't be checked."""
    try:
        ZoneInfo("UTC")
    except (ZoneInfoNotFoundError, OSError):
        return False
    return True
