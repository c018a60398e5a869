"""What the manifests for machines are filled with: a Slurm script, cron and systemd, and a cluster file for `ray up`."""

from __future__ import annotations

import math
import os
import posixpath
import pwd
import re

from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.manifests.job import GRACE_S, KILL_S, Job
from draftmill.jobs.manifests.kubernetes import DEFAULT_IMAGE
from draftmill.jobs.manifests.options import Options, size_bytes
from draftmill.jobs.manifests.quoting import check_printable, crontab, systemd, systemd_path
from draftmill.jobs.manifests.shape import one_shape
from draftmill.jobs.manifests.templates import fill_template
from draftmill.jobs.manifests.visible import check_folder, local_places, refuse_node_local, refuse_unseen
from draftmill.storage.errors import UserError

USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""
RESTART_S = 60
"""Seconds between a failure and the next try, by systemd."""
SPREAD_S = 60
"""Seconds by which systemd's timer may be late, so that many machines do not start at once."""
MAX_CRON_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""

ON_ALL_NODES = "a folder that all nodes of the cluster share, as an absolute path (--shared-path FOLDER)"
ON_ALL_MACHINES = "a folder that all machines share, as an absolute path (--shared-path FOLDER)"

# ---- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(job: Job) -> str:
    """A batch script: Ray over the nodes of the job, the driver on the first of them, and a requeue where it helps."""
    shape = one_shape(job)
    if shape.nodes > 1:
        places = [("SPEC.yaml", job.path), ("--directory", job.directory), ("--program", job.program)]
        refuse_node_local([*places, *local_places(job.spec)], job.directory, _shared(job))
    days, rest = divmod(job.options.limit_s, 86400)
    command = [job.program, "run", job.path, *job.sets(), "--if-running", "skip", "--grace-seconds", str(GRACE_S)]
    return fill_template(
        "slurm.sh.j2",
        name=job.name,
        options=job.options,
        dated=job.dated,
        shape=shape,
        memory_mib=math.ceil(size_bytes(shape.memory) / 2**20),
        time_limit=f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}",
        usr1_s=USR1_S,
        directory=job.directory,
        program_folder=os.path.dirname(job.program),
        command=command,
        over=(OK, *FINAL),
    )


def _shared(job: Job) -> list[str]:
    return [check_folder(path, "--shared-path") for path in job.options.shared_path]


# ---- one machine -----------------------------------------------------------------------------------------------------


def cron(job: Job) -> str:
    """A line for cron, with the settings that cron's almost empty environment lacks."""
    _check_places(job)
    secret = f"set -a; . {crontab([job.options.secret])}; set +a; " if job.options.secret else ""
    limited = ["timeout", "--signal=TERM", f"--kill-after={KILL_S}", str(job.options.limit_s)]
    log = crontab([posixpath.join(job.directory, f"{job.name}.log")])
    words = crontab([*limited, *_run_words(job), "--quiet", "--grace-seconds", str(GRACE_S)])
    command = f"cd {crontab([job.directory])} && {secret}exec {words} >> {log} 2>&1"
    if len(command.encode()) > MAX_CRON_COMMAND:
        raise UserError(
            f"the command would have {len(command.encode()):,} bytes, and cron's limit is {MAX_CRON_COMMAND}; allowed: "
            "shorter paths, or settings in the spec instead of --set",
            field="SPEC.yaml",
        )
    return fill_template("cron.j2", name=job.name, options=job.options, command=command, grace_s=GRACE_S, kill_s=KILL_S)


def service(job: Job) -> str:
    """NAME.service for systemd: a run that never overlaps itself."""
    _check_places(job)
    options, secret = job.options, None
    if options.secret is not None:
        secret = systemd_path(check_folder(check_printable(options.secret, "--secret"), "--secret"), "--secret")
    # Starts are counted in less than the time between two of the timer's; None if that leaves no time to restart.
    interval_s = options.times.gap_s - SPREAD_S - RESTART_S
    return fill_template(
        "service.j2",
        name=job.name,
        options=options,
        interval_s=interval_s if interval_s > RESTART_S and options.tries_again > 0 else None,
        user=options.user or _this_user(),
        directory=systemd_path(job.directory, "--directory"),
        secret=secret,
        command=systemd([*_run_words(job), "--quiet", "--grace-seconds", str(GRACE_S)]),
        restart_s=RESTART_S,
        kill_s=KILL_S,
        final=FINAL,
    )


def timer(job: Job) -> str:
    """NAME.timer for systemd."""
    return fill_template("timer.j2", name=job.name, options=job.options, spread_s=SPREAD_S)


def _this_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _check_places(job: Job) -> None:
    """Refuse paths that the nodes of another cluster can't see; on one machine all can be seen."""
    if job.options.head_address is not None:
        refuse_unseen(job.spec, _shared(job), how=ON_ALL_NODES)


def _run_words(job: Job) -> list[str]:
    """The command of the driver, as words."""
    words, address = [job.program, "run", job.path, *job.sets(), "--if-running", "skip"], job.options.head_address
    if address is None:
        return words
    if not re.fullmatch(r"[A-Za-z0-9_.\[\]:-]+:\d{1,5}", address):
        raise UserError(
            f"{address!r} is not allowed; allowed: HOST:PORT of the cluster's head, like 10.0.0.1:6379",
            field="--head-address",
        )
    return [*words, "--ray-address", address]


# ---- Ray's launcher --------------------------------------------------------------------------------------------------


def ray_up(job: Job) -> str:
    """A cluster file: machines of one's own that are reached by SSH, or machines on AWS."""
    shared = _shared(job)
    refuse_unseen(job.spec, shared, how=ON_ALL_MACHINES)
    shape = one_shape(job)
    _check_machines(job.options)
    image = job.options.image or DEFAULT_IMAGE
    return fill_template("ray-up.yaml.j2", name=job.name, options=job.options, shape=shape, shared=shared, image=image)


def _check_machines(options: Options) -> None:
    own = options.head_address is not None
    for field in ("region", "instance_type", "nodes", "max_nodes") if own else ("worker_address",):
        if getattr(options, field) not in (None, ()):
            why = "with --head-address the machines are given" if own else "the head's address is missing"
            raise UserError(
                f"{why}; allowed: --head-address and --worker-address for machines of your own, or --region, "
                "--instance-type, --nodes and --max-nodes for AWS",
                field=f"--{field.replace('_', '-')}",
            )
    for field, address in (
        ("--head-address", options.head_address),
        *(("--worker-address", one) for one in options.worker_address),
    ):
        if address is not None and not address.replace("-", "").replace(".", "").replace(":", "").isalnum():
            raise UserError(f"{address!r} is not allowed; allowed: the name or address of a machine", field=field)
