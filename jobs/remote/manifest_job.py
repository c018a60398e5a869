"""What every manifest is made from: the checked spec, its text, options and nodes, and a name that other programs allow.

A local path that the cluster can't see is refused, with its key in the spec.
"""

from __future__ import annotations

import hashlib
import math
import os
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.jobs.config.paths import is_inside, places_of
from draftmill.jobs.config.spec import JobSpec, load_spec, with_logical_date
from draftmill.jobs.config.worker_shape import WorkerShape
from draftmill.jobs.config.yaml_file import apply_override, parse, read_mapping
from draftmill.jobs.formatting import counted
from draftmill.jobs.remote.manifest_options import Options, check_options, option_name
from draftmill.jobs.remote.templates import check_printable, yaml_document
from draftmill.storage.errors import UserError

GRACE_S = 45
"""Seconds from the first SIGTERM to the end of a driver: `--grace-seconds`. Whoever sends SIGKILL waits longer."""

KILL_S = 60
"""Seconds between SIGTERM and SIGKILL in the programs that start the driver."""

LONGEST_NAMES = {"rayjob": 47, "raycluster": 53, "cronjob": 52}
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
        beside = Path(sys.executable).parent / "draftmill"
        here = str(beside) if beside.exists() else shutil.which("draftmill") or str(beside)
        return self.options.program or here

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
    """A name that Kubernetes, Slurm and cron allow; names that had to be cut end with a hash of the whole."""
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    safe = safe if re.match("[a-z]", safe) else f"job-{safe}".rstrip("-")
    if len(safe) <= longest and re.search("[a-z0-9]", name.lower()):
        return safe
    tail = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{safe[: longest - 7].rstrip('-')}-{tail}"


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
    try:
        is_same = parse(text, "spec") == named
    except UserError:  # no YAML: a name before a mapping in braces
        is_same = False
    if not is_same:
        text = yaml_document(named)
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise UserError(
            f"is longer than {MAX_SPEC_BYTES:,} bytes, the most that a manifest can carry", field="SPEC.yaml"
        )
    return text


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
    comment = f"The spec asks for {count}, each with {workers.cpus:g} CPUs and {worker_gpus:g} GPUs."
    if workers.gpus == "auto" and gpus == 0:
        comment += " workers.gpus is auto: --gpus-per-node N makes nodes with GPUs."
    return comment


# ---- which local paths a cluster can see


NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")
"""Folders that each machine of a Slurm cluster has for itself."""


def local_places(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The key and the path of everything in a spec that is on a local disk."""
    return ((found.key, found.value) for found in places_of(spec) if found.is_here)


def on_s3(spec: JobSpec) -> bool:
    """Whether the job reads from S3 or writes to it."""
    return any(found.value.startswith("s3://") for found in places_of(spec))


def refuse_memory(spec: JobSpec) -> None:
    """Refuse results that would be lost with the process."""
    if spec.output.path.startswith("memory:"):
        raise UserError(
            f"{spec.output.path!r} is lost when the job ends; allowed: a path that outlives it", field="output.path"
        )


def refuse_unseen(spec: JobSpec, shared: Iterable[str], *, allowed: str) -> None:
    """Refuse local paths outside of the folders in `shared`; `allowed` says what makes a folder visible."""
    roots = tuple(shared)
    for key, path in local_places(spec):
        if not under(path, roots):
            raise UserError(
                f"{path!r} is a path of this machine, which the cluster can't see; allowed: s3://..., or {allowed}",
                field=key,
            )


def refuse_node_local(places: Iterable[tuple[str, str]], directory: str, shared: Iterable[str]) -> None:
    """Refuse paths in folders that each machine has for itself, unless `shared` names them."""
    roots = tuple(shared)
    for key, path in places:
        full = posixpath.normpath(posixpath.join(directory, os.path.expanduser(path)))
        if under(full, NODE_LOCAL) and not under(full, roots):
            raise UserError(
                f"{path!r} is in a folder that each node has for itself; allowed: a path on a shared file system "
                "(--shared-path FOLDER says that a folder is on one), or --nodes 1",
                field=key,
            )


def under(path: str, roots: Iterable[str]) -> bool:
    """Whether an absolute path is one of the folders or inside one of them."""
    path = posixpath.normpath(path)
    return any(is_inside(path, root) for root in map(posixpath.normpath, roots))


def check_folder(path: str, field: str) -> str:
    """Return the normal form of an absolute path; UserError if it is not absolute."""
    if not path.startswith("/"):
        raise UserError(f"{path!r} is not allowed; allowed: an absolute path", field=field)
    return posixpath.normpath(path)
