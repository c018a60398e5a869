"""Every file that draftmill reads, sound and damaged: the world of tests/faults/test_damaged_files.py."""

import dataclasses
import gzip
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.faults.damage import DEEP, LONG, VALUES, Damage, of_any_file, of_json, of_safetensors, of_text
from tests.faults.damaged_jobs import Case

ROOT: Final = Path(__file__).parents[2]
DATA, BUILTIN = ROOT / "tests" / "data", ROOT / "decoders" / "builtin"
RUN = ("run", "job.yaml", "--local", "--quiet")
VALIDATE = ("validate", "job.yaml")
ROWS = [{"id": f"r{n}", "text": text} for n, text in enumerate(["def f(x):", "import os"])]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

Commands = tuple[tuple[str, ...], ...]


# ---- the sound files


def make_world(world: Path) -> None:
    """Write `world / sound`."""
    from tests.decoders.backbones.causal_models import save_random

    sound = world / "sound"
    small = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    save_random(sound / "model", "qwen2", seed=2, **small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / "ar-tiny" / name, sound / "model" / name)
    (sound / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2], "bos_token_id": 1, "temperature": 0.5})
    )
    (sound / "model" / "chat_template.jinja").write_text(CHAT)
    (sound / "model" / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    )
    (sound / "model" / "added_tokens.json").write_text(json.dumps({}))
    _save_shards(sound / "model", sound / "shards")
    for name in FAMILIES:
        (sound / name).mkdir()
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            if (DATA / name / file).exists():
                shutil.copy(DATA / name / file, sound / name / file)
    for name in ("target", "eagle3_llama", "dflash", "dspark_gated"):
        (sound / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(DATA / "speculators" / name / file, sound / name / file)
    shutil.copytree(BUILTIN / "asarm-tiny", sound / "headed", ignore=shutil.ignore_patterns("README.md"))
    _write_gguf(sound)
    _write_adapter(sound)
    _write_inputs(sound)
    _write_specs(sound)
    _write_run(sound)


def _save_shards(folder: Path, shards: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, shards)
    weights = load_file(shards / "model.safetensors")
    (shards / "model.safetensors").unlink()
    names, weight_map = sorted(weights), dict[str, str]()
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        part = {name: weights[name] for name in names[number::2]}
        save_file(part, shards / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_gguf(sound: Path) -> None:
    import torch
    import transformers

    from tests.decoders.backbones.causal_models import ROTARY
    from tests.runs.gguf_of_tests import WORDS, write_gguf

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**ROTARY | {"vocab_size": 262, "num_hidden_layers": 1})
    write_gguf(sound / "tiny.gguf", transformers.Qwen2ForCausalLM(config), vocabulary=WORDS)


def _write_adapter(sound: Path) -> None:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(sound / "model")
    settings: dict[str, Any] = {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "task_type": peft.TaskType.CAUSAL_LM,
    }
    peft.get_peft_model(model, peft.LoraConfig(**settings)).save_pretrained(str(sound / "adapter"))


def _write_inputs(sound: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (sound / "rows.jsonl").write_text(lines)
    (sound / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (sound / "rows.jsonl.zst").write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
    with pa.CompressedOutputStream(str(sound / "rows.jsonl.zst"), "zstd") as out:
        out.write(lines.encode())
    (sound / "rows.txt").write_text("def f(x):\nimport os\n" * 3)
    (sound / "rows.csv").write_text(
        "id,text\n" + "".join(f'{row["id"]}{n},"{row["text"]}"\n' for n, row in enumerate(ROWS * 3))
    )
    (sound / "rows.tsv").write_text(
        "id\ttext\n" + "".join(f"{row['id']}{n}\t{row['text']}\n" for n, row in enumerate(ROWS * 3))
    )
    table = pa.table({"id": [str(n) for n in range(6)], "text": [row["text"] for row in ROWS * 3]})
    pq.write_table(table, sound / "rows.parquet")
    for name, new in (("rows.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(sound / name, table.schema) as out:
            out.write_table(table)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"a": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}},
    }
    request = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (sound / "batch.jsonl").write_text(json.dumps(request) + "\n")
    chat = [
        {
            "id": "c",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "template_kwargs": {"a": 1},
            "constraint": {"regex": "[a-z]+"},
            "tokens": [1, 2, None],
        }
    ]
    (sound / "chat.jsonl").write_text(json.dumps(chat[0]) + "\n")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "ok": {"type": "boolean"},
            "n": {"$ref": "#/$defs/n"},
            "l": {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "ok"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}},
    }
    (sound / "schema.json").write_text(json.dumps(schema))
    (sound / "examples.jsonl").write_text(lines)


def job(**changes: Any) -> dict[str, Any]:
    """A spec; `changes` replace whole sections."""
    return {
        "task": {"kind": "complete", "max_new_tokens": 2},
        "input": {"path": "rows.jsonl"},
        "model": {"path": "model", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": 0.7},
        "output": {"path": "out", "unit_rows": 8},
    } | changes


def full_job() -> dict[str, Any]:
    """A spec with a value for most keys."""
    return job(
        name="full",
        seed=3,
        task={
            "kind": "complete",
            "max_new_tokens": 2,
            "stop": ["x"],
            "chat": True,
            "chat_date": "2026-01-01",
            "ignore_eos": False,
        },
        prompt={"template": "{{ text }}", "system": "s", "examples": {"path": "examples.jsonl", "k": 1, "seed": 2}},
        chat={"template_kwargs": {"a": 1}},
        input={"path": ["rows.jsonl"], "columns": {"id": "id"}, "limit": 3, "truncate": "left", "keep": ["text"]},
        model={"path": "model", "device": "cpu", "dtype": "float32", "max_length": 64},
        decoder={"kind": "speculative", "k": 2, "drafter": "ngram"},
        sampling={
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.01,
            "logit_bias": {5: 1.0},
            "n": 1,
            "top_logprobs": 1,
        },
        batching={"max_tokens": 4096},
        errors={"max_rate": 0.01},
        metrics=["exact_match"],
        output={"path": "out", "unit_rows": 8, "trace": "steps"},
    )


def _write_specs(sound: Path) -> None:
    (sound / "job.yaml").write_text(yaml.safe_dump(job()))
    (sound / "full.yaml").write_text(yaml.safe_dump(full_job()))
    (sound / "full.json").write_text(json.dumps(full_job()))
    base = job()
    base["output"] = {"unit_rows": 8}
    sweep = {"base": base, "cases": {"a": {}, "b": {"sampling.temperature": 0.5}}, "output": {"path": "sweep"}}
    (sound / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (sound / "sweep.json").write_text(json.dumps(sweep))


def _write_run(sound: Path) -> None:
    """A finished run with a trace, a metric and a second pass."""
    from draftmill.jobs.cli import main

    here = Path.cwd()
    os.chdir(sound)
    try:
        rows = [row | {"reference": "x", "id": f"r{n}"} for n, row in enumerate(ROWS * 2)] + [
            {"id": "bad", "text": ["no"]}
        ]
        (sound / "measured.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = job(
            input={"path": "measured.jsonl"},
            output={"path": "done", "unit_rows": 2, "trace": "steps"},
            errors={"max_rate": 1.0},
        )
        (sound / "done.yaml").write_text(yaml.safe_dump(spec))
        assert main(["run", "done.yaml", "--local", "--quiet"]) == 0
        assert main(["measure", "done", "--metric", "length", "--local", "--quiet"]) == 0
        main(["rerun", "done", "--failed", "--local", "--quiet"])
    finally:
        os.chdir(here)


# ---- the cases


def cases(world: Path, kind: str) -> list[Case]:
    """All cases of a kind, in an order that mixes them: each share of them has all sorts."""
    found = list(KINDS[kind](world / "sound"))
    random.Random(kind).shuffle(found)
    for number, case in enumerate(found):
        rest = tuple(command for command in case.commands if command[0] != "validate")
        if number % 4 and rest:  # the job starts at once: `run` checks what `validate` does, and more
            found[number] = dataclasses.replace(case, commands=rest)
    return found


def _of(
    kind: str,
    file: str,
    damages: Iterator[Damage],
    *commands: tuple[str, ...],
    named: bool = True,
    written: bool = False,
) -> Iterator[Case]:
    for name, content in damages:
        yield Case(kind, name, file, content, commands, named, written)


def _on_spec(**sections: str) -> Commands:
    """Both commands on a spec with other values, as YAML."""
    sets = [word for key, value in sections.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    return (*VALIDATE, *sets), (*RUN, *sets)


def _models(sound: Path) -> Iterator[Case]:
    data = (sound / "model/config.json").read_bytes()
    both = _on_spec()
    yield from _of("config", "model/config.json", of_any_file(data, 1), *both)
    yield from _of("config", "model/config.json", of_json(data, 1), *both)
    yield from _of(
        "config",
        "target/config.json",
        of_json((sound / "target/config.json").read_bytes(), 2, most=40),
        *_on_spec(model__path="target", model__tokenizer="none", input="{path: chat.jsonl, columns: {tokens: tokens}}"),
    )


FAMILIES: Final = {
    "dream": "{kind: threshold}",
    "llada": "{kind: stepwise}",
    "llada_moe": "{kind: stepwise}",
    "mdlm": "{kind: ancestral}",
    "sedd": "{kind: ancestral}",
    "sdar": "{kind: block_diffusion}",
    "fast_dllm_v2": "{kind: block_diffusion}",
    "llada2": "{kind: block_diffusion}",
    "nemotron": "{kind: block_diffusion}",
    "jacobi": "{kind: jacobi}",
    "xlnet_asarm": "{kind: assd}",
}


def _families(sound: Path) -> Iterator[Case]:
    for number, (name, decoder) in enumerate(FAMILIES.items()):
        data = (sound / name / "config.json").read_bytes()
        sets = {
            "model__path": name,
            "model__tokenizer": "none",
            "decoder": decoder,
            "input": "{path: chat.jsonl, columns: {tokens: tokens}}",
        }
        if name == "xlnet_asarm":
            sets["task"] = "{kind: infill, mask: {kind: given}}"
        yield from _of("families", f"{name}/config.json", of_json(data, number, most=60), _on_spec(**sets)[1])


def _tokenizers(sound: Path) -> Iterator[Case]:
    both = _on_spec(task="{kind: complete, max_new_tokens: 2, chat: true}")
    skip = ("vocab", "merges")
    for number, name in enumerate(
        (
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        )
    ):
        data = (sound / "model" / name).read_bytes()
        yield from _of("tokenizer", f"model/{name}", of_any_file(data, number), both[1])
        found = of_json(data, number, skip=skip, most=250)
        sets = {"sampling": "{from_checkpoint: true}"} if name.startswith("generation") else {}
        yield from _of(
            "tokenizer",
            f"model/{name}",
            found,
            *_on_spec(task="{kind: complete, max_new_tokens: 2, chat: true}", **sets)[1:],
        )


def _weights(sound: Path) -> Iterator[Case]:
    data = (sound / "model/model.safetensors").read_bytes()
    yield from _of("weights", "model/model.safetensors", of_any_file(data, 3), *_on_spec())
    yield from _of("weights", "model/model.safetensors", of_safetensors(data, 3), *_on_spec(), named=False)
    index = (sound / "shards/model.safetensors.index.json").read_bytes()
    both = _on_spec(model__path="shards")
    yield from _of("weights", "shards/model.safetensors.index.json", of_any_file(index, 4), both[1], named=False)
    yield from _of("weights", "shards/model.safetensors.index.json", of_json(index, 4, most=80), both[1], named=False)
    shard = (sound / "shards/model-00002-of-00002.safetensors").read_bytes()
    yield from _of("weights", "shards/model-00002-of-00002.safetensors", of_any_file(shard, 5), both[1])


def _gguf(sound: Path) -> Iterator[Case]:
    data = (sound / "tiny.gguf").read_bytes()
    run = _on_spec(model__path="tiny.gguf")[1]
    yield from _of("gguf", "tiny.gguf", of_any_file(data, 6, cuts=12, flips=6), run)
    rng = random.Random(7)

    def counted() -> Iterator[Damage]:
        for at in range(4, 24):
            for value in (0, 255):
                yield f"byte {at} = {value}", data[:at] + bytes([value]) + data[at + 1 :]
        for _ in range(20):
            at = rng.randrange(24, 2500)
            yield f"byte {at} other", data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]

    yield from _of("gguf", "tiny.gguf", counted(), run)


def _adapters(sound: Path) -> Iterator[Case]:
    run = _on_spec(model__adapter="adapter")[1]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        data = (sound / "adapter" / name).read_bytes()
        found = of_json(data, 8, most=40) if name.endswith("json") else of_safetensors(data, 8, most=10)
        yield from _of("adapter", f"adapter/{name}", of_any_file(data, 8, cuts=2, flips=2), run)
        yield from _of("adapter", f"adapter/{name}", found, run, named=False)


def _heads(sound: Path) -> Iterator[Case]:
    for name in ("eagle3_llama", "dflash", "dspark_gated"):
        run = _on_spec(
            model__path="target",
            model__tokenizer="none",
            input="{path: chat.jsonl, columns: {tokens: tokens}}",
            decoder=f"{{kind: speculative, k: 2, drafter: {{kind: head, path: {name}}}}}",
        )[1]
        data = (sound / name / "config.json").read_bytes()
        yield from _of("head", f"{name}/config.json", of_any_file(data, 9, cuts=2, flips=4), run, named=False)
        yield from _of("head", f"{name}/config.json", of_json(data, 9, most=60), run, named=False)
        weights = (sound / name / "model.safetensors").read_bytes()
        yield from _of("head", f"{name}/model.safetensors", of_safetensors(weights, 9, most=10), run, named=False)
        yield from _of("head", f"{name}/model.safetensors", of_any_file(weights, 9, cuts=2, flips=2), run, named=False)
    run = _on_spec(
        model__path="headed",
        decoder="{kind: assd, k: 2, drafter: head, head: headed}",
        task="{kind: infill, mask: {kind: random}}",
    )[1]
    for name in ("draft_head.json", "draft_head.safetensors"):
        data = (sound / "headed" / name).read_bytes()
        found = of_json(data, 10) if name.endswith("json") else of_safetensors(data, 10, most=10)
        yield from _of("head", f"headed/{name}", of_any_file(data, 10, cuts=2, flips=2), run, named=False)
        yield from _of("head", f"headed/{name}", found, run, named=False)


def _specs(sound: Path) -> Iterator[Case]:
    for name in ("full.yaml", "full.json"):
        data = (sound / name).read_bytes()
        both = ("validate", name), ("run", name, "--local", "--quiet")
        yield from _of("spec", name, of_any_file(data, 11), *both, named=False)
        yield from _of("spec", name, of_text(data), *both, named=False)
    data = (sound / "full.json").read_bytes()
    yield from _of(
        "spec", "full.json", of_json(data, 11, most=400), ("run", "full.json", "--local", "--quiet"), named=False
    )
    yield from _of("spec", "full.yaml", _yaml(data), ("validate", "full.yaml"), named=False, written=True)
    for name in ("sweep.yaml", "sweep.json"):
        data = (sound / name).read_bytes()
        yield from _of("spec", name, of_any_file(data, 12), ("sweep", name, "--dry-run"), named=False)
    yield from _of(
        "spec", "sweep.json", of_json(data, 12, most=150), ("sweep", "sweep.json", "--local", "--quiet"), named=False
    )


def _yaml(data: bytes) -> Iterator[Damage]:
    text = yaml.safe_dump(json.loads(data))
    bombs = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
    )
    yield "anchors that grow", (bombs + text).encode()
    yield "an anchor in itself", ("x: &x [*x]\n" + text).encode()
    yield "deep", b"[" * DEEP
    yield "deep blocks", ("".join(f"{' ' * n}a:\n" for n in range(3000))).encode()
    yield "a tag of Python", b"!!python/object/apply:os.system [true]"
    yield "two documents", text.encode() + b"---\n" + text.encode()
    yield "sexagesimal", b"seed: 1:2:3:" + b"59:" * 1000 + b"1\n"
    yield "binary", b"name: !!binary aGk=\n" + text.encode()
    yield "a bad timestamp", b"name: !!timestamp 2026-99-99\n" + text.encode()
    yield "a bad int", b"seed: !!int zz\n" + text.encode()


OVER_RUN: Final = (
    ("status", "done"),
    ("verify", "done"),
    ("export", "done", "--format", "jsonl", "--out", "all.jsonl"),
    ("show", "done"),
    ("report", "done", "--out", "r.html"),
    ("compare", "done", "done"),
    ("measure", "done", "--metric", "entropy", "--local", "--quiet"),
    ("logs", "done"),
    ("status", "."),
    ("rerun", "done", "--failed", "--local", "--quiet"),
    ("run", "done.yaml", "--local", "--quiet"),
    ("validate", "done.yaml"),
    ("run", "job.yaml", "--local", "--quiet", "--set", "input={run: done}", "--set", "output.path=again"),
    ("prune", ".", "--keep", "0"),
)


def _runs(sound: Path) -> Iterator[Case]:
    files = sorted(str(path.relative_to(sound)) for path in (sound / "done").rglob("*") if path.is_file())
    place = 0
    for number, file in enumerate(files):
        data = (sound / file).read_bytes()
        if not data:
            continue
        found = list(of_any_file(data, number, cuts=2, flips=4))
        if file.endswith(".json") or Path(file).name == "_SUCCESS":
            found += of_json(data, number, skip=("spec", "results", "code"), most=40)
        for name, content in found:
            # Each damage meets a share of the commands, in turn.
            chosen = tuple(OVER_RUN[(place + step * 3) % len(OVER_RUN)] for step in range(3))
            place += 1
            yield Case("run", name, file, content, chosen, named=False)


INPUTS: Final = (
    "rows.jsonl",
    "rows.jsonl.gz",
    "rows.jsonl.zst",
    "rows.txt",
    "rows.csv",
    "rows.tsv",
    "rows.parquet",
    "rows.arrow",
    "stream.arrow",
    "batch.jsonl",
)


def _inputs(sound: Path) -> Iterator[Case]:
    for number, name in enumerate(INPUTS):
        data = (sound / name).read_bytes()
        both = _on_spec(input__path=name)
        yield from _of("input", name, of_any_file(data, number, cuts=8, flips=10), *both)
        if name.rpartition(".")[2] in {"jsonl", "txt", "csv", "tsv"}:
            yield from _of("input", name, of_text(data), *both)
    both = _on_spec(input__path="rows.csv")
    yield from _of("input", "rows.csv", _csv(), *both, written=True)
    yield from _of("input", "rows.jsonl", _second_rows(), *_on_spec())
    yield from _of("input", "rows.jsonl", _lines(), *_on_spec(), written=True)
    yield from _of("input", "rows.parquet", _tables(), *_on_spec(input__path="rows.parquet"), written=True)


def _csv() -> Iterator[Damage]:
    yield "an open quote", b'id,text\na,"never closed\nb,c\n'
    yield "100,000 columns", b",".join([b"c%d" % n for n in range(100_000)]) + b"\n"
    yield "a long field", b"id,text\na," + b"x" * 4 * 10**6 + b"\n"


def _second_rows() -> Iterator[Damage]:
    good = json.dumps(ROWS[0]).encode() + b"\n"
    for name, content in of_json(good, 0):
        assert isinstance(content, bytes)
        yield f"a row: {name}", good + content.replace(b"\n", b" ") + b"\n" + good


def _lines() -> Iterator[Damage]:
    good = json.dumps(ROWS[0]).encode() + b"\n"
    yield "a number of 10,000 digits", good + b'{"id": "z", "text": ' + b"9" * 10_000 + b"}\n"
    yield "10,000 keys", good + json.dumps({f"k{n}": n for n in range(10_000)}).encode() + b"\n"
    yield "blank lines", b"\n" * 1000 + good


def _tables() -> Iterator[Damage]:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, pa.Array] = {
        "lists": pa.array([["a"], ["b"]]),
        "times": pa.array([datetime.datetime(2026, 1, 1)] * 2),
        "dictionary": pa.array(["a", "b"]).dictionary_encode(),
        "views": pa.array(["a", "b"]).cast(pa.string()),
        "huge years": pa.array([2**62, 1], pa.timestamp("us")),
        "maps": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    }
    for name, array in columns.items():
        out = io.BytesIO()
        pq.write_table(pa.table({"id": ["a", "b"], "text": array}), out)
        yield f"text of {name}", out.getvalue()
        out = io.BytesIO()
        pq.write_table(pa.table({"id": array, "text": ["a", "b"]}), out)
        yield f"ids of {name}", out.getvalue()
    out = io.BytesIO()
    pq.write_table(pa.table({}), out)
    yield "no columns", out.getvalue()


def _schemas(sound: Path) -> Iterator[Case]:
    data = (sound / "schema.json").read_bytes()
    run = _on_spec(task="{kind: complete, max_new_tokens: 40, constraint: {json_schema: schema.json}}")[1]
    yield from _of("schema", "schema.json", of_any_file(data, 13), run, named=False)
    yield from _of("schema", "schema.json", of_json(data, 13, most=150), run, named=False)
    rules = {
        "an open bracket": "[",
        "a group": "(",
        "powers": "(a{1,1000}){1,1000}",
        "nested stars": "((a*)*)*b",
        "nothing": "",
        "a big class": r"\\p{L}{100}",
        "long": "x" * LONG,
        "deep": "(" * 5000 + "a" + ")" * 5000,
    }
    for name, text in rules.items():
        spec = job(task={"kind": "complete", "max_new_tokens": 4, "constraint": {"regex": text}})
        yield Case("schema", f"regex: {name}", "job.yaml", json.dumps(spec).encode(), (VALIDATE, RUN), False, True)
    for name, text in {
        "open": "start: (",
        "loop": "start: start",
        "deep": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    }.items():
        spec = job(task={"kind": "complete", "max_new_tokens": 4, "constraint": {"grammar": text}})
        yield Case("schema", f"grammar: {name}", "job.yaml", json.dumps(spec).encode(), (VALIDATE, RUN), False, True)


def _templates(sound: Path) -> Iterator[Case]:
    run = _on_spec(task="{kind: complete, max_new_tokens: 2, chat: true}")[1]
    texts = {
        "open": "{% for m in messages %}",
        "unknown filter": "{{ messages | odd }}",
        "unknown name": "{{ odd.odd }}",
        "raise": "{{ raise_exception('no') }}",
        "no end": "{% if true %}",
        "division": "{{ 1 // 0 }}",
        "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "a long loop": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "attributes": "{{ ''.__class__.__mro__ }}",
        "power": "{{ 9 ** 9 ** 9 }}",
        "repeat": "{{ 'x' * 10**10 }}",
        "format": "{{ '{:1000000000}'.format(1) }}",
        "percent star": "{{ '%*d' % (1000000000, 1) }}",
        "lipsum": "{{ lipsum(n=10**9) }}",
        "wordwrap": "{{ 'a b' | wordwrap(1, wrapstring='b' * 10**5) }}",
        "join": "{{ range(1000) | join('x' * 10**6) }}",
        "center": "{{ 'x' | center(10**9) }}",
        "a list": "{{ [0] * 10**10 }}",
        "ljust": "{{ 'x'.ljust(10**10) }}",
        "zfill": "{{ 'x'.zfill(10**10) }}",
        "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
        "slice": "{{ 'x' | slice(10**8) | list }}",
        "translate": "{{ ('x' * 10**5).translate({120: 'y' * 10**5}) }}",
        "cycler": "{{ cycler(*range(10**8)).next() }}",
        "lists grow": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "sum": "{{ [[1]] | sum(start=[]) }}",
        "strftime": "{{ strftime_now('%Y' * 10**6) }}",
        "strftime odd": "{{ strftime_now('\ud800') }}",
        "xmlattr": "{{ {'a b': 1} | xmlattr }}",
        "nothing": "",
        "a text": "abc",
        "a long text": "x" * 10 * LONG,
    }
    for number, (name, text) in enumerate(texts.items()):
        chat = text.encode("utf-8", "surrogatepass")
        yield Case("template", name, "model/chat_template.jinja", chat, (run,), False, number % 2 == 0)
        spec = json.dumps(job(prompt={"template": text})).encode()
        yield Case("template", f"prompt.template: {name}", "job.yaml", spec, (VALIDATE,), False, number % 2 == 1)
    data = (sound / "model/chat_template.jinja").read_bytes()
    yield from _of("template", "model/chat_template.jinja", of_any_file(data, 14), run)
    yield from _of("template", "model/chat_template.jinja", of_text(data), run)
    data = (sound / "examples.jsonl").read_bytes()
    shown = "{% for one in examples %}{{ one.text }}{% endfor %}{{ text }}"
    run = _on_spec(prompt=f"{{template: '{shown}', examples: {{path: examples.jsonl, k: 2}}}}")[1]
    yield from _of("template", "examples.jsonl", of_any_file(data, 15), run)
    yield from _of("template", "examples.jsonl", of_text(data), run)


def _rows(sound: Path) -> Iterator[Case]:
    """Rows whose keys have odd values; the keys of OpenAI's requests among them."""
    good = json.dumps(ROWS[0]).encode() + b"\n"
    settings = {
        "chat.jsonl": "{id: id, messages: messages, template_kwargs: template_kwargs, constraint: constraint}",
        "batch.jsonl": "{}",
    }
    for name, columns in settings.items():
        row = (sound / name).read_bytes()
        run = _on_spec(input=f"{{path: {name}, columns: {columns}}}")[1]
        for title, content in of_json(row, 16, most=200):
            assert isinstance(content, bytes)
            yield Case("row", title, name, row + content.replace(b"\n", b" ") + b"\n" + row, (run,), False)
    run = _on_spec(model__tokenizer="none", input="{path: chat.jsonl, columns: {tokens: tokens}}")[1]
    for name, value in VALUES.items():
        spoken = f"[1, {value}, 2]" if isinstance(value, str) and value.startswith("[[") else json.dumps([1, value, 2])
        yield Case(
            "row",
            f"tokens with {name}",
            "chat.jsonl",
            f'{{"id": "a", "tokens": {spoken}}}\n'.encode() + good,
            (run,),
            False,
        )


KINDS: Final[dict[str, Callable[[Path], Iterator[Case]]]] = {
    "config": _models,
    "families": _families,
    "tokenizer": _tokenizers,
    "weights": _weights,
    "gguf": _gguf,
    "adapter": _adapters,
    "head": _heads,
    "spec": _specs,
    "run": _runs,
    "input": _inputs,
    "row": _rows,
    "schema": _schemas,
    "template": _templates,
}
