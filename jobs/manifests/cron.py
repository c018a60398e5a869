"""A line for cron on one machine, with the settings that cron's almost empty environment lacks."""

from __future__ import annotations

import posixpath

from draftmill.jobs.manifests.commented import comment
from draftmill.jobs.manifests.job import GRACE_S, KILL_S, Job
from draftmill.jobs.manifests.one_machine import check_places, run_words
from draftmill.jobs.manifests.quoting import crontab
from draftmill.storage.errors import UserError

MAX_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""


def cron(job: Job) -> str:
    """The crontab."""
    check_places(job)
    command = _command(job)
    if len(command.encode()) > MAX_COMMAND:
        raise UserError(
            f"the command would have {len(command.encode()):,} bytes, and cron's limit is {MAX_COMMAND}; allowed: shorter "
            "paths, or settings in the spec instead of --set",
            field="SPEC.yaml",
        )
    user = f"{job.options.user} " if job.options.user else ""
    settings = "SHELL=/bin/bash\nPATH=/usr/local/bin:/usr/bin:/bin\n"
    return f"{_head(job)}{settings}RAY_AUTH_MODE={job.options.auth_mode}\n\n{job.options.times.text} {user}{command}\n"


def _command(job: Job) -> str:
    secret = f"set -a; . {crontab([job.options.secret])}; set +a; " if job.options.secret else ""
    limited = ["timeout", "--signal=TERM", f"--kill-after={KILL_S}", str(job.options.limit_s)]
    log = crontab([posixpath.join(job.directory, f"{job.name}.log")])
    words = [*limited, *run_words(job), "--quiet", "--grace-seconds", str(GRACE_S)]
    return f"cd {crontab([job.directory])} && {secret}exec {crontab(words)} >> {log} 2>&1"


def _head(job: Job) -> str:
    if job.options.user:
        install = f"  install -m 644 FILE /etc/cron.d/{job.name}\nas root; names in /etc/cron.d have no dots."
    else:
        install = (
            "  (crontab -l; cat FILE) | crontab -\n`crontab FILE` alone would replace all other entries of the user."
        )
    return comment(
        f"""\
A crontab entry: it runs a draftmill job on this machine, in this machine's time zone. Install it with
{install}
A run that meets another one of the same job ends at once (--if-running skip). One that takes longer than the limit gets SIGTERM,
{GRACE_S} s to end, and SIGKILL after {KILL_S} s. cron doesn't start a failed run again: the next one resumes it, or
`draftmill catchup` where each date has a run of its own. The log is {job.name}.log in the working directory.
Cron programs disagree on % and backslashes, so none of them is below: \\x25 and \\x5c in $'..' stand for them."""
    )
