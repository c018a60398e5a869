"""`make papers`: runs the presets as sweeps, compares their cases, and writes benchmarks/PAPERS.md.

    python -m examples.papers [--full] [--only PRESET ...] [--inputs] [--runs DIR] [--out FILE]

By default each preset decodes a part of its input, which takes some minutes on two cores; `--full` decodes what its file says.
Finished cases are not run again. `--inputs` only writes the input that is made from a package.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from draftmill.jobs.compare.comparison import figures_of
from draftmill.jobs.exit_codes import OK
from draftmill.storage.errors import UserError
from examples.papers.claims import PAPERS, Paper
from examples.papers.figures import Results
from examples.papers.inputs import write_humaneval_lines
from examples.papers.page import Answer, CaseRow, Section, page

HERE = Path(__file__).parent
INPUT = Path("runs/papers/inputs/humaneval_lines.jsonl")
RUNS = Path("runs/papers")
PAGE = HERE.parent.parent / "benchmarks" / "PAPERS.md"

CUT_DOWN = {
    "assd": 32,
    "assd-share": 16,
    "assd-length": 12,
    "assd-lines": 48,
    "specdiff": 32,
    "specdiff-temperature": 32,
    "pcllm": 32,
    "ssd": 32,
    "s2d2": 48,
    "s2d2-greedy": 48,
}
"""Rows of each preset in `make papers`; the others decode all of their input."""


def file_of(preset: str) -> Path:
    """The sweep file of a preset."""
    return HERE / f"{preset.replace('-', '_')}.yaml"


def settings_of(preset: str, *, full: bool, runs: Path) -> list[str]:
    """What differs from the sweep file, as `--set` takes it."""
    limit = [] if full or preset not in CUT_DOWN else [f"input.limit={CUT_DOWN[preset]}"]
    return [*limit, *([] if runs == RUNS else [f"output.path={runs / preset}"])]


def command_of(preset: str, settings: Sequence[str]) -> str:
    """The command that runs a preset by hand."""
    file = Path("examples/papers") / file_of(preset).name
    return shlex.join(["draftmill", "sweep", str(file), *(part for one in settings for part in ("--set", one))])


def run_preset(preset: str, settings: Sequence[str], *, local: bool) -> None:
    """Run or resume one preset; SystemExit with the sweep's code where it is not 0."""
    from draftmill.jobs.drive.log import shown
    from draftmill.jobs.run.session import RunOptions
    from draftmill.jobs.sweep.sweep import sweep

    print(f"\n== {command_of(preset, settings)}", flush=True)
    with shown():
        code = sweep(str(file_of(preset)), settings, RunOptions(local=local))
    if code != OK:
        raise SystemExit(code)


def section_of(paper: Paper, results: Results, presets: Sequence[str], commands: Sequence[str]) -> Section:
    """A paper's answers; a claim whose preset did not run has no figure."""
    answers = [
        Answer(claim, claim.figure.of(results) if claim.figure.preset in presets else None) for claim in paper.claims
    ]
    cases = [row for preset in paper.presets if preset in presets for row in case_rows(preset, results)]
    return Section(paper, answers, cases, commands)


def case_rows(preset: str, results: Results) -> list[CaseRow]:
    """The figures of a preset's cases."""
    found = []
    for case in results.cases(preset):
        one = figures_of(results.run(preset, case), results.rows(preset, case))
        drafts = one.nfe_draft_per_token or None
        per_token, acceptance = one.nfe_per_token, one.acceptance
        found.append(
            CaseRow(preset, case, one.samples, one.tokens, per_token, drafts, one.tokens_per_iteration, acceptance)
        )
    return found


def machine() -> str:
    """Where it was measured; times are not part of the page."""
    return f"Run with Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all rows that the sweep files name")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PRESET", help="these presets alone; the page calls the others not run"
    )
    parser.add_argument("--inputs", action="store_true", help="write the inputs and stop")
    parser.add_argument("--local", action="store_true", help="in one process, without Ray")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the run directories")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the presets and write the page; returns the exit code."""
    flags = parse(arguments)
    write_humaneval_lines(INPUT)
    if flags.inputs:
        return OK
    every = [preset for paper in PAPERS for preset in paper.presets]
    chosen = flags.only or every
    if unknown := sorted(set(chosen) - set(every)):
        print(f"draftmill: --only: no preset {unknown[0]!r}; allowed: {', '.join(every)}", file=sys.stderr)
        return 2
    settings = {preset: settings_of(preset, full=flags.full, runs=flags.runs) for preset in every}
    try:
        for preset in chosen:
            run_preset(preset, settings[preset], local=flags.local)
    except UserError as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return 2
    results = Results(flags.runs)
    sections = [
        section_of(paper, results, chosen, [command_of(preset, settings[preset]) for preset in paper.presets])
        for paper in PAPERS
    ]
    flags.out.write_text(page(sections, machine()), encoding="utf-8")
    print(f"wrote {flags.out}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
