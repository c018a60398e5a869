"""How fast is a job? The cases of `python -m benchmarks.device job`: streams of requests, memory as planned, other software.

A stream is 2,000 requests of mixed lengths for a decoder whose slots are kept full, as a worker keeps them: in parts of 256, the
longest first. After a minute no further request begins. The time to first token counts from when a request gets its slot. The
laws of random weights are nearly flat, so that they accept almost every draft: "at 0.6" counts the tokens/s of the same
iterations if each draft were accepted with that probability.

The streams "nano-vllm" are the workload of that project's benchmark: 256 requests of random ids, 100 to 1,024 tokens given and
100 to 1,024 new ones, uniform, at temperature 0.6.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks import device_models as models
from benchmarks.device_models import Bench, Case, Row
from draftmill.decoders.base import Outcome
from draftmill.decoders.common_settings import DecoderChoice

COLUMNS: Final = {
    "Streams of requests": "case | slots | tokens/s | in the middle half | accepted | at 0.6 | to be judged against | done | "
    "steps | forwards replayed a step | first token, ms: median | 95 %",
    "Memory, GiB": "case | free | planned for slots | for logits | weights | most reserved | rows of prompts | texts of 512",
    "64 prompts of 640 tokens, 64 new tokens each": "engine | tokens/s",
}
_STREAMS, _MEMORY, _OTHERS = COLUMNS
_SECONDS: Final = 60.0
# Columns that a slot has on average: `batching.max_tokens: auto` of a GPU.
_COLUMNS: Final = 2048


@dataclass(frozen=True, slots=True)
class Stream:
    """A decoder with so many slots; prompts and new tokens have up to so many tokens. `at_06`: the tokens of an iteration if each
    draft that may be refused holds with probability 0.6."""

    name: str
    config: dict[str, Any]
    settings: DecoderChoice
    slots: int
    goal: str = "-"
    prompt: int = 1500
    new: int = 256
    at_06: float = 0.0
    is_nano: bool = False


_VLLM: Final = "vLLM on an H100: about 5,800"
_SGLANG: Final = "SGLang, LLaDA2.1-mini on an H20, 128 slots: 3,412"
_NANO: Final = "nano-vllm on an A800: {}"
STREAMS: Final = [
    Stream("Llama-8B, automatic", models.LLAMA_8B, models.AR, 256),
    # The first of five drafts always holds; each later one is judged, and replaced if it is the first refused.
    Stream("XLNet-110M assd k=5, automatic", models.XLNET_110M, models.ASSD, 256, ">= 60,000", 256, at_06=1 + 2.176),
    Stream("Llama-8B, 64 slots", models.LLAMA_8B, models.AR, 64, _VLLM),
    Stream("Qwen2.5-0.5B, 1,024 slots", models.QWEN_05B, models.AR, 1024),
    Stream("Llama-3.2-1B, nano-vllm", models.LLAMA_1B, models.AR, 256, _NANO.format("15,068"), is_nano=True),
    Stream("Qwen2.5-0.5B, nano-vllm", models.QWEN_05B, models.AR, 256, _NANO.format("24,121"), is_nano=True),
    Stream("LLaDA-8B stepwise, dual cache, 64 slots", models.LLADA_8B, models.STEPWISE, 64, _SGLANG, 512),
]


def _sizes(case: Stream, bench: Bench) -> list[tuple[int, int]]:
    """Tokens given and new tokens of requests."""
    if not case.is_nano:
        return _mixed(case, bench.size(2000, 4))
    most = bench.size(1024, 12)
    return [
        (a, b)
        for a, b in np.random.default_rng(0).integers(bench.size(100, 4), most + 1, (bench.size(256, 3), 2)).tolist()
    ]


def _mixed(case: Stream, count: int) -> list[tuple[int, int]]:
    """Tokens given and new tokens of requests, whose logarithms are uniform; in each 256 the longest come first."""
    logs = np.random.default_rng(0).uniform(np.log(8), np.log([case.prompt, case.new]), (count, 2))
    sizes = [(int(prompt), int(new)) for prompt, new in np.exp(logs)]
    return [size for at in range(0, count, 256) for size in sorted(sizes[at : at + 256], key=sum, reverse=True)]


def _stream(case: Stream, bench: Bench) -> Iterator[Row]:
    if bench.rehearse:
        case = replace(case, slots=2, prompt=16, new=9)
    model = bench.model(case.config)
    temperature = 0.6 if case.is_nano else 1.0
    decoder = models.decoder_of(
        model, case.settings, case.slots, columns=bench.size(_COLUMNS, 32), temperature=temperature
    )
    free_bytes = bench.free_bytes()
    decoder.fit(free_bytes)
    queue = deque(models.requests_of(model, _sizes(case, bench)))
    ended, laps, first_ms, began_s = list[Outcome](), [(0.0, 0)], dict[int, float](), time.perf_counter()
    for _, done in models.stream(decoder, queue):
        ended += done
        _note_first(decoder, first_ms)
        laps.append((time.perf_counter() - began_s, decoder.stats.committed))
        if laps[-1][0] > _SECONDS:
            queue.clear()
    quarter_s, graphs = laps[-1][0] / 4, decoder.target.graphs
    middle = [lap for lap in laps if quarter_s <= lap[0] <= 3 * quarter_s] or laps
    share = f"{graphs.num_replayed / decoder.stats.steps:.0%}" if graphs else decoder.graphs
    waits_ms = np.percentile(list(first_ms.values()) or [np.nan], [50, 95])
    cells = [
        case.name,
        str(case.slots),
        f"{_speed(laps):,.0f}",
        f"{_speed(middle):,.0f}",
        *_accepted(case, ended, laps),
    ]
    cells += [case.goal, str(len(ended)), str(decoder.stats.steps), share]
    yield _STREAMS, [*cells, *(f"{ms:,.0f}" for ms in waits_ms)]
    reserved_bytes, plan = 0 if bench.rehearse else torch.cuda.max_memory_reserved(), decoder.plan
    bytes_of = (free_bytes, plan.slots, 8 * plan.logits, model.num_bytes, reserved_bytes)  # logits have copies
    most = decoder.most_rows(bench.size(512, 24))
    yield _MEMORY, [case.name, *(f"{one / 2**30:.2f}" for one in bytes_of), str(plan.prompt_rows), str(most)]


def _speed(laps: list[tuple[float, int]]) -> float:
    """Tokens a second between the first and the last of these (seconds, tokens)."""
    (began_s, before), (end_s, now) = laps[0], laps[-1]
    return (now - before) / max(end_s - began_s, 1e-9)


def _accepted(case: Stream, ended: list[Outcome], laps: list[tuple[float, int]]) -> list[str]:
    """The share of drafts that held, and tokens a second if 0.6 of them had."""
    proposed, iterations = sum(one.proposed for one in ended), sum(one.iterations for one in ended)
    if not proposed or not case.at_06:
        return ["-", "-"]
    each = sum(len(one.tokens) for one in ended) / iterations
    return [f"{sum(one.accepted for one in ended) / proposed:.0%}", f"{_speed(laps) * case.at_06 / each:,.0f}"]


def _note_first(decoder: Any, first_ms: dict[int, float]) -> None:
    """The milliseconds from its slot to its first token, of each sample that has one by now."""
    now_s = time.perf_counter()
    for sample in decoder.samples:
        if sample.iterations and sample.request.index not in first_ms:
            first_ms[sample.request.index] = 1000 * (now_s - sample.times.admitted_s)


# ---- other software --------------------------------------------------------------------------------------------------

_Prompts = list[list[int]]
_Generate = Callable[[_Prompts, int], int]
"""Answers prompts with so many new tokens each; returns how many came."""


def _other(name: str, make: Callable[[Bench], _Generate], needs: str | None, bench: Bench) -> Iterator[Row]:
    """Tokens/s with a random model of Llama-8B's shape, after two prompts that compile; another project's failure is a result."""
    if needs and (bench.rehearse or importlib.util.find_spec(needs) is None):
        yield _OTHERS, [name, "not in a rehearsal" if bench.rehearse else "not installed"]
        return
    prompts = np.random.default_rng(0).integers(10, 200, (bench.size(64, 2), bench.size(640, 8))).tolist()
    try:
        generate = make(bench)
        generate(prompts[:2], 4)
        bench.wait()
        began_s = time.perf_counter()
        count = generate(prompts, bench.size(64, 3))
        bench.wait()
        yield _OTHERS, [name, f"{count / (time.perf_counter() - began_s):,.0f}" if count else "failed: no token came"]
    except Exception as error:  # noqa: BLE001 - whatever other software raises
        reason = (str(error).splitlines() or [""])[0][:200]
        yield _OTHERS, [name, f"failed: {type(error).__name__}: {reason}"]


def _ours(bench: Bench) -> _Generate:
    model = bench.model(models.LLAMA_8B)
    decoder = models.decoder_of(model, models.AR, 64, columns=768)

    def generate(prompts: _Prompts, new: int) -> int:
        requests = models.requests_of(model, [(len(prompt), new) for prompt in prompts])
        return sum(len(outcome.tokens) for _, done in models.stream(decoder, deque(requests)) for outcome in done)

    return generate


def _generate(bench: Bench) -> _Generate:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = bench.config(models.LLAMA_8B)
    with torch.device(bench.device):
        fields = {name: value for name, value in config.items() if name != "model_type"}
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=bench.dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0

    @torch.inference_mode()
    def generate(prompts: _Prompts, new: int) -> int:
        ids = torch.tensor(prompts, device=bench.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        return int(out[:, ids.shape[1] :].numel())

    return generate


def _vllm(bench: Bench) -> _Generate:
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        own_config = models.LLAMA_8B | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(own_config))
        engine = vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=64)

    def generate(prompts: _Prompts, new: int) -> int:
        wanted = vllm.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate


_OTHER: Final = (
    ("draftmill", _ours, None),
    ("transformers, generate", _generate, None),
    ("vLLM", _vllm, "vllm"),
)
CASES: Final = [
    *(Case(one.name, _STREAMS, partial(_stream, one), 120) for one in STREAMS),
    *(Case(name, _OTHERS, partial(_other, name, make, needs), 100) for name, make, needs in _OTHER),
]
