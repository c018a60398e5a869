"""Schedules: what five fields mean beside a plain reading of cron's rules, and what is refused because programs differ."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from draftmill.jobs.remote.manifest_options import check_time_zone, parse_schedule
from draftmill.storage.errors import UserError

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
NAMES = {name: str(index) for index, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))} | {
    name: str(index) for index, name in enumerate(MONTHS, start=1)
}


def plainly(text: str, moment: datetime) -> bool:
    """Whether cron starts a job in this minute, by crontab(5): fields must match; two restricted day fields match by either."""

    def one(piece: str, value: int, first: int, last: int) -> bool:
        body, _, step = piece.partition("/")
        low, _, high = (f"{first}-{last}" if body == "*" else body).partition("-")
        return int(low) <= value <= int(high or low) and (value - int(low)) % int(step or 1) == 0

    def field(part: str, value: int, first: int, last: int) -> bool:
        return any(one(piece, value, first, last) for piece in part.split(","))

    for name, number in NAMES.items():
        text = text.upper().replace(name, number)
    minute, hour, day, month, weekday = text.split()
    of_week = moment.isoweekday() % 7
    on_day = field(day, moment.day, 1, 31)
    on_weekday = field(weekday, of_week, 0, 6) or (of_week == 0 and field(weekday, 7, 0, 7))
    days = (on_day or on_weekday) if day != "*" and weekday != "*" else (on_day and on_weekday)
    return (
        field(minute, moment.minute, 0, 59)
        and field(hour, moment.hour, 0, 23)
        and field(month, moment.month, 1, 12)
        and days
    )


SCHEDULES = [
    "0 3 * * *", "*/7 * * * *", "5-50/15 1,13 * * *", "0 0 1 1 *", "30 6 * * MON-FRI", "0 12 13 * 5", "0 0 31 * *",
    "15 4 * JAN,JUL SUN", "0 22 * * 5-7", "59 23 29 2 *", "0 8 1-7 * 1", "* * * * 7", "0 */5 */2 * *", "0 0 * * */2",
]  # fmt: skip


@pytest.mark.parametrize("text", SCHEDULES)
@pytest.mark.slow
def test_the_rewritten_text_means_what_cron_says(text: str) -> None:
    rewritten = parse_schedule(text)
    for hours in range(0, 24 * 366 * 4, 5):
        for minutes in (0, 7, 15, 30, 59):
            moment = datetime(2026, 1, 1) + timedelta(hours=hours, minutes=minutes)
            assert plainly(rewritten, moment) == plainly(text, moment)


@pytest.mark.parametrize("text", SCHEDULES)
def test_the_rewritten_text_has_neither_names_nor_day_seven(text: str) -> None:
    """Kubernetes reads no 7, and some programs no names in lists."""
    rewritten = parse_schedule(text)
    assert not any(character.isalpha() for character in rewritten)
    assert "7" not in rewritten.split()[4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "five fields"),
        ("0 3 * *", "five fields"),
        ("0 3 * * * *", "five fields"),
        ("@reboot", "five fields"),
        ("60 3 * * *", "'60' is not a minute"),
        ("0 24 * * *", "'24' is not a hour"),
        ("0 0 0 * *", "'0' is not a day of month"),
        ("0 0 * 13 *", "'13' is not a month"),
        ("0 0 * * 8", "'8' is not a day of week"),
        ("0 0 * * MOON", "'MOON' is not a day of week"),
        ("5-1 * * * *", "'5-1' is not a minute"),
        ("*/0 * * * *", "'*/0' is not a minute"),
        ("5/10 * * * *", "'5/10' is not a minute"),
        ("0 0 ? * *", "'?' is not a day of month"),
        ("0 0 L * *", "'L' is not a day of month"),
        ("H H * * *", "'H' is not a minute"),
        ("1,,2 * * * *", "'' is not a minute"),
        ("-1 * * * *", "'-1' is not a minute"),
        ("٣ * * * *", "is not a minute"),
        ("0 0 30 2 *", "never runs"),
        ("0 0 31 4,6 *", "never runs"),
        ("0 0 */2 * 1", "differently"),
        ("TZ=UTC 0 3 * * *", "five fields"),
        ("0 3 * * *\n* * * * *", "five fields"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_part_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UserError, match="--schedule") as refused:
        parse_schedule(text)
    assert said in str(refused.value)


@pytest.mark.parametrize("zone", ["", "Local", "Europe/Atlantis", "../etc/passwd", "UTC\n", "Europe/Berlin; rm"])
def test_a_time_zone_that_does_not_exist_is_refused(zone: str) -> None:
    with pytest.raises(UserError, match="--time-zone"):
        check_time_zone(zone)


@pytest.mark.parametrize("zone", ["UTC", "Etc/UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5"])
def test_time_zones_of_the_database_are_allowed(zone: str) -> None:
    assert check_time_zone(zone) == zone
