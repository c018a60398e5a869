"""The options of `draftmill manifest`: which kinds take which, what they may be, and their defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from draftmill.jobs.manifests.quoting import check_printable
from draftmill.jobs.manifests.schedule import Schedule, check_time_zone, parse_schedule
from draftmill.jobs.spec.dated_path import read_date, written
from draftmill.storage.errors import UserError

Kind = Literal["rayjob", "raycronjob", "raycluster", "cronjob", "slurm", "cron", "systemd", "ray-up"]
KINDS: tuple[str, ...] = get_args(Kind)

OWN_CLUSTER = frozenset({"rayjob", "raycronjob", "raycluster"})
KUBERNETES = OWN_CLUSTER | {"cronjob"}
ONE_MACHINE = frozenset({"cron", "systemd"})
EVERY = frozenset(KINDS)

APPLIES = {
    "logical_date": frozenset({"rayjob"}),
    "schedule": frozenset({"raycronjob", "cronjob", "slurm", "cron", "systemd"}),
    "time_zone": frozenset({"raycronjob", "cronjob", "systemd"}),
    "nodes": OWN_CLUSTER | {"slurm", "ray-up"},
    "max_nodes": OWN_CLUSTER | {"ray-up"},
    "cpus_per_node": OWN_CLUSTER | {"slurm"},
    "gpus_per_node": OWN_CLUSTER | {"slurm", "ray-up"},
    "memory_per_node": OWN_CLUSTER | {"slurm"},
    "time_limit": EVERY - {"raycluster", "ray-up"},
    "retries": EVERY - {"raycluster", "ray-up", "cron"},
    "image": KUBERNETES | {"ray-up"},
    "namespace": KUBERNETES,
    "service_account": KUBERNETES,
    "volume": OWN_CLUSTER,
    "secret": EVERY,
    "auth": EVERY,
    "shared_path": EVERY,
    "head_address": ONE_MACHINE | {"cronjob", "ray-up"},
    "worker_address": frozenset({"ray-up"}),
    "region": frozenset({"ray-up"}),
    "instance_type": frozenset({"ray-up"}),
    "ssh_user": frozenset({"ray-up"}),
    "ray_cluster": frozenset({"cronjob"}),
    "account": frozenset({"slurm"}),
    "partition": frozenset({"slurm"}),
    "user": ONE_MACHINE,
    "program": ONE_MACHINE | {"slurm"},
    "directory": ONE_MACHINE | {"slurm"},
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
    worker_address: tuple[str, ...] = ()
    region: str | None = None
    instance_type: str | None = None
    ssh_user: str | None = None
    ray_cluster: str | None = None
    account: str | None = None
    partition: str | None = None
    user: str | None = None
    program: str | None = None
    directory: str | None = None

    @property
    def times(self) -> Schedule:
        """The schedule; without one each day at 03:00."""
        return parse_schedule("0 3 * * *" if self.schedule is None else self.schedule)

    @property
    def date(self) -> str:
        """The logical date of a manifest for one run; without the option now, in UTC."""
        return written(datetime.now(UTC) if self.logical_date is None else _read_date(self.logical_date))

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
    "ssh_user": (r"[a-z_][a-z0-9_.-]{0,31}", "the name of a user"),
    "region": (r"[a-z]{2}(-[a-z]+)+-\d+", "a region like us-west-2"),
    "instance_type": (r"[a-z0-9-]+\.[a-z0-9-]+", "an instance type like g5.xlarge"),
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
        for one in value if isinstance(value, tuple) else (value,):
            _check(field, one)
    _check_numbers(options)
    if options.time_limit is not None:
        duration_s(options.time_limit)
    if options.logical_date is not None:
        _read_date(options.logical_date)
    if options.schedule is not None:
        parse_schedule(options.schedule)
    if options.time_zone is not None:
        check_time_zone(options.time_zone)
    return options


def _check(field: str, value: object) -> None:
    if not isinstance(value, str):
        return
    check_printable(value, option_name(field))
    if field in PATTERNS and not re.fullmatch(PATTERNS[field][0], value, re.ASCII):
        raise UserError(f"{value[:80]!r} is not allowed; allowed: {PATTERNS[field][1]}", field=option_name(field))


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
