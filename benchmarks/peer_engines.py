"""The engines of `benchmarks.peers`, each served by a process of its own: `peer_engines.py PACKAGE FORM MODEL MADE SLOTS`.

The module imports only the standard library at its top: the other engines' environments have neither torch nor draftmill.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], list[int]], list[list[int]]]
"""A function from prompts and their numbers of new tokens to the new tokens."""
LONGEST = 1_400
"""The longest text of a workload."""


def _draftmill(folder: Path, made: Path, form: str, slots: int) -> Run:
    import torch

    from benchmarks.real_engines import OURS, decode
    from draftmill.decoders.backbones.load import load_backbone

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype, small = ("float32", form) if form in {"int8", "w8a8"} else (form, "auto")
    backbone = load_backbone(folder, dtype=dtype, device="cpu", small=small)

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        texts = decode(folder, backbone, OURS["autoregressive"], prompts, new, min(slots, len(prompts)))
        return [texts[index] for index in range(len(prompts))]

    return run


def _openvino(folder: Path, made: Path, form: str, slots: int) -> Run:
    import numpy as np
    import openvino
    import openvino_genai as genai

    if not (made / "openvino_model.xml").is_file():
        genai.LLMPipeline(made / "q8.gguf", "CPU", enable_save_ov_model=True)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size, scheduler.enable_prefix_caching = slots, 2, True
    threads = {"INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"])}
    pipeline = genai.ContinuousBatchingPipeline(made, scheduler, "CPU", threads)

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        configs = [genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False) for count in new]
        rows = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [result.m_generation_ids[0] for result in pipeline.generate(rows, configs)]

    return run


def _vllm(folder: Path, made: Path, form: str, slots: int) -> Run:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    limits: Any = {"max_num_seqs": slots, "max_model_len": LONGEST, "enable_prefix_caching": True}
    model = LLM(str(folder), dtype=form, **limits)

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        rows: Any = [{"prompt_token_ids": ids} for ids in prompts]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
        return [list(result.outputs[0].token_ids) for result in model.generate(rows, params, use_tqdm=False)]

    return run


def _ctranslate2(folder: Path, made: Path, form: str, slots: int) -> Run:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    if not (made / "ct2" / "model.bin").is_file():
        TransformersConverter(str(folder)).convert(str(made / "ct2"), force=True)
    threads = {"inter_threads": 1, "intra_threads": int(os.environ["OMP_NUM_THREADS"])}
    generator = ctranslate2.Generator(str(made / "ct2"), device="cpu", compute_type=form, **threads)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()}
    names |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        texts: dict[int, list[int]] = {}
        for count in sorted(set(new)):
            order = sorted((i for i, n in enumerate(new) if n == count), key=lambda i: len(prompts[i]))
            results = generator.generate_batch(
                [[names[token] for token in prompts[i]] for i in order],
                max_batch_size=slots,
                max_length=count,
                sampling_topk=1,
                include_prompt_in_result=False,
                end_token="<file_sep>",  # which no text contains
            )
            texts |= {i: list(result.sequences_ids[0]) for i, result in zip(order, results, strict=True)}
        return [texts[index] for index in range(len(prompts))]

    return run


LOADERS: dict[str, Callable[[Path, Path, str, int], Run]] = {
    "draftmill": _draftmill,
    "openvino": _openvino,
    "vllm": _vllm,
    "ctranslate2": _ctranslate2,
}


def serve(package: str, form: str, folder: str, made: str, slots: str) -> None:
    """Load an engine and decode the workloads that arrive on stdin, one JSON line each."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to stdout
    began = time.perf_counter()
    try:
        run = LOADERS[package](Path(folder), Path(made), form, int(slots))
        run([[5, 6, 7, 8]] * 2, [4, 4])
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}), file=out)
        raise
    print(json.dumps({"start_s": time.perf_counter() - began}), file=out)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        texts = run(prompts, new)
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(json.dumps(seconds | {"texts": texts, "peak_mb": peak}), file=out)


if __name__ == "__main__":
    serve(*sys.argv[1:])
