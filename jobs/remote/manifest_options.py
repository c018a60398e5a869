"""The options of `draftmill manifest`: which kinds take which, what they may be, and their defaults.

A schedule is a cron expression in the form that every cron program reads alike. Cron programs differ: day 7, names in lists,
`*/2` beside another day field. What they read differently is rewritten or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import available_timezones

from draftmill.jobs.config.dates import read_date
from draftmill.jobs.remote.templates import check_printable
from draftmill.storage.errors import UserError

KINDS = ("rayjob", "raycluster", "cronjob", "slurm", "cron")

OWN_CLUSTER = frozenset({"rayjob", "raycluster"})
KUBERNETES = OWN_CLUSTER | {"cronjob"}
NODES = OWN_CLUSTER | {"slurm"}
HERE = frozenset({"slurm", "cron"})
EVERY = frozenset(KINDS)

APPLIES = {
    "logical_date": frozenset({"rayjob"}),
    "schedule": frozenset({"cronjob", "slurm", "cron"}),
    "time_zone": frozenset({"cronjob"}),
    "nodes": NODES,
    "max_nodes": OWN_CLUSTER,
    "cpus_per_node": NODES,
    "gpus_per_node": NODES,
    "memory_per_node": NODES,
    "time_limit": EVERY - {"raycluster"},
    "retries": EVERY - {"raycluster", "cron"},
    "image": KUBERNETES,
    "namespace": KUBERNETES,
    "service_account": KUBERNETES,
    "volume": OWN_CLUSTER,
    "secret": EVERY,
    "auth": EVERY,
    "shared_path": EVERY,
    "head_address": frozenset({"cronjob", "cron"}),
    "ray_cluster": frozenset({"cronjob"}),
    "account": frozenset({"slurm"}),
    "partition": frozenset({"slurm"}),
    "user": frozenset({"cron"}),
    "program": HERE,
    "directory": HERE,
}
"""The kinds that each option applies to. An option that would do nothing is refused."""

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Options:
    """The options as given; None and empty where the command line has none. `time_limit` is in seconds."""

    kind: str
    name: str | None = None
    logical_date: str | None = None
    schedule: str | None = None
    time_zone: str | None = None
    nodes: int | None = None
    max_nodes: int | None = None
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    memory_per_node: str | None = None
    time_limit: str | None = None
    retries: int | None = None
    image: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    volume: tuple[str, ...] = ()
    secret: str | None = None
    auth: str | None = None
    shared_path: tuple[str, ...] = ()
    head_address: str | None = None
    ray_cluster: str | None = None
    account: str | None = None
    partition: str | None = None
    user: str | None = None
    program: str | None = None
    directory: str | None = None

    @property
    def times(self) -> str:
        """The schedule, as every cron program reads it; without one each day at 03:00."""
        return parse_schedule("0 3 * * *" if self.schedule is None else self.schedule)

    @property
    def limit_s(self) -> int:
        """The time limit of one run in seconds; without one a day."""
        return 86400 if self.time_limit is None else duration_s(self.time_limit)

    @property
    def tries_again(self) -> int:
        """How often a run that did not finish is started again; without the option 3 times."""
        return 3 if self.retries is None else self.retries

    @property
    def memory(self) -> str:
        """The memory of a node; without the option 8Gi."""
        return self.memory_per_node or "8Gi"

    @property
    def auth_mode(self) -> str:
        """RAY_AUTH_MODE: token, or disabled if asked."""
        return self.auth or "token"


def option_name(field: str) -> str:
    """`time_zone` as it is typed: --time-zone."""
    return f"--{field.replace('_', '-')}"


PATTERNS = {
    "image": (r"[a-z0-9][A-Za-z0-9._:/@-]{0,254}", "an image like registry.example/draftmill:0.1.0"),
    "namespace": (r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lower-case letters, digits and -"),
    "service_account": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, - and ."),
    "ray_cluster": (r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", "lower-case letters, digits and -, at most 53"),
    "account": (r"[A-Za-z0-9._,+-]+", "letters, digits and . _ , + -"),
    "partition": (r"[A-Za-z0-9._,+-]+", "letters, digits and . _ , + -"),
    "user": (r"[a-z_][a-z0-9_.-]{0,31}", "the name of a user"),
    "memory_per_node": (rf"[1-9]\d{{0,8}}({'|'.join(BYTES)})", "a whole number with a unit, like 16Gi"),
    "auth": (r"token|disabled", "token, disabled"),
}
"""What values may be, as a pattern and in words."""


def check_options(options: Options) -> Options:
    """Return the options; UserError for the first that does not apply to the kind or has a value that can't be."""
    for field, kinds in APPLIES.items():
        value = getattr(options, field)
        if value is not None and value != () and options.kind not in kinds:
            raise UserError(
                f"does not apply to {options.kind}; it applies to {', '.join(kind for kind in KINDS if kind in kinds)}",
                field=option_name(field),
            )
        for text in value if isinstance(value, tuple) else (value,):
            if not isinstance(text, str):
                continue
            check_printable(text, option_name(field))
            if field in PATTERNS and not re.fullmatch(PATTERNS[field][0], text, re.ASCII):
                raise UserError(
                    f"{text[:80]!r} is not allowed; allowed: {PATTERNS[field][1]}", field=option_name(field)
                )
    _check_numbers(options)
    checks: dict[str, Callable[[str], object]] = {
        "time_limit": duration_s, "logical_date": _read_date, "schedule": parse_schedule, "time_zone": check_time_zone
    }  # fmt: skip
    for field, check in checks.items():
        if (value := getattr(options, field)) is not None:
            check(value)
    return options


def _check_numbers(options: Options) -> None:
    for field in ("nodes", "max_nodes", "cpus_per_node"):
        if getattr(options, field) == 0:
            raise UserError("0 is not allowed; allowed: a whole number from 1", field=option_name(field))
    if options.max_nodes is not None and options.max_nodes < (options.nodes or 1):
        raise UserError(
            f"{options.max_nodes} is less than --nodes; allowed: {options.nodes or 1} or more", field="--max-nodes"
        )


def _read_date(text: str) -> datetime:
    try:
        return read_date(text)
    except ValueError as error:
        raise UserError(str(error), field="--logical-date") from None


def duration_s(text: str) -> int:
    """Seconds in a duration like 90s, 30m, 12h, 2d; UserError if it is none or shorter than a minute."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text, re.ASCII)
    seconds = int(match[1]) * UNITS_S[match[2] or "s"] if match else 0
    if not 120 <= seconds <= 365 * 86400:
        raise UserError(
            f"{text[:80]!r} is not allowed; allowed: a duration from 2m to 365d, like 90m or 12h", field="--time-limit"
        )
    return seconds


def size_bytes(text: str) -> int:
    """Bytes in a checked size like 16Gi."""
    unit = text.lstrip("0123456789")
    return int(text.removesuffix(unit)) * BYTES[unit]


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


def parse_schedule(text: str) -> str:
    """Return a schedule without names and day 7; UserError if the text is not one that all cron programs read alike."""
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
    return " ".join(rewritten)


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
        last = 6 if field.names is DAYS else field.high
        high = last if match[1] == "*" else _number(text, match[2], field) if match[2] else low
        step = int(match[3] or 1)
        if low > high or step == 0:
            raise _wrong(text, f"{piece!r} is not a {field.name}: it has no value")
        chosen.update(range(low, high + 1, step))
    return tuple(sorted(chosen))


def _number(text: str, word: str, field: Field) -> int:
    if word.upper() in field.names:
        return field.names.index(word.upper()) + field.low
    if not word.isdecimal() or not word.isascii() or not field.low <= int(word[:4]) <= field.high:
        names = f", {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise _wrong(text, f"{word!r} is not a {field.name}; allowed: {field.low} to {field.high}{names}")
    return int(word)


def _wrong(text: str, why: str) -> UserError:
    return UserError(f"{text[:80]!r} is not a schedule: {why}", field="--schedule")


def check_time_zone(name: str) -> str:
    """Return the name of a time zone; UserError if there is none of that name, as far as this machine knows their names."""
    names = available_timezones()
    is_name = re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", name) is not None and name != "Local"
    if not is_name or (names and name not in names):
        raise UserError(
            f"{name[:80]!r} is not a time zone; allowed: names like UTC or Europe/Berlin", field="--time-zone"
        )
    return name
