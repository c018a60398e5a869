"""Which runs may be compared: those of the same inputs, task and canvases, whatever decoded them."""

import pytest

from draftmill.jobs.compare.runs import check_same_work
from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.plan.packing import PlanTotals
from draftmill.jobs.plan.plan import Plan
from draftmill.storage.errors import UserError
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.stores.store import open_store

FILE = InputFile(uri="rows.jsonl", name="rows.jsonl", size=10, etag=None, mtime_s=1.0, format="jsonl", sha256="aa")
CAUSAL = {"path": "builtin:ar-tiny"}
ANY = {"path": "builtin:asarm-tiny"}
COMPLETE = {"task": {"kind": "complete"}, "model": CAUSAL, "decoder": {"kind": "autoregressive"}}
RANDOM = {"task": {"kind": "infill", "mask": {"kind": "random"}}, "model": ANY, "decoder": {"kind": "assd"}}
MIDDLE = RANDOM | {"task": {"kind": "infill", "mask": {"kind": "sentences", "which": "middle"}}}
SCORE = {"task": {"kind": "score"}, "model": {"path": "builtin:mdm-tiny"}, "decoder": {"kind": "stepwise"}}
HIDDEN = SCORE | {"task": {"kind": "score", "mask": {"kind": "lines"}}}
LINES = RANDOM | {"task": {"kind": "infill", "mask": {"kind": "lines"}}}


def plan(base: dict, *, files: str = "aa", tokenizer: str = "t", **changes) -> Plan:
    spec = check_spec({"input": {"path": "rows.jsonl"}, "output": {"path": "run"}} | base | changes)
    file = InputFile(**{name: getattr(FILE, name) for name in InputFile.__slots__} | {"sha256": files})
    results = spec.results_key()
    results["input"]["files"] = files
    results["model"]["tokenizer"] = tokenizer
    return Plan("f", "1", spec, results, (file,), PlanTotals(1, 1, 1, 1), [], open_store("memory://same"))


SAME: dict[str, tuple[dict, dict]] = {
    "another decoder": (COMPLETE, {"decoder": {"kind": "speculative"}}),
    "another model": (COMPLETE, {"model": {"path": "builtin:ar-micro"}}),
    "another tokenizer for the same prompts": (COMPLETE, {"tokenizer": "u"}),
    "another kind of model": (COMPLETE, {"model": {"path": "builtin:mdm-tiny"}, "decoder": {"kind": "ssd"}}),
    "another seed": (COMPLETE, {"seed": 7}),
    "another temperature": (COMPLETE, {"sampling": {"temperature": 0.5}}),
    "fewer rows": (COMPLETE, {"input": {"path": "rows.jsonl", "limit": 3}}),
    "kept columns, references and another path": (
        COMPLETE,
        {"input": {"path": "s3://b/rows.jsonl", "keep": ["a"], "columns": {"reference": "r", "temperature": "t"}}},
    ),
    "another seed with masks that it does not place": (MIDDLE, {"seed": 7, "tokenizer": "u"}),
    "other sampling of the same masks": (RANDOM, {"sampling": {"temperature": 0.0}, "decoder": {"kind": "parallel"}}),
    "another seed where rows have their own": (
        LINES | {"input": {"path": "rows.jsonl", "columns": {"seed": "s"}}},
        {"seed": 7},
    ),
    "closer estimates of the same scores": (SCORE, {"task": {"kind": "score", "estimate": {"samples": 8}}}),
    "another seed for the same texts to score": (SCORE, {"seed": 7}),
    "another tokenizer for the same lines": (LINES, {"tokenizer": "u"}),
    "a causal model that fills the same lines": (
        LINES | {"task": {"kind": "infill", "mask": {"kind": "lines"}, "max_new_tokens": None}},
        {
            "task": {"kind": "infill", "mask": {"kind": "lines"}, "max_new_tokens": 9},
            "model": {"path": "builtin:fim-tiny"},
            "decoder": {"kind": "speculative"},
        },
    ),
}
OTHER: dict[str, tuple[dict, dict]] = {
    "task.max_new_tokens": (COMPLETE, {"task": {"kind": "complete", "max_new_tokens": 5}}),
    "task.stop": (COMPLETE, {"task": {"kind": "complete", "stop": ["x"]}}),
    "task.mask.rate": (RANDOM, {"task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.3}}}),
    "input.files": (COMPLETE, {"files": "bb"}),
    "input.columns.prompt": (COMPLETE, {"input": {"path": "rows.jsonl", "columns": {"prompt": "p"}}}),
    "input.chunk_chars": (COMPLETE, {"input": {"path": "rows.jsonl", "chunk_chars": 80}}),
    "input.truncate": (COMPLETE, {"input": {"path": "rows.jsonl", "truncate": "left"}}),
    "seed": (RANDOM, {"seed": 7}),
    "task.mask.kind": (HIDDEN, {"task": {"kind": "score", "mask": {"kind": "random"}}}),
    "task.chat": (SCORE, {"task": {"kind": "score", "chat": True}}),
    "input.columns.seed": (LINES, {"input": {"path": "rows.jsonl", "columns": {"seed": "s"}}}),
    "model.tokenizer": (RANDOM, {"tokenizer": "u"}),
}


@pytest.mark.parametrize("case", SAME)
def test_runs_of_the_same_samples_are_compared(case):
    base, changes = SAME[case]
    check_same_work("a", plan(base), "b", plan(base, **changes))
    check_same_work("b", plan(base, **changes), "a", plan(base))


@pytest.mark.parametrize("key", OTHER)
def test_runs_of_other_samples_are_refused_by_the_key_that_differs(key):
    base, changes = OTHER[key]
    with pytest.raises(UserError, match="b did not decode the same as a") as caught:
        check_same_work("a", plan(base), "b", plan(base, **changes))
    assert caught.value.field == key and key in caught.value.message


def test_a_message_gives_both_values():
    with pytest.raises(UserError, match=r"task.max_new_tokens is 128 in a, 5 in b; task.stop is"):
        check_same_work(
            "a", plan(COMPLETE), "b", plan(COMPLETE, task={"kind": "complete", "max_new_tokens": 5, "stop": "x"})
        )
    with pytest.raises(UserError, match=r"rows.jsonl \(changed"):
        check_same_work("a", plan(COMPLETE), "b", plan(COMPLETE, files="bb"))
