"""What prompts cost when every unit has a worker of its own: units planned by length, and by how rows begin.

    python -m benchmarks.shared_units [--questions 256] [--tasks 4]

Questions of several tasks stand in turn in the input, each after its task's examples, with four ends that are scored.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.jobs.plan.grouped_jobs import decoded_apart, planned, spec_for, write_questions


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--tasks", type=int, default=4)
    flags = parser.parse_args()
    print("| units | number | prompt rows | computed | share |\n|---|---:|---:|---:|---:|")
    scores = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "questions.jsonl"
        write_questions(path, flags.questions, flags.tasks)
        for name, by_length in (("by length", True), ("by beginnings", False)):
            spec = spec_for(path, f"{folder}/{by_length}")
            plan = planned(spec, by_length=by_length)
            stats, score = decoded_apart(spec, plan)
            scores.append(score)
            computed = stats.prompt_rows - stats.prompt_rows_shared
            share = computed / stats.prompt_rows
            print(f"| {name} | {plan.units} | {stats.prompt_rows:,} | {computed:,} | {share:.1%} |", flush=True)
    assert scores[0] == scores[1], "scores depend on the units"


if __name__ == "__main__":
    main()
