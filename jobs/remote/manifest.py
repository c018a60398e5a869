"""`draftmill manifest` prints a file that runs the job elsewhere or on a schedule.

Kubernetes (KubeRay's RayJob and RayCluster, Kubernetes' own CronJob), a Slurm script and a crontab entry. The templates are in
infra/manifests; here is what they are filled with. An option that would do nothing is refused, and so is a local path that the
cluster can't see, with its key in the spec. What is one line of the file has no option: the file says what the line means.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from draftmill.jobs.config.paths import is_inside, places_of
from draftmill.jobs.config.spec import JobSpec, load_spec
from draftmill.jobs.config.yaml_file import apply_changes, read_mapping, read_overrides
from draftmill.jobs.exit_codes import FINAL, OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.remote.submit import normal_folder
from draftmill.storage.errors import UserError

GRACE_S = 45
"""Seconds from the first SIGTERM to the end of a driver: `--grace-seconds`. SIGKILL must come later."""
KILL_S = 60
"""Seconds between SIGTERM and SIGKILL in the programs that start the driver."""
USR1_S = 120
"""Seconds before the time limit at which Slurm tells the script; the driver needs GRACE_S of them."""
LIMIT_S = 86400
"""Seconds after which a run is stopped. It is a line of the file, as are RETRIES and MEMORY_GIB."""
RETRIES = 3
"""How often a run that did not finish is started again."""
MEMORY_GIB = 8
"""Of a node."""

MAX_CRON_COMMAND = 990
"""Bytes of a command in the crontab of Debian's cron: 1000 with its end."""
MAX_SPEC_BYTES = 100_000
"""A manifest carries the spec as an annotation; `kubectl apply` keeps all of it in one more, of at most 256 KiB."""
LONGEST_NAMES = {"rayjob": 47, "raycluster": 53, "cronjob": 52, "slurm": 47, "cron": 47}
"""KubeRay 1.7's and Kubernetes' limits: names of pods, jobs and services are made from these names."""


# ---- options ---------------------------------------------------------------------------------------------------------

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
    "volume": (r"[a-z0-9.-]+:.*", "CLAIM:FOLDER, like results:/data"),
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
            value, name = getattr(self, field), f"--{field.replace('_', '-')}"
            if value not in {None, ()} and self.kind not in kinds:
                applies = ", ".join(kind for kind in KINDS if kind in kinds)
                raise UserError(f"does not apply to {self.kind}; it applies to {applies}", field=name)
            texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
            for text in texts:
                check_printable(text, name)
                pattern, allowed = PATTERNS.get(field, (".*", ""))
                if not re.fullmatch(pattern, text, re.ASCII):
                    raise UserError(f"{text[:80]!r} is not allowed; allowed: {allowed}", field=name)

    @property
    def times(self) -> str:
        """The schedule; without one each day at 03:00."""
        return self.schedule or "0 3 * * *"

    @property
    def shared_folders(self) -> list[str]:
        """The folders that all nodes see."""
        return [normal_folder(path, "--shared-path") for path in self.shared_path]

    @property
    def claims(self) -> list[tuple[str, str]]:
        """The persistent volume claims, each with its folder."""
        pairs = [volume.split(":", 1) for volume in self.volume]
        return [(claim, normal_folder(folder, "--volume")) for claim, folder in pairs]


# ---- the job ---------------------------------------------------------------------------------------------------------


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

    def run_command(self, *words: str) -> list[str]:
        """`draftmill run` on this machine or one that shares its files."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        return [self.program, "run", self.path, *sets, "--if-running", "skip", *words, "--grace-seconds", str(GRACE_S)]

    def fill(self, template: str, **facts: Any) -> str:
        """The text of the file."""
        facts |= {"limit_s": LIMIT_S, "retries": RETRIES, "grace_s": GRACE_S, "kill_s": KILL_S}
        return fill_template(template, name=self.name, options=self.options, dated=self.dated, **facts)


def manifest(spec: str, overrides: Sequence[str], options: Options) -> int:
    """Print the manifest; returns 0. UserError if the spec or an option is unusable."""
    sys.stdout.write(MAKERS[options.kind](read_job(spec, overrides, options)))
    return OK


def read_job(path: str, overrides: Sequence[str], options: Options) -> ManifestJob:
    """Return a job whose spec and options are checked; UserError otherwise."""
    spec = load_spec(path, overrides)
    if spec.output.path.startswith("memory:"):
        raise UserError(
            f"{spec.output.path!r} is lost when the job ends; allowed: a path that outlives it", field="output.path"
        )
    full = check_printable(os.path.abspath(path), "SPEC.yaml")
    check_printable(os.getcwd(), "the working directory")
    for override in overrides:
        check_printable(override, "--set")
    return ManifestJob(spec, options, slug(spec.name, LONGEST_NAMES[options.kind]), full, tuple(overrides))


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

    It is the file's own text, with its comments, if that has a name and nothing is overridden.
    """
    data = read_mapping(Path(job.path))
    if "name" in data and not job.overrides:
        text = Path(job.path).read_text(encoding="utf-8")
    else:
        data = {"name": job.spec.name} | data
        apply_changes(data, read_overrides(job.overrides))
        text = yaml_document(data)
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
    """The nodes for each shape of the spec's workers, as many as there are workers without --nodes; on Slurm one."""
    shapes = job.spec.shapes
    if len(shapes) > 1 and (job.options.nodes is not None or job.options.kind == "slurm"):
        where = "with --nodes" if job.options.nodes is not None else "for slurm"
        raise UserError(f"{len(shapes)} shapes; allowed {where}: one shape", field="workers")
    found = []
    for workers in shapes:
        worker_gpus = workers.gpus_if(job.spec.model.device.startswith("cuda"))
        count = 1 if workers.count == "auto" else workers.count
        nodes = job.options.nodes or (1 if job.options.kind == "slurm" else count)
        room = math.ceil(count / nodes)  # workers on a node
        gpus = math.ceil(room * worker_gpus)
        asked = "as many workers as fit" if workers.count == "auto" else counted(workers.count, "worker")
        why = f"The spec asks for {asked}, each with {workers.cpus:g} CPUs and {worker_gpus:g} GPUs."
        if workers.gpus == "auto" and not gpus:
            why += " workers.gpus is auto: --set workers.gpus=1 makes nodes with GPUs."
        found.append(NodeShape(nodes, max(1, math.ceil(room * workers.cpus)), gpus, why))
    return found


def under(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of the folders or inside one of them."""
    return any(is_inside(os.path.normpath(path), root) for root in roots)


# ---- Kubernetes ------------------------------------------------------------------------------------------------------

FOLDER = "/etc/draftmill"
SPEC_FILE = f"{FOLDER}/spec.yaml"

RUN_COMMAND = ["draftmill", "run", SPEC_FILE, "--ray-address", "auto", "--if-running", "skip"]
"""The driver's command. Its words need no quotes: KubeRay and Ray each pass it through a shell."""

IN_A_CLUSTER = "an absolute path in a folder that the cluster's pods all have (--shared-path FOLDER)"
IN_A_VOLUME = (
    "an absolute path in a volume that all pods mount (--volume CLAIM:FOLDER), or in the image (--shared-path FOLDER)"
)


def with_cluster(job: ManifestJob) -> str:
    """A RayJob or RayCluster."""
    facts, shapes = _facts(job, IN_A_VOLUME), shapes_of(job)
    names = ["decode"] if len(shapes) == 1 else [f"decode-{index}" for index in range(len(shapes))]
    groups = []
    for name, shape in zip(names, shapes, strict=True):
        gpus = {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else {}
        resources = {"cpu": str(shape.cpus), "memory": f"{MEMORY_GIB}Gi"} | gpus
        groups.append({"name": name, "shape": shape, "resources": resources})
    return job.fill(
        f"{job.options.kind}.yaml.j2",
        **facts,
        ray_version=version("ray"),
        head_resources={"cpu": "2", "memory": "4Gi"},
        groups=groups,
        command=RUN_COMMAND,
    )


def cronjob(job: ManifestJob) -> str:
    """A CronJob, which submits to a cluster that is there."""
    facts = _facts(job, IN_A_CLUSTER)
    cluster = job.options.ray_cluster or "draftmill"
    address = f"http://{cluster}-head-svc:8265"
    command = ["draftmill", "submit", SPEC_FILE, "--address", address, "--code", "installed"]
    command += [word for folder in job.options.shared_path for word in ("--shared", folder)]
    command += ["--grace-seconds", str(GRACE_S), "--if-running", "skip"]
    if job.dated:
        facts["script"] = fill_template("cronjob-run.sh.j2", command=command)
        command = ["bash", f"{FOLDER}/run.sh"]
    facts |= {"ray_cluster": cluster, "address": address, "command": command}
    return job.fill("cronjob.yaml.j2", **facts, resources={"cpu": "500m", "memory": "1Gi"})


def _facts(job: ManifestJob, allowed: str) -> dict[str, Any]:
    """What all of them name. UserError for a path that no pod has: `allowed` says what makes a folder visible."""
    options, claims, places = job.options, job.options.claims, list(places_of(job.spec))
    seen = [*options.shared_folders, *(folder for _, folder in claims)]
    for found in places:
        if found.is_here and not under(found.value, seen):
            raise UserError(
                f"{found.value!r} is a path of this machine, which the cluster can't see; allowed: s3://..., or {allowed}",
                field=found.key,
            )
    # No credentials for S3 are needed where nothing is on S3, or a service account has the rights.
    on_s3 = any(found.value.startswith("s3://") for found in places)
    needs_secret = on_s3 and options.kind in OWN_CLUSTER and options.service_account is None
    return {
        "image": options.image or "draftmill:0.1.0",
        "secret": options.secret or ("draftmill-s3" if needs_secret else None),
        "claims": claims,
        "folder": FOLDER,
        "spec_text": "" if options.kind == "raycluster" else spec_text(job),
        "script": "",
        "final": FINAL,
    }


# ---- Slurm -----------------------------------------------------------------------------------------------------------

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local")
"""Folders that each machine of a Slurm cluster has for itself."""


def slurm(job: ManifestJob) -> str:
    """A batch script: Ray over the nodes of the job, the driver on the first of them, and a requeue where it helps."""
    (shape,), directory = shapes_of(job), os.getcwd()
    places = [("SPEC.yaml", job.path), ("the working directory", directory), ("draftmill", job.program)]
    places += [(found.key, found.value) for found in places_of(job.spec) if found.is_here]
    for key, path in places if shape.nodes > 1 else []:
        full = os.path.join(directory, os.path.expanduser(path))
        if under(full, NODE_LOCAL) and not under(full, job.options.shared_folders):
            raise UserError(
                f"{path!r} is in a folder that each node has for itself; allowed: a path on a shared file system "
                "(--shared-path FOLDER says that a folder is on one), or --nodes 1",
                field=key,
            )
    return job.fill(
        "slurm.sh.j2",
        shape=shape,
        memory_gib=MEMORY_GIB,
        usr1_s=USR1_S,
        directory=directory,
        program_folder=os.path.dirname(job.program),
        command=job.run_command(),
        over=(OK, *FINAL),
    )


# ---- cron ------------------------------------------------------------------------------------------------------------


def cron(job: ManifestJob) -> str:
    """A line for cron, with the settings that cron's almost empty environment lacks."""
    directory = os.getcwd()
    secret = f"set -a; . {crontab([job.options.secret])}; set +a; " if job.options.secret else ""
    limited = ["timeout", "--signal=TERM", f"--kill-after={KILL_S}", str(LIMIT_S), *job.run_command("--quiet")]
    log = crontab([os.path.join(directory, f"{job.name}.log")])
    command = f"cd {crontab([directory])} && {secret}exec {crontab(limited)} >> {log} 2>&1"
    if len(command.encode()) > MAX_CRON_COMMAND:
        raise UserError(
            f"the command would have {len(command.encode()):,} bytes, and cron's limit is {MAX_CRON_COMMAND}; allowed: "
            "shorter paths, or settings in the spec instead of --set",
            field="SPEC.yaml",
        )
    return job.fill("cron.j2", command=command)


MAKERS: Mapping[str, Callable[[ManifestJob], str]] = {
    "rayjob": with_cluster,
    "raycluster": with_cluster,
    "cronjob": cronjob,
    "slurm": slurm,
    "cron": cron,
}


# ---- fills the templates of infra/manifests, each of which reads like the file that it becomes; quoting is done by filters
#
# A word is written so that a shell, a crontab and YAML read it back: the same word, whatever characters it has.


def check_printable(text: str, field: str) -> str:
    """Return the text; UserError if it is empty or has characters that no one-line setting can hold."""
    if not text or not text.isprintable():
        raise UserError(f"{text[:80]!r} is not allowed; allowed: printable characters on one line", field=field)
    return text


def shell(words: Iterable[str]) -> str:
    """A command for sh and bash."""
    return " ".join(map(shlex.quote, words))


def crontab(words: Iterable[str]) -> str:
    """A command for a crontab whose SHELL is bash.

    In a crontab `%` means a line end. Cron programs disagree on backslashes before `%` and before other backslashes, so neither
    character appears: bash's $'..' spells both as numbers.
    """
    return " ".join(
        "$'" + re.sub(r"[%\\']", lambda special: f"\\x{ord(special[0]):02x}", word) + "'"
        if re.search(r"[%\\]", word)
        else shlex.quote(word)
        for word in words
    )


# ---- YAML ------------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Puts also into quotes what our reader of specs takes for a number, and ends of lines that would be lost."""


def _scalar(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if re.search(r"^[-+]?[\d.]+[eE]|[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _scalar)


def yaml_document(data: Mapping[str, Any]) -> str:
    """A YAML document of plain data, in which nothing can be read as something else."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def yaml_text(text: str, indent: int = 0) -> str:
    """A text as a value in YAML: in double quotes, or as a block whose key is indented by so many characters."""
    # The emitter falls back to double quotes if a block can't hold the text. Empty lines at its end would be lost here.
    is_block = "\n" in text and not re.search(r"(^|\n)\n\Z|[\x85\u2028\u2029]", text)
    written = yaml.safe_dump(text, default_style="|" if is_block else '"', allow_unicode=True, width=10**6)
    return str(written).rstrip("\n").replace("\n  ", f"\n{' ' * (indent + 2)}")


WIDTH = 110
"""Characters of a comment line, as far as words allow."""


def fill_template(template: str, **facts: Any) -> str:
    """The text of a file, from a template and what it names."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("draftmill.infra", "manifests"),
        undefined=StrictUndefined,
        autoescape=False,  # no web pages: each format has a filter of its own
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(yaml=yaml_text, shell=shell, indent=_indent, comment=comment)
    return environment


def _indent(text: str, width: int) -> str:
    """Further lines indented, but for empty ones. jinja's own filter also breaks lines where YAML does not."""
    lines = text.strip("\n").split("\n")
    return "\n".join([lines[0], *(f"{' ' * width}{line}" if line else "" for line in lines[1:])])


def comment(text: str, indent: int) -> str:
    """The text as comment lines, the first of which stands behind the indent already."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(f"# {line}" for line in lines)
