"""Commands call their functions with the parameters made of their options, and end with a code of the one table."""

import argparse
from datetime import timedelta
from functools import wraps
from importlib import import_module
from types import SimpleNamespace

import pytest
import yaml

from draftmill.jobs import arguments, exit_codes
from draftmill.jobs.cli import main, parser
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.eval.options import EvalOptions
from draftmill.jobs.exit_codes import FINAL, INTERRUPTED, OK, SEVEREST, TOO_MANY_FAILED, UNEXPECTED, UNUSABLE, severest
from draftmill.jobs.remote.manifest import Options
from draftmill.jobs.remote.submit import SubmitOptions, end_of
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.stores.store import Place, S3Options
from tests.jobs.specs import completion

RUN = "RUN --s3-endpoint http://s3"
PLACE = Place("RUN", S3Options("http://s3"))
SPEC = completion(name="job", output={"path": "runs/{date:%Y-%m-%d}"})
DATED = check_spec(SPEC | {"output": SPEC["output"] | {"logical_date": "2026-11-22T00:00:00Z"}})
DRIVER = "--local --grace-seconds 7"
LOCAL = RunOptions(None, True, 7.0)

CALLS: dict[str, tuple[str, dict]] = {
    "run job.yaml --local --if-running skip --logical-date 2026-11-22": (
        "run_job",
        {"spec": DATED, "options": RunOptions(None, True, 30.0, if_running="skip")},
    ),
    f"run job.yaml {DRIVER} --catch-up": ("catch_up", {"spec": check_spec(SPEC), "options": LOCAL, "first": None}),
    "submit job.yaml --set seed=3 --address A --no-wait --shared /s": (
        "submit",
        {
            "spec": check_spec(SPEC | {"seed": 3}),
            "address": "A",
            "options": SubmitOptions(shared=("/s",), grace_s=30.0, run=("--if-running", "fail")),
            "wait": False,
        },
    ),
    f"stop {RUN} --wait-seconds 0": (
        "stop",
        {"place": PLACE, "address": None, "overrides": [], "logical_date": None, "wait_s": 0.0},
    ),
    "validate job.yaml --logical-date 2026-11-22": ("validate", {"spec": DATED}),
    f"status {RUN}": ("status", {"place": PLACE, "as_json": False}),
    f"logs {RUN} --json": ("logs", {"place": PLACE, "as_json": True, "follow": False}),
    f"verify {RUN} --invariance 3": ("verify", {"place": PLACE, "invariance": 3}),
    f"rerun {RUN} --failed {DRIVER}": ("rerun", {"place": PLACE, "options": LOCAL, "overrides": []}),
    f"export {RUN} --format csv --out FILE --columns id,text": (
        "export",
        {"place": PLACE, "kind": "csv", "out": "FILE", "errors": None, "columns": ["id", "text"], "overwrite": False}
        | {"order": "plan", "file_mb": None},
    ),
    f"export {RUN} --to DATASET --file-mb 5": (
        "publish",
        {"place": PLACE, "kind": "parquet", "to": "DATASET", "errors": None, "columns": (), "overwrite": False}
        | {"order": "plan", "file_mb": 5},
    ),
    f"prove {RUN} --rows 3 --set seed=3": ("prove", {"place": PLACE, "rows": 3, "overrides": ["seed=3"]}),
    "compare RUN RUN --s3-endpoint http://s3 --json": (
        "compare",
        {"places": [PLACE, PLACE], "form": "json", "baseline": None, "width": None},
    ),
    f"report {RUN} --out FILE": ("report", {"place": PLACE, "out": "FILE", "baseline": None, "overwrite": False}),
    f"show {RUN} --id a --id b": (
        "show",
        {"place": PLACE, "ids": ["a", "b"], "failed": False, "limit": None, "html": None, "overwrite": False},
    ),
    f"sweep SWEEP {DRIVER}": ("sweep", {"path": "SWEEP", "overrides": [], "options": LOCAL, "dry_run": False}),
    f"measure {RUN} --metric rouge bleu {DRIVER}": (
        "measure",
        {"place": PLACE, "words": ["rouge", "bleu"], "options": LOCAL, "reference": None}
        | {"allow_code_execution": False},
    ),
    f"eval job.yaml --tasks a,b --limit 2 {DRIVER}": (
        "evaluate",
        {"path": "job.yaml", "overrides": [], "options": EvalOptions(("a", "b"), limit=2.0), "run_options": LOCAL},
    ),
    f"prune {RUN} --keep 3 2w": ("prune", {"base": PLACE, "keep": [3, timedelta(weeks=2)], "yes": False}),
    "manifest job.yaml --for slurm --shared-path /s": (
        "manifest",
        {"spec": "job.yaml", "overrides": [], "options": Options("slurm", shared_path=("/s",))},
    ),
    "models": ("models", {}),
}


def test_all_commands_are_in_the_table():
    (commands,) = (one.choices for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    assert {line.split()[0] for line in CALLS} == commands.keys()


@pytest.mark.parametrize("line", CALLS)
def test_a_command_gives_its_function_what_it_takes(line, tmp_path, monkeypatch):
    calls = []

    def watched(module: str):
        function_name = CALLS[line][0]
        function = getattr(import_module(module), function_name)

        @wraps(function)
        def call(**given) -> int:
            calls.append((function_name, given))
            return 0

        return SimpleNamespace(**{function_name: call})

    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SPEC))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arguments, "import_module", watched)
    assert main(line.split()) == 0
    assert calls == [CALLS[line]]


@pytest.mark.parametrize("command", ["status", "verify", "export --format csv --out -", "prune --keep 1 --yes"])
def test_an_empty_place_is_not_the_folder_of_the_shell(command, capsys):
    """A variable of the shell that is not set is one."""
    name, *options = command.split()
    assert main([name, "", *options]) == 2
    assert capsys.readouterr().err.startswith("draftmill: '' is not a place to store: use a local path")


def test_names_of_columns_may_have_spaces_around_them():
    given = parser().parse_args(["export", "run", "--format", "csv", "--out", "-", "--columns", "id, nfe,"])
    assert given.columns == ["id", "nfe"]


CODES = {name: value for name, value in vars(exit_codes).items() if type(value) is int and name[0] != "_"}


def test_every_code_has_its_place_in_the_order_of_severity():
    assert sorted(CODES.values()) == sorted(SEVEREST) and len(set(SEVEREST)) == len(SEVEREST)
    assert set(FINAL) < set(SEVEREST)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ([], OK),
        ([OK, OK], OK),
        ([OK, TOO_MANY_FAILED, OK], TOO_MANY_FAILED),
        ([TOO_MANY_FAILED, UNUSABLE], UNUSABLE),
        ([UNUSABLE, UNEXPECTED, TOO_MANY_FAILED], UNEXPECTED),
        ([UNEXPECTED, INTERRUPTED, UNUSABLE], INTERRUPTED),
    ],
)
def test_a_command_that_does_several_things_ends_with_the_severest_code(several, one):
    assert severest(several) == severest(reversed(several)) == one


@pytest.mark.parametrize("code", sorted(set(SEVEREST) - {OK}))
def test_the_code_of_a_submitted_driver_is_handed_on_whatever_it_is(code):
    assert end_of(SimpleNamespace(status="FAILED", driver_exit_code=code, message=""))[0] == code
