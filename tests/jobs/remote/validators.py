"""What reads manifests in the end, or its checks: schemas of KubeRay and Kubernetes, shellcheck.

Each function returns a list of complaints, empty if a manifest is valid.
"""

import gzip
import json
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent
SCHEMAS = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}
KUBERNETES = "1.34"


def strict(schema):
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
def kuberay_schema(kind: str):
    schema = json.loads(gzip.decompress((HERE / "schemas" / f"{SCHEMAS[kind]}.v1.json.gz").read_bytes()))
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def kuberay_problems(manifest: dict) -> list[str]:
    from openapi_schema_validator import OAS30Validator

    errors = OAS30Validator(kuberay_schema(manifest["kind"])).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def kubernetes_problems(manifest: dict) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
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
