"""Makes the schemas in this folder from a checkout of KubeRay: python -m tests.jobs.remote.schemas.make FOLDER"""

import gzip
import json
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
NAMES = ("rayclusters", "rayjobs")


def without_descriptions(schema):
    """The schema without its prose. A property that is itself called `description` stays: its value is a schema."""
    if isinstance(schema, dict):
        return {
            key: without_descriptions(value)
            for key, value in schema.items()
            if key != "description" or not isinstance(value, str)
        }
    return [without_descriptions(one) for one in schema] if isinstance(schema, list) else schema


def main(checkout: Path) -> None:
    """Write one file for each resource; equal schemas give equal bytes."""
    for name in NAMES:
        text = (checkout / "ray-operator" / "config" / "crd" / "bases" / f"ray.io_{name}.yaml").read_text()
        versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
        version = next(one for one in versions if one["name"] == "v1")
        schema = without_descriptions(version["schema"]["openAPIV3Schema"])
        packed = gzip.compress(json.dumps(schema, sort_keys=True, separators=(",", ":")).encode(), 9, mtime=0)
        (HERE / f"{name}.v1.json.gz").write_bytes(packed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
