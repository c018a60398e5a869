"""How fast is a job? The cases of `python -m benchmarks.device job`: streams of requests, memory as planned, other software.

A stream is 2,000 requests of mixed lengths for a decoder whose slots are kept full, as a worker keeps them: in parts of 256, the
longest first. After a minute no further request begins. The time to first token counts from when a request gets its slot.
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
from draftmill.decoders.common_settings import DecoderChoice

COLUMNS: Final = {
    "Streams of 2,000 requests": "case | slots | tokens/s | in the middle half | to be judged against | requests done | steps | "
    "forwards replayed a step | first token, ms: median | 95 %",
    "Memory, GiB": "case | free | planned for slots | for logits | weights | most reserved | rows of prompts | texts of 512",
    "64 prompts of 640 tokens, 64 new tokens each": "engine | tokens/s",
}
_STREAMS, _MEMORY, _OTHERS = COLUMNS
_SECONDS: Final = 60.0
# Columns that a slot has on average: `batching.max_tokens: auto` of a GPU.
_COLUMNS: Final = 2048


@dataclass(frozen=True, slots=True)
class Stream:
    """A decoder with so many slots; prompts and new tokens have up to so many tokens."""

    name: str
    config: dict[str, Any]
    settings: DecoderChoice
    slots: int
    goal: str = "-"
    prompt: int = 1500
    new: int = 256


_VLLM: Final = "vLLM on an H100: about 5,800"
_SGLANG: Final = "SGLang, LLaDA2.1-mini on an H20, 128 slots: 3,412"
STREAMS: Final = [
    Stream("Llama-8B, automatic", models.LLAMA_8B, models.AR, 256),
    Stream("XLNet-110M assd k=5, automatic", models.XLNET_110M, models.ASSD, 256, ">= 60,000", 256),
    Stream("Llama-8B, 64 slots", models.LLAMA_8B, models.AR, 64, _VLLM),
    Stream("Llama-0.5B, 256 slots", models.LLAMA_05B, models.AR, 256),
    Stream("Llama-0.5B, 1,024 slots", models.LLAMA_05B, models.AR, 1024),
    Stream("LLaDA-8B stepwise, dual cache, 64 slots", models.LLADA_8B, models.STEPWISE, 64, _SGLANG, 512),
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
    decoder = models.decoder_of(model, case.settings, case.slots, columns=bench.size(_COLUMNS, 32))
    free_bytes = bench.free_bytes()
    decoder.fit(free_bytes)
    queue = deque(models.requests_of(model, _mixed(case, bench.size(2000, 4))))
    num_done, laps, first_ms, began_s = 0, [(0.0, 0)], dict[int, float](), time.perf_counter()
    for _, done in models.stream(decoder, queue):
        num_done += len(done)
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
        _speed(laps),
        _speed(middle),
        case.goal,
        str(num_done),
        str(decoder.stats.steps),
    ]
    yield _STREAMS, [*cells, share, *(f"{ms:,.0f}" for ms in waits_ms)]
    reserved_bytes, plan = 0 if bench.rehearse else torch.cuda.max_memory_reserved(), decoder.plan
    bytes_of = (free_bytes, plan.slots, 8 * plan.logits, model.num_bytes, reserved_bytes)  # logits have copies
    most = decoder.most_rows(bench.size(512, 24))
    yield _MEMORY, [case.name, *(f"{one / 2**30:.2f}" for one in bytes_of), str(plan.prompt_rows), str(most)]


def _speed(laps: list[tuple[float, int]]) -> str:
    """Tokens a second between the first and the last of these (seconds, tokens)."""
    (began_s, before), (end_s, now) = laps[0], laps[-1]
    return f"{(now - before) / max(end_s - began_s, 1e-9):,.0f}"


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


def _theirs(bench: Bench) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = bench.config(models.LLAMA_8B)
    with torch.device(bench.device):
        fields = {name: value for name, value in config.items() if name != "model_type"}
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=bench.dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _generate(bench: Bench) -> _Generate:
    model = _theirs(bench)

    @torch.inference_mode()
    def generate(prompts: _Prompts, new: int) -> int:
        ids = torch.tensor(prompts, device=bench.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        return int(out[:, ids.shape[1] :].numel())

    return generate


def _continuous(bench: Bench) -> _Generate:
    from transformers import GenerationConfig

    model = _theirs(bench)

    @torch.inference_mode()
    def generate(prompts: _Prompts, new: int) -> int:
        wanted = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = model.generate_batch(inputs=prompts, generation_config=wanted, progress_bar=False)
        return sum(len(result.generated_tokens) for result in results.values())

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
    # Takes a minute to begin on a CPU.
    ("transformers, continuous batching", _continuous, "transformers"),
    ("vLLM", _vllm, "vllm"),
)
CASES: Final = [
    *(Case(one.name, _STREAMS, partial(_stream, one), 120) for one in STREAMS),
    *(Case(name, _OTHERS, partial(_other, name, make, needs), 100) for name, make, needs in _OTHER),
]
