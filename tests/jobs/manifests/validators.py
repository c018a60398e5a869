"""What reads manifests in the end, or its checks: schemas of KubeRay and Kubernetes, Ray's launcher, shellcheck, systemd.

Each function returns a list of complaints, empty if a manifest is valid.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCHEMAS = {"RayJob": "rayjobs", "RayCronJob": "raycronjobs", "RayCluster": "rayclusters"}
KUBERNETES = "1.34"


def strict(schema: Any) -> Any:
    """The schema as `kubectl --validate=strict` applies it: unknown keys are errors, and defaults fill required keys first."""
    if isinstance(schema, list):
        for one in schema:
            strict(one)
    if not isinstance(schema, dict):
        return schema
    closed = schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema["additionalProperties"] = False
    if isinstance(schema.get("required"), list):
        properties = schema.get("properties", {})
        schema["required"] = [key for key in schema["required"] if "default" not in properties.get(key, {})]
        if not schema["required"]:
            del schema["required"]
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("anyOf", None)
        schema.pop("type", None)
    for value in list(schema.values()):
        strict(value)
    return schema


@lru_cache(maxsize=8)
def kuberay_schema(kind: str) -> Any:
    schema = json.loads(gzip.decompress((HERE / "schemas" / f"{SCHEMAS[kind]}.v1.json.gz").read_bytes()))
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def kuberay_problems(manifest: dict[str, Any]) -> list[str]:
    from openapi_schema_validator import OAS30Validator

    errors = OAS30Validator(kuberay_schema(manifest["kind"])).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def kubernetes_problems(manifest: dict[str, Any]) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [str(error)]
    return []


def launcher_problems(config: dict[str, Any]) -> list[str]:
    """What `ray up` says of a cluster file before it reaches for any machine."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(prepare_config(json.loads(json.dumps(config))))
    except Exception as error:  # noqa: BLE001 - jsonschema's errors and Ray's own of several kinds
        return [str(error)]
    return []


def program(name: str) -> str:
    """A program that a package of the dev extra brings."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def shell_problems(script: str) -> list[str]:
    """What shellcheck says of a bash script, style included."""
    found = subprocess.run(
        [program("shellcheck"), "--shell=bash", "--format=gcc", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.splitlines() + found.stderr.splitlines()


def docker_problems(dockerfile: Path) -> list[str]:
    """What hadolint says of a Dockerfile."""
    found = subprocess.run(
        [program("hadolint"), "--no-color", str(dockerfile)], capture_output=True, text=True, check=False
    )
    return found.stdout.splitlines() + found.stderr.splitlines()


def systemd_problems(units: dict[str, str], folder: Path) -> list[str]:
    """What `systemd-analyze verify` says of units; its exit code is 0 even if it has something to say."""
    for name, text in units.items():
        (folder / name).write_text(text)
    found = subprocess.run(
        ["systemd-analyze", "verify", *(str(folder / name) for name in units)],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.splitlines() + found.stderr.splitlines()
