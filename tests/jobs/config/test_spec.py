"""A spec is taken whole or refused by name: path, value, what is allowed, and the nearest known key."""

import json
from pathlib import Path

import pytest

from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.jobs.config.errors import all_keys
from draftmill.jobs.config.spec import JobSpec, check_spec, load_spec
from draftmill.jobs.config.sweep_spec import load_sweep
from draftmill.jobs.config.yaml_file import read_mapping, read_overrides
from draftmill.storage.errors import UserError
from tests.jobs.specs import infilling

GOOD = infilling(decoder={"kind": "assd", "k": 4}, output={"path": "runs/a"})


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_spec(GOOD, read_overrides(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decoder.k", "write KEY=VALUE"),
        ("=4", "write KEY=VALUE"),
        ("decoder..k=4", "write KEY=VALUE"),
        ("decoder.k.x=4", "decoder.k: 4 is not a mapping, so decoder.k.x can't be set"),
        ("decoder.k=[", "not YAML"),
        ("decoder.kk=4", "decoder.kk: unknown key; did you mean decoder.k?"),
        ("k=4", "k: unknown key; did you mean decoder.k?"),
        ("modle={}", "modle: unknown key; did you mean model?"),
        ("input.columns.txt=a", "input.columns.txt: unknown key; did you mean input.columns.text?"),
        ("task.mask.rates=0.5", "task.mask.rates: unknown key; did you mean task.mask.rate?"),
        ("task.mask.length=3", "task.mask.length: unknown key; known under task.mask: kind, rate"),
        ("decoder.k='4'", "decoder.k: '4' is not allowed; allowed: a whole number"),
        ("decoder.k=4.5", "decoder.k: 4.5 is not allowed; allowed: a whole number"),
        ("decoder.k=true", "decoder.k: True is not allowed; allowed: a whole number"),
        ("decoder.k=100", "decoder.k: 100 is not allowed; allowed: <= 64"),
        ("task.mask.rate=0", "task.mask.rate: 0 is not allowed; allowed: > 0.0"),
        ("task.mask.rate=.nan", "task.mask.rate: nan is not allowed; allowed: a finite number"),
        ("task.mask=random", "task.mask: 'random' is not allowed; allowed: a mapping"),
        ("task.mask={}", "task.mask.kind: missing; allowed: marker, random, spans, lines, sentences, span_fraction, given"),
        ("task.mask.kind=rnd", "task.mask.kind: 'rnd' is not known; allowed: marker, random, spans, lines"),
        ("task.kind=fill", "task.kind: 'fill' is not known; allowed: infill, complete, score"),
        ("decoder.kind=fast", "decoder.kind: 'fast' is not known; allowed: any_subset, parallel, assd"),
        ("decoder=null", "decoder: None is not allowed; allowed: a mapping"),
        ("output={}", "output.path: missing"),
        ("input.limit=0", "input.limit: 0 is not allowed; allowed: >= 1"),
        ("input.path=[]", "input.path: [] is not allowed"),
        ("input.path=[a, 7]", "input.path.1: 7 is not allowed; allowed: a string"),
        ("input.path=[a, 'ftp://x']", "input.path.1: ftp:// is not allowed"),
        ("input.path=[a, 'runs/**']", "output.path: 'runs/a' is inside the inputs, 'runs/**'"),
        ("input.path='{a,runs}'", "output.path: 'runs/a' is inside the inputs"),
        ("input.truncate=up", "input.truncate: 'up' is not allowed; allowed: left, right or middle"),
        ("input.truncate=left", "input.truncate: texts with holes are never cut"),
        ("input.delimiter=ab", "input.delimiter: 'ab' is not allowed; allowed: one character"),
        ("batching.max_rows=many", "batching.max_rows: 'many' is not allowed; allowed: auto or a whole number"),
        ("model.device=gpu", "model.device: 'gpu' is not allowed; allowed: auto, cpu, cuda, cuda:N"),
        ("model.dtype=int8", "model.dtype: 'int8' is not allowed; allowed: auto, float32"),
        ('name="\\x1b[31m"', "name: has control characters"),
        ("seed=9223372036854775808", "seed: 9223372036854775808 is not allowed; allowed: < 9223372036854775808"),
        ("input.columns={text: a, tokens: b}", "input.columns: text and tokens each give a row's content"),
        ("input.columns.prefix=p", "input.columns.prefix: mask kind 'random' does not use it; 'marker' does"),
        ("input.columns.spans=s", "input.columns.spans: mask kind 'random' does not use it; 'spans' does"),
        ("task.mask={kind: given}", "input.columns.tokens: mask kind 'given' needs the column"),
        ("task.mask={kind: lines, rate: 0.5, count: 1}", "task.mask: give rate or count of lines, not both"),
        ("task.mask={kind: sentences, which: [a]}", "task.mask.which.0: 'a' is not allowed; allowed: a whole number"),
        ("model.tokenizer=none", "model.tokenizer: 'none' needs rows that give their tokens"),
        ("decoder={kind: assd, drafter: ngram, fused: rows}", "decoder.fused: 'rows' drafts with the model itself"),
        ("decoder={kind: assd, drafter: sufix}", "decoder.drafter: 'sufix' is not allowed; allowed: self or ngram"),
        ("decoder={kind: speculative, drafter: {kind: sufix}}", "'sufix' is not known; allowed: model, head, masks, ngram"),
        ("decoder={kind: speculative, drafter: {kind: suffix, max_token: 9}}", "did you mean decoder.drafter.max_tokens?"),
        ("decoder={kind: speculative, drafter: {kind: masks, revision: v1}}", "decoder.drafter.revision: 'v1' is not allowed"),
        ("decoder={kind: speculative, drafter: {kind: suffix, max_tokens: 9}}", "max_tokens: 9 is not allowed; allowed: >= 1024"),
        ("decoder={kind: speculative, drafter: {kind: suffix, min_token_prob: 2}}", "min_token_prob: 2 is not allowed"),
        ("decoder={kind: speculative, drafter: {kind: suffix, max_spec_factor: 0}}", "max_spec_factor: 0 is not allowed"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_by_name(override, message):
    assert message in refusal(override)


def test_all_problems_are_named_at_once():
    message = refusal("decoder.kk=1", "seed=a", "task.mask.rate=2")
    assert all(part in message for part in ("decoder.kk: unknown", "seed: 'a'", "task.mask.rate: 2"))


def test_text_masks_refuse_rows_of_tokens():
    message = refusal("task.mask={kind: lines}", "input.columns.tokens=ids")
    assert message.startswith("task.mask.kind: 'lines' needs text") and "allowed: given, random" in message


@pytest.mark.parametrize("kind", ["jacobi", "multiblock_jacobi", "ssd"])
def test_rejection_is_refused_where_a_draft_has_no_law(kind):
    message = refusal("task={kind: complete}", f"decoder={{kind: {kind}}}", "sampling.acceptance=rejection")
    assert message.startswith("sampling.acceptance: 'rejection' needs the probabilities of a draft, and decoder ")
    assert f"and decoder '{kind}' has" in message
    assert message.endswith("allowed: 'coupled'")


@pytest.mark.parametrize("k", ["", "k: auto, "])
def test_rejection_is_refused_where_drafts_come_from_neighbours(k):
    suffix = f"decoder={{kind: speculative, {k}drafter: {{kind: suffix}}}}"
    message = refusal("task={kind: complete}", suffix, "sampling.acceptance=rejection")
    assert message.startswith("decoder.drafter: 'suffix' drafts from other samples' texts")
    assert "it would depend on its neighbours" in message and message.endswith("with 'suffix': acceptance 'coupled'")


def test_row_spans_and_random_spans_exclude_each_other():
    message = refusal("task.mask={kind: spans, count: 2}", "input.columns.spans=s")
    assert "input.columns.spans gives each row its own" in message


def test_every_section_is_frozen_and_closed():
    spec = check_spec(GOOD)
    for section in ("task", "input", "model", "decoder", "sampling", "batching", "workers", "errors", "output", "s3"):
        config = type(getattr(spec, section)).model_config
        assert config.get("frozen") and config.get("extra") == "forbid", section


def test_the_keys_are_those_of_the_contract():
    sections = {
        "input": "path columns limit",
        "input.columns": "id text prefix suffix spans sentences reference seed tokens",
        "model": "path family revision mask_id tokenizer dtype device trust_remote_code",
        "sampling": "temperature top_k top_p acceptance",
        "batching": "max_tokens max_rows window",
        "workers": "count gpus cpus",
        "errors": "max_rate max_count attempts",
        "output": "path trace unit_rows",
        "s3": "endpoint region addressing checksums",
    }
    named = {f"{section}.{name}" for section, keys in sections.items() for name in keys.split()}
    assert named | {"name", "seed", "task.kind", "task.mask.kind", "decoder.kind"} <= set(all_keys(JobSpec))


def test_a_spec_survives_its_own_json():
    data = GOOD | {"task": {"kind": "infill", "mask": {"kind": "sentences", "which": [0, -1]}}}
    spec = check_spec(data)
    assert check_spec(spec.model_dump(mode="json")) == spec


def test_a_file_is_read_with_overrides(tmp_path):
    file = tmp_path / "my-job.yaml"
    file.write_text(
        "task: {kind: infill, mask: {kind: random}}\ninput: {path: a}\nmodel: {path: b}\n"
        "decoder: {kind: any_subset}\noutput: {path: c}\nsampling: {temperature: 1e-3}\n"
    )
    spec = load_spec(file, ["decoder={kind: assd, k: 2}", "sampling.top_p=0.9", "input.limit=null", "seed=-1"])
    assert spec.name == "my-job" and spec.seed == -1
    assert spec.sampling.temperature == 0.001 and spec.sampling.top_p == 0.9
    assert isinstance(spec.decoder, AssdSettings) and spec.decoder.k == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"a: [1", "not YAML"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"", "must be a mapping of keys to values, but it has nothing"),
        (b"seed: 1\nseed: 2\n", "the key 'seed' occurs twice"),
        (b"model: {path: a, path: b}\n", "the key 'path' occurs twice"),
        (b"a: !!python/object/apply:os.system [ls]\n", "not YAML"),
        (b"name: \xff\n", "not UTF-8"),
        (b"1: 2\n", "keys that are not strings"),
        (b"seed: !!bool x", "a value does not fit its tag"),
        (b"seed: !!timestamp x", "a value does not fit its tag"),
        (b"seed: 0x" + b"f" * 5000, "line 1, column 7: a number is too long"),
        (b"seed: " + b"9" * 5000, "Exceeds the limit"),
        (b'name: "\\ud800"', "line 1, column 7: text has half of a UTF-16 surrogate pair"),
        (b"name: !!python/object:os.system x", "could not determine a constructor"),
        (b"name: !!python/name:os.system", "could not determine a constructor"),
        (b"name: 'open", "line 1, column 12: while scanning a quoted scalar found unexpected end of stream"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path, content, message):
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_spec(file)
    assert str(file) in str(caught.value)


KINDS = (
    "task: {kind: infill, mask: {kind: random, rate: 0.2}}\ninput: {path: a}\nmodel: {path: b}\noutput: {path: c}\n"
    "decoder: {kind: assd, k: 3, head: none, fused: none}\n"
)


@pytest.mark.parametrize(
    ("overrides", "message", "section"),
    [
        (["decoder.kind=any_subset"], "decoder.k: unknown key", "decoder={kind: any_subset}"),
        (
            ["task.mask.kind=given", "input.columns.tokens=t"],
            "task.mask.rate: unknown key",
            "task.mask={kind: given}",
        ),
        (["decoder.kind=nonsense"], "decoder.kind: 'nonsense' is not known; allowed: ", None),
        (["decoder.k=many"], "decoder.k: 'many' is not allowed", None),
    ],
)
def test_settings_of_another_kind_than_the_one_that_was_set_are_named(tmp_path, overrides, message, section):
    file = tmp_path / "job.yaml"
    file.write_text(KINDS)
    with pytest.raises(UserError) as caught:
        load_spec(file, overrides)
    assert str(caught.value).startswith(message)
    assert ("if the whole section is changed" in str(caught.value)) == (section is not None)
    if section is not None:
        assert str(caught.value).endswith(section)
        load_spec(file, [*overrides, section])


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("examples/*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_spec_or_sweep(path):
    if "base" in read_mapping(path):
        assert [str(case.error) for case in load_sweep(path).cases if case.error is not None] == []
    else:
        assert load_spec(path).name


@pytest.mark.parametrize("quote", ["", "'"])
def test_a_message_shows_the_beginning_of_a_long_value(quote):
    spec = {**GOOD, "model": {"path": "m", "device": f"x{quote}/" * 2000}}
    with pytest.raises(UserError) as caught:
        check_spec(spec)
    message = str(caught.value)
    assert len(message) < 300 and "x" in message and "allowed: auto, cpu, cuda, cuda:N" in message


def test_a_spec_that_json_wrote_is_read_as_json(tmp_path):
    data = {"prompt": {"system": "\U0001f600 \x7f"}, "seed": 1, "on": "yes", "a": 1e-3, "b": None}
    for text in (json.dumps(data), json.dumps(data, indent="\t"), "\ufeff" + json.dumps(data)):
        (tmp_path / "job.json").write_text(text, encoding="utf-8")
        assert read_mapping(tmp_path / "job.json") == data
    for text, message in (
        ('{"a": 1, "a": 2}', "line 1, column 10: the key 'a' occurs twice"),
        ('{"a": "\\ud83d"}', "half of a UTF-16"),
        (f'{{"a": {10**400}}}', "a number is too long"),
    ):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_mapping(tmp_path / "job.json")
    (tmp_path / "job.json").write_text("{a: 1, b: [NaN, {c: 2}]}")
    assert read_mapping(tmp_path / "job.json") == {"a": 1, "b": ["NaN", {"c": 2}]}
