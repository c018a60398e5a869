"""A service and a timer for systemd: a run on this machine, on a schedule, which never overlaps itself."""

from __future__ import annotations

import os
import pwd

from draftmill.jobs.exit_codes import FINAL
from draftmill.jobs.manifests.commented import comment
from draftmill.jobs.manifests.job import GRACE_S, KILL_S, Job
from draftmill.jobs.manifests.one_machine import check_places, run_words
from draftmill.jobs.manifests.quoting import check_printable, systemd, systemd_path
from draftmill.jobs.manifests.visible import check_folder

RESTART_S = 60
"""Seconds between a failure and the next try."""

SPREAD_S = 60
"""Seconds by which the timer may be late, so that many machines do not start at once."""


def service(job: Job) -> str:
    """NAME.service."""
    check_places(job)
    options = job.options
    user = [
        "# systemd sets HOME for a named user only, and Ray keeps its token there.",
        f"User={options.user or _this_user()}",
    ]
    secret = []
    if options.secret is not None:
        path = systemd_path(check_folder(check_printable(options.secret, "--secret"), "--secret"), "--secret")
        secret = ["# Credentials by reference: KEY=VALUE lines in a file of mode 600.", f"EnvironmentFile={path}"]
    lines = [
        "[Unit]",
        f"Description=draftmill {job.name}",
        "Wants=network-online.target",
        "After=network-online.target",
        *_limits(job),
        "",
        "[Service]",
        "# oneshot: the timer never starts a second run beside the first.",
        "Type=oneshot",
        *user,
        f"WorkingDirectory={systemd_path(job.directory, '--directory')}",
        f"Environment=RAY_AUTH_MODE={options.auth_mode} RAY_USAGE_STATS_ENABLED=0",
        *secret,
        f"ExecStart={systemd([*run_words(job), '--quiet', '--grace-seconds', str(GRACE_S)])}",
        "# A run that ended by an accident (1) or was interrupted (4) is started again and resumes. Exit codes 2 (the spec or",
        "# the input can't be used) and 3 (too many samples failed) would be the same again.",
        f"Restart={'no' if _interval_s(job) is None else 'on-failure'}",
        f"RestartSec={RESTART_S}",
        f"RestartPreventExitStatus={' '.join(map(str, FINAL))}",
        "# The time limit of a run, and the time from SIGTERM to SIGKILL. Ray's processes get their SIGTERM from the driver.",
        f"TimeoutStartSec={options.limit_s}",
        f"TimeoutStopSec={KILL_S}",
        "KillMode=mixed",
        "# No new privileges, and a read-only system: results go to S3, a home folder or a mounted disk.",
        "NoNewPrivileges=true",
        "ProtectSystem=true",
    ]
    return f"{_head(job)}{chr(10).join(lines)}\n"


def _interval_s(job: Job) -> int | None:
    """The time in which starts are counted: less than between two starts by the timer. None if that leaves no time to restart."""
    interval = job.options.times.gap_s - SPREAD_S - RESTART_S
    return interval if interval > RESTART_S and job.options.tries_again > 0 else None


def _limits(job: Job) -> list[str]:
    interval = _interval_s(job)
    if interval is None:
        return []
    return [
        "# How often a run is started in the time between two starts by the timer: the first time, and again after failures.",
        f"StartLimitIntervalSec={interval}",
        f"StartLimitBurst={job.options.tries_again + 1}",
    ]


def _this_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def timer(job: Job) -> str:
    """NAME.timer."""
    calendars = job.options.times.calendars(job.options.time_zone)
    lines = [
        "[Unit]",
        f"Description=Schedule of draftmill {job.name}",
        "",
        "[Timer]",
        *(f"OnCalendar={calendar}" for calendar in calendars),
        "# A run that was missed while the machine was off starts when it is on again.",
        "Persistent=true",
        "# Machines with the same schedule start spread over this time.",
        f"RandomizedDelaySec={SPREAD_S}",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return comment(f"When {job.name}.service starts.") + "\n".join(lines) + "\n"


def _head(job: Job) -> str:
    return comment(
        f"""\
A draftmill job as a systemd service; {job.name}.timer starts it. Install both with
  install -m 644 {job.name}.service {job.name}.timer /etc/systemd/system/
  systemctl daemon-reload
  systemctl enable --now {job.name}.timer
  systemctl start {job.name}.service      # a run now
  journalctl -u {job.name}.service        # its log"""
    )
