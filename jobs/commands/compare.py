"""`draftmill compare`: compares finished runs of the same samples, pair by pair, with a baseline. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from draftmill.jobs.analysis.comparison import compare_runs
from draftmill.jobs.analysis.comparison_text import as_data, as_markdown, as_text
from draftmill.jobs.analysis.runs import find_runs
from draftmill.jobs.exit_codes import OK
from draftmill.storage.stores.interface import S3Options

Form = Literal["text", "json", "markdown"]


def compare(
    places: Sequence[str], *, form: Form = "text", baseline: str | None = None, s3: S3Options | None = None
) -> int:
    """Print the comparison; a sweep's directory stands for its cases, `baseline` names one run. Returns the exit code.

    Raises UserError if a place has no finished run, or if the runs did not decode the same samples.
    """
    found = find_runs(places, s3=s3)
    compared = compare_runs(found.runs, unfinished=found.unfinished, baseline=baseline)
    if form == "json":
        print(json.dumps(as_data(compared), indent=1))
    else:
        print((as_markdown if form == "markdown" else as_text)(compared), end="")
    return OK
