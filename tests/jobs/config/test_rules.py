"""A task that its rows' columns, its decoder or its model do not fit is refused before any work, by the key to change."""

from typing import Any, get_args

import pytest

from draftmill.actors.task import Complete, Score
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.settings import DECODERS
from draftmill.jobs.config.paths import with_absolute
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.config.yaml_file import read_overrides
from draftmill.jobs.plan.fingerprint import digest, results_key
from draftmill.jobs.plan.resolve import check_task
from draftmill.storage.errors import UserError
from tests.actors.tokenizers_for_tests import model_info
from tests.jobs.specs import completion

COMPLETE = completion()
SCORE = COMPLETE | {"task": {"kind": "score"}}
INFILL = COMPLETE | {"task": {"kind": "infill", "mask": {"kind": "marker"}, "max_new_tokens": 9}}
SPANS = COMPLETE | {
    "task": {"kind": "infill", "mask": {"kind": "spans"}},
    "input": {"path": "a.jsonl", "columns": {"tokens": "ids"}},
}
NAMED = COMPLETE | {
    "task": {"kind": "infill", "mask": {"kind": "marker"}, "fim": {"prefix": "a", "suffix": "b", "order": "spm"}}
}
MASKED = COMPLETE | {
    "task": {"kind": "score", "mask": {"kind": "random"}},
    "decoder": {"kind": "any_subset"},
}
BOUND = COMPLETE | {"task": {"kind": "score", "estimate": {"samples": 16}}, "decoder": {"kind": "stepwise"}}
SMALL = "decoder={kind: speculative, drafter: {kind: model, path: small}}"
CAUSAL = ModelInfo("qwen2", 300, None, 64, "causal", 1000)


def spec_of(base: dict[str, Any], *overrides: str) -> JobSpec:
    return check_spec(base, read_overrides(overrides))


@pytest.mark.parametrize(
    ("base", "overrides", "message"),
    [
        (COMPLETE, "task.stop=[\ufffd]", "task.stop: U+FFFD"),
        (COMPLETE, "decoder.kind=assd", "decoder.kind: 'assd' does not run the task 'complete'; allowed: autoregressive, spec"),
        (SCORE, "decoder.kind=jacobi", "decoder.kind: 'jacobi' does not run the task 'score'; allowed: any_subset"),
        (SCORE, "task.mask={kind: random}", "task.mask: the decoder 'autoregressive' scores a text from left to right"),
        (MASKED, "decoder.kind=block_diffusion", "allowed: null, or one of the decoders any_subset, stepwise, ancestral"),
        (MASKED, "task.chat=true", "task.chat: true scores the answer to a prompt, task.mask what it hides of a text"),
        (MASKED, "task.mask={kind: marker}", "task.mask.kind: 'marker' marks holes whose text is not in the row's own"),
        (MASKED, "input.columns.completion=a", "input.columns.completion: the task 'score with task.mask' does not use it"),
        (MASKED, "input.columns.spans=a", "input.columns.spans: mask kind 'random' does not use it; 'spans' does"),
        (MASKED, "task.estimate={samples: 4}", "task.estimate: the decoder 'any_subset' gives exact scores; allowed: null"),
        (SCORE, "task.estimate={}", "allowed: null, or one of the decoders stepwise, ancestral, block_diffusion"),
        (BOUND, "task.estimate.samples=7", "task.estimate.samples: 7; allowed: even numbers"),
        (COMPLETE, "task={kind: infill, mask: {kind: random}}", "task.mask.kind: 'random' makes holes that a causal model"),
        (COMPLETE, "task={kind: infill, mask: {kind: sentences}}", "'autoregressive': marker, spans, lines, span_fraction"),
        (INFILL, "decoder.kind=block_diffusion", "does not run the task 'infill'; allowed: any_subset, parallel"),
        (INFILL, "task.fim={prefix: a, suffix: b}", "task.fim.middle: null is allowed only with order spm"),
        (INFILL, "model.tokenizer=none", "model.tokenizer: 'none' needs rows that give their tokens"),
        (SPANS, "model.tokenizer=none", "model.tokenizer: a causal model needs its tokenizer's special tokens"),
        (INFILL, "decoder={kind: assd}", "task.max_new_tokens: the decoder 'assd' does not use it, since the mask"),
        (NAMED, "decoder={kind: assd}", "task.fim: the decoder 'assd' does not use it"),
        (COMPLETE, "input.columns.prefix=a", "input.columns.prefix: the task 'complete' does not use it; used by: infill"),
        (COMPLETE, "input.columns.completion=a", "input.columns.completion: the task 'complete' does not use it; used by: score"),
        (COMPLETE, "input.columns.messages=a", "input.columns.messages: only a chat has messages; set task.chat: true"),
        (COMPLETE, "input.columns={prompt: a, text: b}", "input.columns: text and prompt each give a row's content"),
        (COMPLETE, "input.columns={prompt: a, tokens: b}", "input.columns: prompt and tokens each give a row's content"),
        (SCORE, "input.columns={completion: a, text: b}", "input.columns: text and completion each give a row's content"),
        (SCORE, "input.columns={completion: a, tokens: b}", "input.columns: completion and tokens each give a row's content"),
        (COMPLETE, "model.tokenizer=none", "model.tokenizer: 'none' needs rows that give their tokens"),
        (INFILL, "task.fim={prefix: a, suffix: b, middle: c, order: mps}", "task.fim.order: 'mps' is not allowed; allowed: psm"),
        # What fits alone may not fit together.
        (COMPLETE, ["input.columns.tokens=ids", "task.chat=true"], "task.chat: a chat is made of text, but the rows give tokens"),
        (COMPLETE, ["input.columns.tokens=ids", "model.tokenizer=none", "task.stop=[a]"], "task.stop: stop strings are"),
        (COMPLETE, ["input.columns={prompt: a, messages: b}", "task.chat=true"], "input.columns: prompt and messages each"),
        # Prompts and templates.
        (COMPLETE, "prompt.template='{{ q'", "prompt.template: line 1"),
        (COMPLETE, ["prompt.template='{{ q }}'", "input.columns={prompt: p}"], "input.columns.prompt: prompt.template gives"),
        (INFILL, ["prompt.template='{{ q }}'", "input.columns={text: p}"], "input.columns.text: prompt.template gives the text"),
        (COMPLETE, "prompt.system=x", "prompt.system: only a chat has a use for it; set task.chat: true"),
        (INFILL, "chat.template_kwargs={a: 1}", "chat.template_kwargs: only a chat has a use for it"),
        (COMPLETE, ["task.chat=true", "chat.template_kwargs={tools: []}"], "chat.template_kwargs: 'tools' is not allowed"),
        (COMPLETE, "input.columns={system: s}", "input.columns.system: only a chat has a use for it"),
        (COMPLETE, "prompt.examples={rows: [{q: a, a: b}]}", "prompt.examples: prompt.template must have a loop over `examples`"),
        (COMPLETE, ["prompt.template='{{ examples }}'", "task.chat=true", "prompt.examples={rows: [{a: b}], answer: a}"], "too"),
        (COMPLETE, "prompt.examples={k: 2}", "prompt.examples: give either path, with k, or rows"),
        (COMPLETE, "prompt.examples={path: a}", "prompt.examples.k: missing"),
        (COMPLETE, "prompt.examples={rows: [{a: 1}], k: 1}", "prompt.examples: k and seed choose rows of a file"),
        (COMPLETE, "task.system=x", "task.system: unknown key; did you mean prompt.system?"),
        (COMPLETE, "task.chat_template_kwargs={}", "did you mean chat.template_kwargs?"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_task_is_refused_by_name(base, overrides, message):
    with pytest.raises(UserError) as caught:
        spec_of(base, *([overrides] if isinstance(overrides, str) else overrides))
    assert message in str(caught.value)


def test_what_fits_is_taken():
    task = spec_of(COMPLETE, "task.stop='\\n\\n'", "task.max_new_tokens=5", "input.columns.tokens=ids").task
    assert isinstance(task, Complete) and task.stop == ("\\n\\n",) and task.max_new_tokens == 5
    task = spec_of(SCORE, "task.chat=true", "input.columns={messages: m, completion: c}").task
    assert isinstance(task, Score) and task.chat
    spec = spec_of(COMPLETE, SMALL, "task.stop=[a, b]")
    assert check_spec(spec.model_dump(mode="json")) == spec


def test_every_decoder_does_some_task():
    assert all(one.tasks for one in DECODERS.values())
    assert list(DECODERS) == [get_args(one.model_fields["kind"].annotation)[0] for one in DECODERS.values()]


def test_a_model_that_does_not_do_the_task_is_refused_with_the_families_that_do():
    with pytest.raises(
        UserError, match=r"task\.kind: .*'xlnet' do not support 'complete'; tasks they support: infill, score; .* llama"
    ) as caught:
        check_task("complete", model_info())
    assert "qwen2" in str(caught.value)
    check_task("complete", CAUSAL)


def test_the_fingerprint_knows_the_drafter_by_its_weights_and_not_by_its_place():
    def of(spec: JobSpec, **known: Any) -> str:
        return digest(results_key(spec, CAUSAL, model="w", tokenizer="t", **known))

    small, moved = spec_of(COMPLETE, SMALL), spec_of(COMPLETE, SMALL, "decoder.drafter.path=elsewhere")
    assert of(small, drafter="a") == of(moved, drafter="a") != of(small, drafter="b")
    assert of(small, drafter="a") != of(spec_of(COMPLETE, SMALL, "decoder.k=3"), drafter="a")
    assert of(small, ends=(2,)) != of(small, ends=(2, 3)), "a changed generation config changes where completions end"


def test_workers_are_given_the_drafters_absolute_place(tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    drafter: Any = getattr(with_absolute(spec_of(COMPLETE, SMALL).decoder), "drafter", None)
    assert drafter.path == str(tmp_path / "small")
    drafter = getattr(with_absolute(spec_of(COMPLETE, SMALL, "decoder.drafter.path=org/name").decoder), "drafter", None)
    assert drafter.path == "org/name", "no folder here: an id of the hub"


def test_what_asks_for_a_hole_is_in_the_fingerprint_of_causal_models_alone():
    by_canvas = spec_of(INFILL, "task={kind: infill, mask: {kind: marker}}", "decoder={kind: assd}")
    assert by_canvas.results_key()["task"] == {"kind": "infill", "mask": {"kind": "marker"}}
    assert spec_of(INFILL).results_key()["task"]["max_new_tokens"] == 9

    def of(**known: Any) -> str:
        return digest(results_key(spec_of(INFILL), CAUSAL, model="w", tokenizer="t", **known))

    asked = {"prefix": 5, "suffix": 6, "middle": 7, "order": "psm"}
    assert len({of(fim=asked, ends=(2,)), of(fim=asked, ends=(2, 3)), of(fim=asked | {"middle": 8}, ends=(2,))}) == 3
    assert check_spec(spec_of(NAMED).model_dump(mode="json")) == spec_of(NAMED)


def test_exact_models_are_in_the_fingerprint_only_where_they_are_demanded():
    plain, exact = (spec_of(COMPLETE, *more).results_key() for more in ((), ("model.exact=true",)))
    assert plain["model"] == {} and exact["model"] == {"exact": True}
    assert spec_of(COMPLETE, "model.exact=true").model_place().exact and not spec_of(COMPLETE).model_place().exact


def test_small_weights_are_in_the_fingerprint_only_where_they_are_asked_for():
    keys = [spec_of(COMPLETE, f"model.weights={kind}").results_key()["model"] for kind in ("auto", "int8", "int4")]
    assert keys == [{}, {"weights": "int8"}, {"weights": "int4"}]
    assert spec_of(COMPLETE, "model.weights=fp8").model_place().weights == "fp8"


SMALL_WEIGHTS, EXACT = ("weights=int8", "weights: int8"), ("exact=true", "exact: true")


@pytest.mark.parametrize(
    ("asked", "overrides", "message"),
    [
        (SMALL_WEIGHTS, ["model.dtype=float64"], "model.dtype is float64; allowed: auto"),
        (SMALL_WEIGHTS, ["workers.gpus_per_model=2"], "workers.gpus_per_model is above 1; allowed: auto"),
        (
            SMALL_WEIGHTS,
            ["model.exact=true", "model.device=cuda:1"],
            "model.exact has other products on a GPU; allowed: auto",
        ),
        (
            EXACT,
            ["model.device=cpu", "model.dtype=bfloat16"],
            "model.dtype is bfloat16; allowed on a CPU: auto, float32",
        ),
        (
            EXACT,
            ["model.device=cuda", "model.dtype=float64"],
            "model.dtype is float64; allowed on a GPU: auto, bfloat16",
        ),
        (
            EXACT,
            ["workers.gpus_per_model=2"],
            "workers.gpus_per_model is above 1: the sums of several GPUs are not fixed",
        ),
    ],
    ids=str,
)
def test_small_weights_and_exact_models_are_refused_where_no_product_is_so(asked, overrides, message):
    override, told = asked
    with pytest.raises(UserError, match=f"model.{told}, but {message}"):
        spec_of(COMPLETE, f"model.{override}", *overrides)
    spec_of(COMPLETE, *overrides)


@pytest.mark.parametrize(
    ("decoder", "like"),
    [("multiblock_jacobi", None), ("s2d2", None), ("fastest", "block_diffusion"), ("jacobi", None), ("fastest", None)],
)
def test_rows_of_8_bits_are_refused_where_last_bits_may_differ_from_the_baselines(decoder, like):
    overrides = [f"decoder.kind={decoder}", *([f"decoder.like={like}"] if like else [])]
    spec_of(COMPLETE, "model.weights=int8", *overrides)
    if decoder == "jacobi" or (decoder == "fastest" and like is None):
        spec_of(COMPLETE, "model.weights=w8a8", *overrides)
        return
    with pytest.raises(UserError, match=f"model.weights: w8a8, but decoder.kind is {decoder}, .*; allowed: auto, int8"):
        spec_of(COMPLETE, "model.weights=w8a8", *overrides)


def test_prompt_and_chat_are_in_the_fingerprint_only_where_they_are_set():
    plain = spec_of(COMPLETE).results_key()
    assert not {"prompt", "chat"} & plain.keys() and plain["input"] == {}
    chat = spec_of(COMPLETE, "task.chat=true", "prompt.system=x", "chat.template_kwargs={a: false}")
    assert chat.results_key()["prompt"] == {"system": "x"}
    assert chat.results_key()["chat"] == {"template_kwargs": {"a": False}}
    other = spec_of(COMPLETE, "task.chat=true", "input.columns={system: s}").results_key()
    assert other["input"]["columns"]["system"] == "s"


def test_a_head_drafts_for_a_model_in_one_process():
    head = "decoder={kind: speculative, drafter: {kind: head, path: 'builtin:ar-tiny-eagle3'}}"
    assert spec_of(COMPLETE, head).decoder.drafter.kind == "head"  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"gpus_per_model: 2, but decoder.drafter.kind 'head' reads .*; allowed: 1"):
        spec_of(COMPLETE, head, "workers.gpus_per_model=2")
