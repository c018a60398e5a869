"""What every manifest is made from: the checked spec, its text, options and nodes, and a name that other programs allow.

An option that would do nothing is refused, and so is a local path that the cluster can't see, with its key in the spec. What is
one line of the file has no option: the file says what the line means.
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
from draftmill.jobs.config.sections import WorkerShape
from draftmill.jobs.config.spec import JobSpec, load_spec
from draftmill.jobs.config.yaml_file import apply_override, parse, read_mapping
from draftmill.jobs.formatting import counted
from draftmill.jobs.remote.templates import check_printable, yaml_document
from draftmill.storage.errors import UserError

GRACE_S = 45
"""Seconds from the first SIGTERM to the end of a driver: `--grace-seconds`. Whoever sends SIGKILL waits longer."""

KILL_S = 60
"""Seconds between SIGTERM and SIGKILL in the programs that start the driver."""

KINDS = ("rayjob", "raycluster", "cronjob", "slurm", "cron")
OWN_CLUSTER = frozenset({"rayjob", "raycluster"})
KUBERNETES = OWN_CLUSTER | {"cronjob"}

APPLIES = {
    "schedule": frozenset({"cronjob", "slurm", "cron"}),
    "nodes": OWN_CLUSTER | {"slurm"},
    "image": KUBERNETES,
    "service_account": KUBERNETES,
    "volume": OWN_CLUSTER,
    "secret": frozenset(KINDS),
    "shared_path": KUBERNETES | {"slurm"},
    "ray_cluster": frozenset({"cronjob"}),
}
"""The kinds that each option applies to."""

CRON_FIELD = r"[0-9A-Za-z*/,-]+"
PATTERNS = {
    "image": (r"[a-z0-9][A-Za-z0-9._:/@-]{0,254}", "an image like registry.example/draftmill:0.1.0"),
    "service_account": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, - and ."),
    "ray_cluster": (r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", "lower-case letters, digits and -, at most 53"),
    "schedule": (
        rf"{CRON_FIELD}( {CRON_FIELD}){{4}}|@[a-z]+",
        "minute, hour, day of month, month, day of week, for example '0 3 * * *' for every day at 03:00",
    ),
}
"""What values may be, as a pattern and in words."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options as given; None and empty where the command line has none."""

    kind: str
    schedule: str | None = None
    nodes: int | None = None
    image: str | None = None
    service_account: str | None = None
    volume: tuple[str, ...] = ()
    secret: str | None = None
    shared_path: tuple[str, ...] = ()
    ray_cluster: str | None = None

    def __post_init__(self) -> None:
        for field, kinds in APPLIES.items():
            value = getattr(self, field)
            if value not in {None, ()} and self.kind not in kinds:
                applies = ", ".join(kind for kind in KINDS if kind in kinds)
                raise UserError(f"does not apply to {self.kind}; it applies to {applies}", field=option_name(field))
            for text in value if isinstance(value, tuple) else (value,):
                if not isinstance(text, str):
                    continue
                check_printable(text, option_name(field))
                if field in PATTERNS and not re.fullmatch(PATTERNS[field][0], text, re.ASCII):
                    raise UserError(
                        f"{text[:80]!r} is not allowed; allowed: {PATTERNS[field][1]}", field=option_name(field)
                    )

    @property
    def times(self) -> str:
        """The schedule; without one each day at 03:00."""
        return self.schedule or "0 3 * * *"


def option_name(field: str) -> str:
    """`ray_cluster` as it is typed: --ray-cluster."""
    return f"--{field.replace('_', '-')}"


LONGEST_NAMES = {"rayjob": 47, "raycluster": 53, "cronjob": 52}
"""KubeRay 1.7's and Kubernetes' limits: names of pods, jobs and services are made from these names."""

MAX_NAME = 47
MAX_SPEC_BYTES = 100_000
"""A manifest carries the spec as an annotation; `kubectl apply` keeps all of it in one more, of at most 256 KiB."""


@dataclass(frozen=True, slots=True)
class ManifestJob:
    """A job that is to be run by another program, in this working directory where that has it.

    `path` is absolute, `overrides` are those of `--set`.
    """

    spec: JobSpec
    options: Options
    name: str
    path: str
    overrides: tuple[str, ...]

    @property
    def program(self) -> str:
        """The absolute path of draftmill."""
        beside = Path(sys.executable).parent / "draftmill"
        return str(beside) if beside.exists() else shutil.which("draftmill") or str(beside)

    @property
    def dated(self) -> bool:
        """Whether each date has a run directory of its own."""
        return "{date" in self.spec.output.path

    def sets(self) -> list[str]:
        """The overrides as options of `draftmill run`."""
        return [word for override in self.overrides for word in ("--set", override)]


def read_job(path: str, overrides: Sequence[str], options: Options) -> ManifestJob:
    """Return a job whose spec and options are checked; UserError otherwise."""
    spec = load_spec(path, overrides)
    refuse_memory(spec)
    full = check_printable(os.path.abspath(path), "SPEC.yaml")
    check_printable(os.getcwd(), "the working directory")
    for override in overrides:
        check_printable(override, "--set")
    name = slug(spec.name, LONGEST_NAMES.get(options.kind, MAX_NAME))
    return ManifestJob(spec, options, name, full, tuple(overrides))


def slug(name: str, longest: int) -> str:
    """A name that Kubernetes, Slurm and cron allow; names that had to be cut end with a hash of the whole."""
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    safe = safe if re.match("[a-z]", safe) else f"job-{safe}".rstrip("-")
    if len(safe) <= longest and re.search("[a-z0-9]", name.lower()):
        return safe
    tail = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{safe[: longest - 7].rstrip('-')}-{tail}"


def spec_text(job: ManifestJob) -> str:
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
class NodeShape:
    """One kind of node and how many of it; `why` is a comment on where the numbers come from."""

    nodes: int
    cpus: int
    gpus: int
    why: str


def shapes_of(job: ManifestJob) -> list[NodeShape]:
    """The nodes for each shape of the spec's workers."""
    shapes = job.spec.shapes
    if len(shapes) > 1 and job.options.nodes is not None:
        raise UserError(
            "the spec's workers have several shapes; allowed: set count of each in the spec", field="--nodes"
        )
    return [_shape(job, workers) for workers in shapes]


def one_shape(job: ManifestJob) -> NodeShape:
    """The nodes of a job whose workers all have one shape; UserError for others."""
    shapes = shapes_of(job)
    if len(shapes) > 1:
        raise UserError(
            f"{len(shapes)} shapes, but {job.options.kind} has nodes of one kind here; allowed: one shape",
            field="workers",
        )
    return shapes[0]


def _shape(job: ManifestJob, workers: WorkerShape) -> NodeShape:
    """The nodes for one shape: each has what its share of the workers needs, which is one worker without --nodes or a count."""
    worker_gpus = workers.gpus_if(job.spec.model.device.startswith("cuda"))
    count = 1 if workers.count == "auto" else workers.count
    nodes = job.options.nodes or (1 if job.options.kind == "slurm" else count)
    room = math.ceil(count / nodes)
    gpus = math.ceil(room * worker_gpus)
    asked = "as many workers as fit" if workers.count == "auto" else counted(workers.count, "worker")
    why = f"The spec asks for {asked}, each with {workers.cpus:g} CPUs and {worker_gpus:g} GPUs."
    if workers.gpus == "auto" and not gpus:
        why += " workers.gpus is auto: --set workers.gpus=1 makes nodes with GPUs."
    return NodeShape(nodes, max(1, math.ceil(room * workers.cpus)), gpus, why)


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
