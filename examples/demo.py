"""The demo: infill real source code three ways, look at it, and see that all three wrote the same text.

    python examples/demo.py [--limit N]

Runs examples/infill_stdlib.yaml (`assd`), then the same samples by the sequential decoder and by the one-pass decoder, each
through Ray workers into a run directory of its own under runs/. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from draftmill.jobs.config.spec import JobSpec, load_spec
from draftmill.jobs.drive.log import shown
from draftmill.jobs.drive.ray_session import ray_session
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.errors import UserError
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import open_store

SPEC = Path(__file__).parent / "infill_stdlib.yaml"
COLUMNS = ["id", "text", "prompt_tokens", "new_tokens", "nfe", "tokens", "fills", "status"]
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of decoding the same samples: its name, and what it changes in the spec."""

    name: str
    overrides: tuple[str, ...]


VARIANTS = (
    Variant("assd", ()),
    Variant("any_subset", ("decoder={kind: any_subset}",)),
    Variant("assd, one pass", ("decoder={kind: assd, k: 5, fused: rows}",)),
)


@dataclass(frozen=True, slots=True)
class Results:
    """A finished run: its rows by sample id."""

    variant: Variant
    rows: dict[str, dict[str, object]]

    @property
    def nfe_per_token(self) -> float:
        """Forward evaluations for each generated token."""
        return self._total("nfe") / self._total("new_tokens")

    def _total(self, column: str) -> int:
        return sum(value for row in self.rows.values() if isinstance(value := row[column], int))


def spec_of(variant: Variant, limit: int | None) -> JobSpec:
    """The example's spec as this variant runs it."""
    folder = "runs/demo-" + variant.name.replace(", ", "-").replace(" ", "-")
    more = [f"output.path={folder}"] + ([f"input.limit={limit}"] if limit else [])
    return load_spec(SPEC, [*variant.overrides, *more])


def run(variant: Variant, limit: int | None) -> Results:
    """Run (or find finished) one variant and read its rows; exits with the job's code where that is not 0."""
    spec = spec_of(variant, limit)
    print(f"\n== {variant.name} ==", flush=True)
    with shown():
        code = run_job(spec, RunOptions())
    if code != OK:
        raise SystemExit(code)
    tables = read_results(open_store(spec.place(spec.output.path)), columns=COLUMNS)
    return Results(variant, {row["id"]: row for table in tables for row in table.to_pylist()})


def show(results: Results) -> None:
    """Print a few infills; what the model wrote stands between the marks."""
    print("\nThree of the infills; the model wrote what stands between \N{LEFT CEILING} and \N{RIGHT FLOOR}.")
    whole = [row for row in results.rows.values() if row["status"] == "ok" and row["fills"]]
    for index in range(SHOWN):
        row = whole[index * len(whole) // SHOWN]
        print(f"\n--- {row['id']}\n{marked(row)}")


def marked(row: dict[str, object]) -> str:
    """The filled text with every hole between marks, as far as the holes' texts can be found in it in order."""
    text, pieces, start = str(row["text"]), [], 0
    fills = row["fills"]
    assert isinstance(fills, list)
    for fill in fills:
        at = text.find(fill["text"], start)
        if at < 0 or not fill["text"]:
            continue
        pieces += [text[start:at], "\N{LEFT CEILING}", fill["text"], "\N{RIGHT FLOOR}"]
        start = at + len(fill["text"])
    return "".join([*pieces, text[start:]])


def compare(results: list[Results]) -> str:
    """One line: how many texts agree with the sequential decoder's, and what each decoder paid."""
    baseline = next(part for part in results if part.variant.name == "any_subset")
    same = [
        sum(part.rows[name]["text"] == row["text"] for name, row in baseline.rows.items()) / len(baseline.rows)
        for part in results
    ]
    costs = ", ".join(f"{part.variant.name} {part.nfe_per_token:.2f}" for part in results)
    return f"{len(baseline.rows)} samples: {min(same):.0%} identical text; NFE per token: {costs}"


def main() -> int:
    """Run the three variants in one Ray session; returns 1 where their texts differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="windows to infill; default as in the spec")
    limit = parser.parse_args().limit
    try:
        with ray_session(None):
            results = [run(variant, limit) for variant in VARIANTS]
    except UserError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    show(results[0])
    line = compare(results)
    print(f"\n{line}")
    return 0 if ": 100% identical" in line else 1


if __name__ == "__main__":
    raise SystemExit(main())
