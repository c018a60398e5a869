"""Manifests for tests: a small spec, and what `draftmill manifest` makes of it."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.remote.manifest import MAKERS, Options, read_job

KUBERAY = ("rayjob", "raycluster")

SPEC: dict = {
    "name": "nightly",
    "task": {"kind": "complete", "max_new_tokens": 8},
    "input": {"path": "builtin:python-stdlib", "chunk_chars": 200, "limit": 12},
    "model": {"path": "builtin:ar-tiny"},
    "decoder": {"kind": "autoregressive"},
    "workers": {"count": 2, "cpus": 1},
    "output": {"path": "s3://bucket/nightly"},
}

RICH: dict[str, dict] = {
    "rayjob": {
        "nodes": 2, "image": "registry.example:5000/a/b:1", "service_account": "draftmill", "volume": ("results:/data",),
        "shared_path": ("/models",),
    },
    "raycluster": {"nodes": 3, "secret": "keys"},
    "cronjob": {"schedule": "@hourly", "ray_cluster": "big", "shared_path": ("/data it's",)},
    "slurm": {"nodes": 2, "secret": "/shared/s3 keys.env", "schedule": "30 2 * * *", "shared_path": ("/tmp", "/")},
    "cron": {"schedule": "5 4 * * SUN", "secret": "/etc/a b.env"},
}  # fmt: skip
"""Many options at once, for each kind."""


def write_spec(folder: Path, *, name: str = "job.yaml", **changes) -> str:
    """A spec file with other values for some sections; returns its path."""
    path = folder / name
    path.write_text(yaml.safe_dump(SPEC | changes, sort_keys=False, allow_unicode=True))
    return str(path)


def text_of(spec: str, kind: str, overrides: Sequence[str] = (), **options) -> str:
    return MAKERS[kind](read_job(spec, overrides, Options(kind, **options)))


def data_of(spec: str, kind: str, overrides: Sequence[str] = (), **options) -> dict:
    """The manifest of a kind that is YAML."""
    return dict(yaml.safe_load(text_of(spec, kind, overrides, **options)))


def printed(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `draftmill manifest`."""
    code = main(["manifest", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def templates(manifest: dict) -> list[dict]:
    if manifest["kind"] == "CronJob":
        return [manifest["spec"]["jobTemplate"]["spec"]["template"]]
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])  # of a RayJob, or a RayCluster
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
