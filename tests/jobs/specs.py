"""Whole specs to start from: a test gives the sections that it is about."""

from pathlib import Path


def completion(folder: Path = Path(), **sections) -> dict:
    """The rows and the run directory are in `folder`."""
    return {
        "task": {"kind": "complete"},
        "input": {"path": str(folder / "rows.jsonl")},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run")},
    } | sections


def infilling(folder: Path = Path(), **sections) -> dict:
    """The same for holes anywhere in a text."""
    task = {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}}
    changed = {"task": task, "model": {"path": "builtin:asarm-tiny"}, "decoder": {"kind": "assd"}}
    return completion(folder, **changed | sections)
