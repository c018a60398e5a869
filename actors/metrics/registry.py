"""Builds meters; runs judges, programs and users' files.

A judge gives the log-probability of each text under another causal model, batched by the scorer of `task: score`. Programs run
in the sandbox; a file with a function `measure(row)` runs in the worker's process, with its rights.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftmill.actors.job import ModelPlace, RowRecipe
from draftmill.actors.loop.loading import load_decoder
from draftmill.actors.loop.memory import fit
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.messages import Failure, Receipt, Tally, WorkUnit
from draftmill.actors.metrics.base import Answer, MeasuredRow, Measuring, Meter, RowByRow, Values, try_metric
from draftmill.actors.metrics.settings import PLACE, Judge, Metric, OwnMetric, PassAtK
from draftmill.actors.metrics.texts import METERS
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.samples import Sample
from draftmill.actors.rows.unit_io import try_row
from draftmill.actors.sandbox.sandbox import LOOK_S, Limits, Sandbox, find_sandbox
from draftmill.actors.task import Columns, Score
from draftmill.decoders.base import Decoder
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.runs.metric_files import MeasuredMetric, pass_at_k


@dataclass(frozen=True, slots=True)
class ReadyMetric:
    """A metric that was checked: `measured` is its identity, `field` its place in the spec or on the command line.

    `source` is the text of a user's file, `place` a judge's model, `samples` the number of samples of each row.
    """

    settings: Metric
    measured: MeasuredMetric
    field: str
    source: str | None = None
    place: ModelPlace | None = None
    samples: int | None = None


def build_meter(metric: ReadyMetric, *, threads: int) -> Meter:
    """The meter of a metric; a judge's model is loaded here."""
    settings = metric.settings
    if isinstance(settings, Judge):
        assert metric.place is not None
        return load_judge(metric.place, prompt=settings.prompt, threads=threads)
    if isinstance(settings, PassAtK):
        sandbox = find_sandbox(field=metric.field)  # this machine may be another than the driver's
        return Programs(settings, sandbox, threads, metric.samples)
    if isinstance(settings, OwnMetric):
        assert metric.source is not None
        return own_metric(settings, load_function(metric.source, settings.path, field=metric.field))
    return METERS[type(settings)](settings)


# ---- pass@k

_FENCE: Final = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Programs:
    """Runs the programs of a unit, `threads` at a time. `samples` is the number of samples of each row, None if unknown."""

    settings: PassAtK
    sandbox: Sandbox
    threads: int = 1
    samples: int | None = None

    def measure(self, rows: Sequence[MeasuredRow]) -> Measuring:
        """A row's estimates have no value here if some of its samples are in another unit."""
        pool, stop = ThreadPoolExecutor(self.threads, thread_name_prefix="programs"), threading.Event()
        try:
            runs = [pool.submit(try_metric, lambda row: self._run(row, stop.is_set), row) for row in rows]
            while wait(runs, timeout=LOOK_S).not_done:
                yield
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        return self._with_estimates(rows, [run.result() for run in runs])

    def _run(self, row: MeasuredRow, stopping: Callable[[], bool]) -> Values | None:
        if row.text is None:
            return None
        settings = self.settings
        limits = Limits(timeout_s=settings.timeout_s, processes=settings.processes)
        ran = self.sandbox.run(program_of(settings, row.text, row.values), limits, stopping=stopping)
        return (float(ran.passed),)

    def _with_estimates(self, rows: Sequence[MeasuredRow], answers: list[Answer]) -> list[Answer]:
        counts = Counter(row.id for row, answer in zip(rows, answers, strict=True) if isinstance(answer, tuple))
        correct = Counter(row.id for row, answer in zip(rows, answers, strict=True) if answer == (1.0,))

        def estimates(row: MeasuredRow) -> Values:
            total = counts[row.id]
            is_whole = self.samples is None or total == self.samples
            return tuple(
                pass_at_k(total, correct[row.id], k) if is_whole and k <= total else None for k in self.settings.k
            )

        pairs = zip(rows, answers, strict=True)
        return [(*answer, *estimates(row)) if isinstance(answer, tuple) else answer for row, answer in pairs]


def program_of(settings: PassAtK, text: str, values: Mapping[str, Any]) -> str:
    """The program of a sample: the template with its text and the kept columns of its row; lists are joined by line ends."""
    held = dict(values) | {"text": fenced_code(text) if settings.code == "fenced" else text}
    return PLACE.sub(lambda place: f"{{{place[1]}}}" if place[1] else _kept_text(held, place[2]), settings.program)


def fenced_code(text: str) -> str:
    """The content of the first fenced block of code, or the whole text if there is none."""
    match = _FENCE.search(text)
    return match[1] if match else text


def _kept_text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        raise ValueError(f"the row has no value in the kept column {name!r}")
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return str(value)


# ---- a user's file

FUNCTION = "measure"


def load_function(source: str, path: str, *, field: str) -> Callable[[Mapping[str, Any]], Any]:
    """The file's `measure`; UserError if the file raises an error or has no such function.

    The source travels with the job, so that every worker runs the same text, on other machines too.
    """
    with tempfile.TemporaryDirectory(prefix="draftmill-metric-") as folder:
        place = Path(folder) / Path(path).name
        place.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("draftmill_own_metric", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything
            raise UserError(f"{path} can't be loaded: {type(error).__name__}: {error}", field=field) from None
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise UserError(f"{path} has no function {FUNCTION}(row)", field=field)
    return function


def own_metric(settings: OwnMetric, function: Callable[[Mapping[str, Any]], Any]) -> RowByRow:
    """A meter around a user's function."""
    keys = settings.own_columns()

    def measure(row: MeasuredRow) -> Values | None:
        answer = function(_plain_row(row))
        if answer is None:
            return None
        if isinstance(answer, Mapping):
            unknown = sorted(set(answer) - set(keys))
            if unknown:
                raise ValueError(f"{FUNCTION} returned {unknown[0]!r}; the metric's `values` are {', '.join(keys)}")
            return tuple(_number(answer.get(key)) for key in keys)
        if len(keys) > 1:
            raise ValueError(f"{FUNCTION} returned one value, but the metric's `values` are {', '.join(keys)}")
        return (_number(answer),)

    return RowByRow(measure)


def _plain_row(row: MeasuredRow) -> dict[str, Any]:
    """The row as a user's function gets it: the result's columns, with `reference`, `references` and `keep` added."""
    return dict(row.result) | {
        "sample": row.sample,
        "tokens": list(row.tokens),
        "keep": dict(row.values),
        "reference": row.references[0] if row.references else None,
        "references": list(row.references),
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{FUNCTION} returned NaN; return None where a row has no value")
    return number


MOST_TEXTS: Final = 32
"""Texts in a forward of a judge."""


class JudgeMeter:
    """A judge that is loaded: `prompt` is the kept column that stands before the text, if any. Its units are lists of rows."""

    def __init__(self, decoder: Decoder, maker: Maker, prompt: str | None) -> None:
        self._maker, self._prompt = maker, prompt
        self._runner = UnitRunner(decoder, self, worker="judge")
        self._rows: Sequence[MeasuredRow] = ()
        self._samples: list[Sample] = []

    def measure(self, rows: Sequence[MeasuredRow]) -> Measuring:
        self._rows = rows
        unit = WorkUnit(0, 0, len(rows), 0, attempt=1, pass_=1, start=0, stop=len(rows))
        self._runner.add(unit)
        try:
            while self._runner.held:
                for answer in self._runner.step():
                    if isinstance(answer, Failure):
                        raise RuntimeError(answer.error)
                yield
        finally:
            self._runner.drop(unit.lease)
            self._runner.take_effort()
        return [None if row.text is None else _values(self._samples[n]) for n, row in enumerate(rows)]

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        return [self._sample(number, row) for number, row in enumerate(self._rows)]

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        self._samples = samples
        return Receipt(unit.lease, unit.unit, "judge", "", None, Tally())

    def _sample(self, number: int, row: MeasuredRow) -> Sample:
        values = {"completion": row.text} | ({} if self._prompt is None else {"prompt": row.values.get(self._prompt)})
        if row.text is None:
            return Sample(number)
        canvas = try_row(lambda: self._maker.make(values, 0), "tokenize", "tokenize_error")
        if isinstance(canvas, RowError):
            return Sample(number, error=canvas)
        return Sample(number, canvas=canvas.tokens, score_from=canvas.score_from)


def _values(sample: Sample) -> Values | Exception:
    outcome = sample.outcome
    if sample.error is not None or outcome is None or outcome.logprob is None:
        return sample.error or RowError("decode_error", "decode", "the judge gave no score")
    return outcome.logprob, math.exp(min(-outcome.logprob / len(outcome.tokens), 700.0)), float(len(outcome.tokens))


def load_judge(place: ModelPlace, *, prompt: str | None, threads: int) -> JudgeMeter:
    """Load a judge. Raises UserError or ValueError if the model can't be loaded or is not causal."""
    columns = Columns(completion="completion", prompt=None if prompt is None else "prompt")
    recipe = RowRecipe(Score(kind="score"), columns, AutoregressiveSettings(kind="autoregressive"), Sampling())
    scorer, _, tokenizer, info = load_decoder(place, recipe, threads, (MOST_TEXTS, None))
    fit(scorer, threads=threads)
    return JudgeMeter(scorer, maker_for(recipe, tokenizer, info), prompt)
