"""draftmill as a library: `draftmill.run`, `draftmill.open_run` and `draftmill.generate`, each built on what its command does.

All that a command would print of the end of a run is in the results, or in an exception with the same text (draftmill.Error).
Nothing is printed but progress, on stderr; the process is left as it was.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from draftmill.actors.checkpoints.models import FIELD, fetch_model, user_error
from draftmill.actors.loop.loading import fetch_drafter
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import ModelKind
from draftmill.decoders.settings import decoders_for, decoders_of
from draftmill.jobs.compare.runs import FinishedRun
from draftmill.jobs.compare.runs import open_run as find_run
from draftmill.jobs.config.errors import spec_error
from draftmill.jobs.config.sections import S3Settings
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.config.yaml_file import read_mapping
from draftmill.jobs.drive.backend import LocalBackend
from draftmill.jobs.drive.driver import StopFlag
from draftmill.jobs.exit_codes import Ended
from draftmill.jobs.plan.resolve import Resolved
from draftmill.jobs.results.export import columns_of, own_columns, tables_of
from draftmill.jobs.results.formats import plain_rows
from draftmill.jobs.results.passes import count_failed
from draftmill.jobs.results.summary import metric_means, sums_of
from draftmill.jobs.run.job import complete_job, decode_here
from draftmill.jobs.run.outcome import payload
from draftmill.jobs.run.session import RunOptions
from draftmill.storage.errors import Error, UserError
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.runs.commit import all_exact
from draftmill.storage.runs.metric_files import KEYS, read_metrics
from draftmill.storage.runs.records import without_dictionaries
from draftmill.storage.stores.store import Place

if TYPE_CHECKING:
    import datasets
    import pandas as pd

__all__ = ["Error", "RunResults", "generate", "open_run", "run"]

Row: TypeAlias = dict[str, Any]
"""A result row, with the values of `draftmill export --format jsonl`; docs/formats.md says what each column means."""

Order: TypeAlias = Literal["plan", "input"]
"""Rows as they were planned, unit by unit (which needs the least memory), or as they stand in the inputs."""


USUAL: Final = (
    *("status", "error_kind", "error", "text", "fills", "tokens", "finish", "new_tokens", "nfe", "logprob"),
    *("token_logprobs", "top_logprobs", "metrics"),
)
TEXT, JSON = "text", "json"


@dataclass(frozen=True, slots=True, repr=False)
class RunResults:
    """The results of a finished run; each sample once, as the last pass that has it left it. Nothing is kept in memory.

    `columns` of a method selects columns of the results, or kept columns of the inputs; None stands for the usual ones: ids,
    kept columns, texts, states, and a few counts. An unknown one is a UserError. Where the task asks for a JSON Schema, rows
    also have a column `json`, the text as an object (null if the row failed); it has no one type for a table.
    """

    _found: FinishedRun

    @property
    def columns(self) -> list[str]:
        """All columns that can be named."""
        plan = self._found.plan
        return [*plan.schema.names, *(item.name for item in plan.keep or () if item.name in own_columns(plan))]

    @property
    def path(self) -> str:
        """The run directory, a folder or an URL."""
        return self._found.store.url

    def __repr__(self) -> str:
        rows, failed = self._found.plan.rows, count_failed(self._found.passes)
        return f"<draftmill run {self._found.plan.spec.name}: {rows - failed:,} of {rows:,} samples ok, {self.path}>"

    def rows(self, columns: Sequence[str] | None = None, *, order: Order = "plan") -> Iterator[Row]:
        """Yield the rows, in the plan's order or the inputs' one; one unit is in memory at a time, or one window."""
        names = list(dict.fromkeys(columns or [*self._names(None), *[JSON] * self._has_json]))
        has_json = self._has_json and JSON in names
        stored = self._names([name for name in names if name != JSON or not has_json] or ["id"])
        for table in self._tables([*stored, *[TEXT] * has_json], order):
            texts = table[TEXT].to_pylist() if has_json else [None] * table.num_rows
            for row, text in zip(plain_rows(table.select(stored), self._found.plan.keep), texts, strict=True):
                row[JSON] = None if text is None else json.loads(text)
                yield {name: row[name] for name in names}

    def failures(self) -> list[Row]:
        """The rows of the samples that failed, each with its `error_kind`, `error_stage` and `error`."""
        names = [*self._names(None), "error_stage"]
        failed = (table.filter(pc.not_equal(table["status"], "ok")) for table in self._tables(names, "plan"))
        return [row for table in failed for row in plain_rows(table.select(names), self._found.plan.keep)]

    def to_arrow(self, columns: Sequence[str] | None = None, *, order: Order = "plan") -> pa.Table:
        """All rows as an Arrow table."""
        names = self._names(columns)
        known = {item.name: item for item in [*(self._found.plan.keep or ()), *self._found.plan.schema]}
        schema = pa.schema([known[name] for name in names])
        tables = [table.select(names).cast(schema) for table in self._tables(names, order)]
        return pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()

    def to_pandas(self, columns: Sequence[str] | None = None, *, order: Order = "plan") -> pd.DataFrame:
        """All rows as a pandas data frame."""
        return self.to_arrow(columns, order=order).to_pandas()

    def to_dataset(self, columns: Sequence[str] | None = None, *, order: Order = "plan") -> datasets.Dataset:
        """All rows as a dataset of Hugging Face's `datasets`, in memory; dictionaries become plain strings."""
        from datasets import Dataset
        from datasets.table import InMemoryTable

        table = self.to_arrow(columns, order=order)
        return Dataset(InMemoryTable(table.cast(without_dictionaries(table.schema))))

    def metrics(self) -> pa.Table:
        """What `metrics` or `draftmill measure` measured: id, sample, and a column for each metric; empty if nothing is."""
        table = read_metrics(self._found.store)
        return KEYS.empty_table() if table is None else table

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the table at the end of `draftmill run`, and what notices say of a run (docs/watching.md)."""
        passes, plan = self._found.passes, self._found.plan
        sums = sums_of(passes)
        facts = {
            "name": plan.spec.name,
            "path": self.path,
            "passes": len(passes),
            "errors": dict(sums.errors),
            "exact": all_exact(part.manifest.exact for part in passes if part.manifest is not None),
            "metrics": metric_means(self._found.store),
        }
        return payload(self._found.store, sums) | facts

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return columns_of(self._found.plan, "parquet", columns or self._usual())

    def _usual(self) -> list[str]:
        """The columns without which a row says too little; the others are for those who ask for them."""
        plan, spec = self._found.plan, self._found.plan.spec
        own = [item.name for item in plan.keep or () if item.name in own_columns(plan)]
        kept = own if plan.keep is None or len(own) == len(plan.keep) else [KEEP]
        wanted = {
            "sample": spec.sampling.n > 1,
            "tokens": spec.model.tokenizer == "none",
            "fills": spec.task.kind != "complete",
            "token_logprobs": spec.task.kind == "score",
            "top_logprobs": spec.sampling.top_logprobs > 0,
            "metrics": spec.task.kind == "score",
        }
        left_out = {name for name, is_wanted in wanted.items() if not is_wanted}
        return [name for name in ("id", "sample", *kept, *USUAL) if name not in left_out]

    @property
    def _has_json(self) -> bool:
        constraint = getattr(self._found.plan.spec.task, "constraint", None)
        return getattr(constraint, "json_schema", None) is not None

    def _tables(self, names: Sequence[str], order: Order) -> Iterator[pa.Table]:
        if order not in {"plan", "input"}:
            raise UserError(f"{order!r} is not allowed; allowed: plan, input", field="order")
        return tables_of(self._found.passes, names, order=order)


def open_run(path: str | os.PathLike[str], *, s3: Mapping[str, Any] | None = None) -> RunResults:
    """The results of the finished run in a folder or at s3://bucket/prefix; `s3` is the section of a spec.

    Raises draftmill.Error if there is no run, or if it is not finished.
    """
    try:
        settings = S3Settings.model_validate(s3 or {}, strict=True)
    except ValidationError as error:
        raise spec_error(S3Settings, s3 or {}, error) from None
    return RunResults(find_run(Place(os.fspath(path), settings.options())))


def run(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    *,
    local: bool = False,
    ray_address: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> RunResults:
    """Run a job, or resume it, until it is finished; then open it. It is what `draftmill run` does.

    `spec` is the path of a YAML file, or a dict with the same keys; `changes` are dotted keys with other values, such as
    `{"input.limit": 10}`. `local` decodes in this process, without Ray. Without it, Ray is started on this machine, or used if
    this process has initialised it, or the cluster at `ray_address` is used.

    Raises draftmill.Error, with the text that the command prints: if the spec or an input can't be used, another driver has the
    run, or more samples failed than `errors` allows (`open_run` then has all results). KeyboardInterrupt after a signal; the
    same call resumes the run.
    """
    if isinstance(spec, Mapping):
        data = dict(spec)
    else:
        data = {"name": Path(spec).stem} | read_mapping(Path(spec))
    job = check_spec(data, (changes or {}).items())
    with _as_a_guest() as stop:
        place = complete_job(job, RunOptions(ray_address, local), stop=stop)
    return RunResults(find_run(job.place(place)))


SET_BY_RUNS: Final = ("RAY_", "PYTHONPATH", "PYTHONBREAKPOINT", "TOKENIZERS_PARALLELISM")
"""Beginnings of the environment variables that a run sets, or the Ray that it starts."""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(SET_BY_RUNS)}


@contextmanager
def _as_a_guest() -> Iterator[StopFlag]:
    """Restore environment variables and torch's number of threads after the block; a signal raises KeyboardInterrupt, also one
    that came too late to interrupt the run."""
    variables, stop = _variables(), StopFlag()
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else None
    try:
        yield stop
        if stop.by_signal:
            raise KeyboardInterrupt(f"{stop.reason} came in the last unit: the run is finished")
    except Ended as end:
        if end.by_signal or stop.by_signal:
            raise KeyboardInterrupt(str(end)) from None
        raise
    finally:
        for name in _variables().keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        if torch is not None:
            torch.set_num_threads(threads)


# ---- generate


SECTIONS: Final = ("seed", "task", "decoder", "sampling", "batching", "input", "s3")
"""The sections of a spec that `generate` takes; its places are its own."""

ROWS: Final = "prompts.jsonl"


_LOCK = threading.Lock()
_BACKEND: Final = LocalBackend(keep=True)
"""What stays in memory from one call to the next: networks."""
_HASHES: Final[dict[Any, str]] = {}
"""The hash of each checkpoint since, by its place."""


def generate(
    model: str | Mapping[str, Any],
    prompts: Sequence[str | Mapping[str, Any]],
    *,
    ids: Sequence[str | int] | None = None,
    **sections: Any,
) -> list[Row]:
    """Decode a few prompts in this process, without Ray; returns their result rows in order, one for each sample.

    The model stays in memory for the next call. A job whose rows have the same ids gives the same texts.

    Args:
        model: the path of a model, as in `model.path`, or the whole section `model`.
        prompts: texts, or rows: dicts with the columns that the task reads.
        ids: the rows' ids; by default "0", "1" and so on, or a row's own `id`.
        sections: sections of a spec: seed, task, decoder, sampling, batching, input and s3. The task is `complete`, and the
            decoder the baseline of the model's family, unless they say otherwise.

    A row that fails has the status `failed` and the reason. Raises draftmill.Error for settings that can't be used.
    """
    if isinstance(prompts, str):
        raise UserError("is a text; allowed: a list of texts or of rows", field="prompts")
    if ids is not None and len(ids) != len(prompts):
        raise UserError(f"{len(ids):,} ids of {len(prompts):,} prompts; allowed: one for each", field="ids")
    if not prompts:
        return []
    with _LOCK, _as_a_guest(), TemporaryDirectory(prefix="draftmill-") as folder:
        job = _spec_of(model, sections, Path(folder))
        column = "text" if job.task.kind == "infill" else "prompt"
        (Path(folder) / ROWS).write_text("".join(_lines(column, prompts, ids)))
        return _decode(job)


def _lines(column: str, prompts: Sequence[str | Mapping[str, Any]], ids: Sequence[str | int] | None) -> Iterator[str]:
    for number, prompt in enumerate(prompts):
        row = dict(prompt) if isinstance(prompt, Mapping) else {column: prompt}
        try:
            yield json.dumps({"id": str(number)} | row if ids is None else row | {"id": ids[number]}) + "\n"
        except TypeError as error:
            raise UserError(str(error), field=f"prompts.{number}") from None


def _spec_of(model: str | Mapping[str, Any], sections: Mapping[str, Any], folder: Path) -> JobSpec:
    for name in sections:
        if name not in SECTIONS:
            raise UserError(f"is not a section that generate takes; allowed: {', '.join(SECTIONS)}", field=name)
    task, rows = sections.get("task", {}), sections.get("input", {})
    data = {
        "name": "generate",
        **sections,
        "model": {"path": model} if isinstance(model, str) else dict(model),
        "task": {"kind": "complete"} | task if isinstance(task, dict) else task,
        "input": rows | {"path": str(folder / ROWS)} if isinstance(rows, dict) else rows,
        "output": {"path": str(folder / "run")},
    }
    if "decoder" in sections:
        return check_spec(data)
    # Any decoder that does the task serves to check the rest of the spec; then the model's family is known.
    kind = task.get("kind", "complete") if isinstance(task, dict) else "complete"
    job = check_spec(data | {"decoder": {"kind": decoders_for(kind)[0] if decoders_for(kind) else "autoregressive"}})
    able = [one for one in decoders_of(_model_kind(job)) if one in decoders_for(job.task.kind)]
    return check_spec(data | {"decoder": {"kind": able[0]}}) if able else job


def _model_kind(job: JobSpec) -> ModelKind:
    model = job.model
    folder = fetch_model(job.place(model.path), model.revision, adapter=model.adapter)
    try:
        return inspect_model(folder, family=model.family, mask_id=model.mask_id).kind
    except ValueError as error:
        raise user_error(error, FIELD) from None


def _decode(job: JobSpec) -> list[Row]:
    passes = decode_here(job, _BACKEND, check=_forget_changed)
    plan = passes[0].plan
    tables = tables_of(passes, plan.schema.names, order="input")
    return [row for table in tables for row in plain_rows(table, plan.keep)]


def _forget_changed(resolved: Resolved) -> None:
    """Drop what is kept if a checkpoint of the job has changed since."""
    drafter = resolved.results["decoder"].get("drafter", {})
    hashes: dict[Any, str] = {resolved.folder: resolved.results["model"]["checkpoint"]}
    if isinstance(drafter, dict) and "weights" in drafter:
        hashes[fetch_drafter(resolved.spec.decoder, resolved.spec.s3.options())] = drafter["weights"]
    if any(_HASHES.get(place, now) != now for place, now in hashes.items()):
        _BACKEND.end_spare()
    _HASHES.update(hashes)
