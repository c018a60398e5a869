"""The project stays within the budget of pyproject.toml: lines, words, commands, options and keys."""

import argparse
import subprocess
import tomllib
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from draftmill.jobs.cli import parser
from draftmill.jobs.config.spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["draftmill"]["budget"]
TOPS = {"decoders": ["decoders"], "jobs": ["jobs"], "actors and storage": ["actors", "storage"], "tests": ["tests"]}


def texts(suffix, *folders):
    names = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [(ROOT / name).read_text() for name in names.splitlines() if name.endswith(suffix)]


def options_of(one):
    """The options of a command, or of all commands of a parser, but for --help and --debug."""
    found = 0
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += sum(options_of(command) for command in action.choices.values())
        else:
            found += bool(action.option_strings) and not {"--help", "--debug"} & set(action.option_strings)
    return found


def models_of(annotation):
    """The models in an annotation, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]


def keys_of(model, path=()):
    """The dotted keys of a spec; a key that several variants of a section have is one."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        for inner in models_of(field.annotation):
            if inner is not model:
                yield from keys_of(inner, (*path, name))


def measured():
    lines = {top: sum(text.count("\n") for text in texts(".py", *folders)) for top, folders in TOPS.items()}
    commands = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction)).choices
    return lines | {
        "docs": sum(len(text.split()) for text in texts(".md", "docs")),
        "commands": len(commands),
        "options": options_of(parser()),
        "keys": len(set(keys_of(JobSpec))),
    }


@pytest.mark.parametrize("what", sorted(BUDGET))
def test_the_project_stays_within_its_budget(what):
    """A commit that raises a number says why in its body; one that shrinks the project lowers it."""
    found = measured()
    assert found.keys() == BUDGET.keys()
    assert found[what] <= BUDGET[what], (
        f"{what}: {found[what]}; pyproject.toml, tool.draftmill.budget, allows {BUDGET[what]}"
    )
