"""What every manifest is made from: the checked spec, its text, options and nodes, and a name that other programs allow."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.jobs.formatting import counted
from draftmill.jobs.manifests.options import Options, check_options, option_name
from draftmill.jobs.manifests.templates import check_printable, yaml_document
from draftmill.jobs.manifests.visible import check_folder, refuse_memory
from draftmill.jobs.spec.job_spec import JobSpec, load_spec, with_logical_date
from draftmill.jobs.spec.spec_file import apply_override, parse, read_mapping
from draftmill.jobs.spec.worker_shape import WorkerShape
from draftmill.storage.errors import UserError

GRACE_S = 45
"""Seconds from the first SIGTERM to the end of a driver: `--grace-seconds`. Whoever sends SIGKILL waits longer."""

KILL_S = 60
"""Seconds between SIGTERM and SIGKILL in the programs that start the driver."""

LONGEST_NAMES = {"rayjob": 47, "raycronjob": 36, "raycluster": 53, "cronjob": 52}
"""KubeRay 1.7's and Kubernetes' limits: names of pods, jobs and services are made from these names."""

MAX_NAME = 47
MAX_SPEC_BYTES = 100_000
"""A manifest carries the spec as an annotation; `kubectl apply` keeps all of it in one more, of at most 256 KiB."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is to be run by another program. `path` and `directory` are absolute, `overrides` are those of `--set`."""

    spec: JobSpec
    options: Options
    name: str
    path: str
    overrides: tuple[str, ...]

    @property
    def directory(self) -> str:
        """Where relative paths of the spec begin, on machines that share a file system with this one."""
        return os.getcwd() if self.options.directory is None else self.options.directory

    @property
    def program(self) -> str:
        """The absolute path of draftmill on those machines."""
        return self.options.program or _this_program()

    @property
    def dated(self) -> bool:
        """Whether each date has a run directory of its own."""
        return "{date" in self.spec.output.path

    def sets(self) -> list[str]:
        """The overrides as options of `draftmill run`."""
        return [word for override in self.overrides for word in ("--set", override)]


def read_job(path: str, overrides: Sequence[str], options: Options) -> Job:
    """Return a job whose spec and options are checked; UserError otherwise."""
    check_options(options)
    spec = load_spec(path, overrides)
    refuse_memory(spec)
    for field in ("program", "directory"):
        if (value := getattr(options, field)) is not None:
            check_folder(value, f"--{field}")
    full = check_printable(os.path.abspath(path), "SPEC.yaml")
    check_printable(os.getcwd(), "--directory")
    for override in overrides:
        check_printable(override, "--set")
    if options.logical_date is not None:
        with_logical_date(spec, options.logical_date)  # refused where output.path has no date
    return Job(spec, options, _name(spec, options), full, tuple(overrides))


def _this_program() -> str:
    beside = Path(sys.executable).parent / "draftmill"
    return str(beside) if beside.exists() else shutil.which("draftmill") or str(beside)


def _name(spec: JobSpec, options: Options) -> str:
    longest = LONGEST_NAMES.get(options.kind, MAX_NAME)
    if options.name is None:
        return slug(spec.name, longest)
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", options.name) or len(options.name) > longest:
        raise UserError(
            f"{options.name[:80]!r} is not allowed; allowed for {options.kind}: lower-case letters, digits and -, starting "
            f"with a letter and not ending with -, at most {longest} characters",
            field="--name",
        )
    return options.name


def slug(name: str, longest: int) -> str:
    """A name that Kubernetes, Slurm, cron and systemd allow; names that had to be cut end with a hash of the whole."""
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    made = made if re.match("[a-z]", made) else f"job-{made}".rstrip("-")
    if len(made) <= longest and re.search("[a-z0-9]", name.lower()):
        return made
    tail = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{made[: longest - 7].rstrip('-')}-{tail}"


def spec_text(job: Job) -> str:
    """The spec as one text that means the same under any file name, with the overrides applied; UserError if it is too long.

    The file's own text if possible, so that its comments stay.
    """
    data = read_mapping(Path(job.path))
    named: dict[str, Any] = {"name": job.spec.name} | data
    for override in job.overrides:
        apply_override(named, override)
    text = Path(job.path).read_text(encoding="utf-8")
    if "name" not in data:
        text = yaml_document({"name": job.spec.name}) + text
    if _parsed(text) != named:
        text = yaml_document(named)
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise UserError(
            f"is longer than {MAX_SPEC_BYTES:,} bytes, the most that a manifest can carry", field="SPEC.yaml"
        )
    return text


def _parsed(text: str) -> Any:
    """What the text says; None if it is not YAML, as a name before a mapping in braces is not."""
    try:
        return parse(text, "spec")
    except UserError:
        return None


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of node and how many of it; `why` is a comment on where the numbers come from."""

    nodes: int
    most_nodes: int
    cpus: int
    gpus: int
    memory: str
    why: str


def shapes_of(job: Job) -> list[Shape]:
    """The nodes for each shape of the spec's workers."""
    shapes = job.spec.shapes
    if len(shapes) > 1:
        for field in ("nodes", "max_nodes", "cpus_per_node", "gpus_per_node"):
            if getattr(job.options, field) is not None:
                raise UserError(
                    "the spec's workers have several shapes; allowed: set count, cpus and gpus of each in the spec",
                    field=option_name(field),
                )
    return [_shape(job, workers) for workers in shapes]


def one_shape(job: Job) -> Shape:
    """The nodes of a job whose workers all have one shape; UserError for others."""
    shapes = shapes_of(job)
    if len(shapes) > 1:
        raise UserError(
            f"{len(shapes)} shapes, but {job.options.kind} has nodes of one kind here; allowed: one shape",
            field="workers",
        )
    return shapes[0]


def _shape(job: Job, workers: WorkerShape) -> Shape:
    """The nodes for one shape. Where no option says what a node has, it has what its share of the workers needs."""
    options = job.options
    # `auto` is one a process if the model or the nodes are said to have one.
    worker_gpus = workers.gpus_if(job.spec.model.device.startswith("cuda") or bool(options.gpus_per_node))
    _check_room(job, workers, worker_gpus)
    nodes = 1 if options.kind == "slurm" and options.nodes is None else options.nodes
    room = _room(job, workers, worker_gpus)
    if room is None:
        room = 1 if nodes is None or workers.count == "auto" else math.ceil(workers.count / nodes)
    if nodes is None:
        nodes = 1 if workers.count == "auto" else math.ceil(workers.count / room)
    if workers.count != "auto" and max(nodes, options.max_nodes or 0) * room < workers.count:
        raise UserError(
            f"{nodes} is too few: workers.count is {workers.count}, and a node has room for {room}", field="--nodes"
        )
    cpus = options.cpus_per_node or max(1, math.ceil(room * workers.cpus))
    gpus = math.ceil(room * worker_gpus) if options.gpus_per_node is None else options.gpus_per_node
    return Shape(
        nodes, max(nodes, options.max_nodes or 0), cpus, gpus, options.memory, _why(workers, gpus, worker_gpus)
    )


def _check_room(job: Job, workers: WorkerShape, worker_gpus: float) -> None:
    """Refuse a node that has no room for one worker."""
    options = job.options
    for field, has, needs, key in (
        ("--gpus-per-node", options.gpus_per_node, worker_gpus, "workers.gpus"),
        ("--cpus-per-node", options.cpus_per_node, workers.cpus, "workers.cpus"),
    ):
        if has is not None and has < needs:
            raise UserError(f"{has} is too few: a worker needs {needs:g} ({key})", field=field)


def _room(job: Job, workers: WorkerShape, worker_gpus: float) -> int | None:
    """How many workers fit on a node as the options describe it; None if they don't."""
    options = job.options
    rooms = []
    if options.gpus_per_node is not None and worker_gpus:
        rooms.append(math.floor(options.gpus_per_node / worker_gpus + 1e-9))
    if options.cpus_per_node is not None:
        rooms.append(math.floor(options.cpus_per_node / workers.cpus + 1e-9))
    return min(rooms, default=None)


def _why(workers: WorkerShape, gpus: int, worker_gpus: float) -> str:
    count = "as many workers as fit" if workers.count == "auto" else counted(workers.count, "worker")
    said = f"The spec asks for {count}, each with {workers.cpus:g} CPUs and {worker_gpus:g} GPUs."
    if workers.gpus == "auto" and gpus == 0:
        said += " workers.gpus is auto: --gpus-per-node N makes nodes with GPUs."
    return said
