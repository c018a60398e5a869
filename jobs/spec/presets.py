"""Presets: settings with which authors published results of diffusion models, by name, each with its source. Pure.

A spec with `preset: NAME` gets every key that it leaves out from the preset. A decoder of another kind takes no keys over. The
number of tokens, the decoder and the sampling are the authors'; prompts, examples and what is cut from the answers are those of
the task or the job, and change scores, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Preset:
    """`settings` are a part of a spec; `source` says where they were published."""

    source: str
    settings: Mapping[str, Any]


def _preset(source: str, path: str, length: int, decoder: Mapping[str, Any], **sampling: Any) -> Preset:
    task, model = {"kind": "complete", "max_new_tokens": length}, {"path": path}
    return Preset(source, {"task": task, "model": model, "decoder": dict(decoder), "sampling": sampling})


def _llada(model: str, length: int, block: int, *, suppress_end: bool = False, **more: Any) -> Preset:
    """LLaDA's own code, greedy, as many steps as tokens."""
    decoder = {"kind": "stepwise", "block_length": block, "suppress_end": suppress_end}
    return _preset("ML-GSAI/LLaDA, EVAL.md", f"GSAI-ML/{model}", length, decoder, temperature=0.0, **more)


def _dream(source: str, model: str, length: int, **sampling: Any) -> Preset:
    """Dream's own code, `alg="entropy"`, as many steps as tokens."""
    decoder = {
        "kind": "stepwise", "block_length": None, "confidence": "entropy", "schedule": "dream", "steps": length,
    }  # fmt: skip
    return _preset(f"DreamLM/Dream, {source}", f"Dream-org/{model}", length, decoder, **sampling)


_SDAR: Final = _preset(
    "JetAstra/SDAR, evaluation/opencompass/configs/eval_sdar_hf.py",
    "JetLM/SDAR-8B-Chat",
    4096,
    {"kind": "block_diffusion", "block_size": 4, "schedule": "static", "steps": 4},
    temperature=1.0,
    top_k=1,
)
_BASE, _INSTRUCT = "LLaDA-8B-Base", "LLaDA-8B-Instruct"
_DREAM: Final = {"temperature": 0.1, "top_p": 0.9}

PRESETS: Final[Mapping[str, Preset]] = {
    "llada-base-gsm8k": _llada(_BASE, 1024, 1024),
    "llada-base-mbpp": _llada(_BASE, 1024, 1024),
    "llada-base-humaneval": _llada(_BASE, 1024, 1024),
    "llada-instruct-gsm8k": _llada(_INSTRUCT, 512, 512, suppress_end=True),
    "llada-instruct-gsm8k-blocks": _llada(_INSTRUCT, 256, 8),
    "llada-instruct-mbpp": _llada(_INSTRUCT, 256, 256, suppress_end=True),
    # `logits_eos_inf`: no end token in any place.
    "llada-instruct-humaneval": _llada(_INSTRUCT, 512, 512, min_new_tokens=512),
    "llada-1.5-gsm8k": _llada("LLaDA-1.5", 256, 16, suppress_end=True),
    "llada-1.5-mbpp": _llada("LLaDA-1.5", 512, 32, suppress_end=True),
    "llada-1.5-humaneval": _llada("LLaDA-1.5", 512, 32, suppress_end=True),
    "dream-base-gsm8k": _dream("eval/eval_dream_gen.sh", "Dream-v0-Base-7B", 256, temperature=0.0, top_p=0.95),
    "dream-base-mbpp": _dream("eval/eval_dream_gen.sh", "Dream-v0-Base-7B", 512, temperature=0.2, top_p=0.95),
    "dream-base-humaneval": _dream("eval/eval_dream_gen.sh", "Dream-v0-Base-7B", 512, temperature=0.2, top_p=0.95),
    "dream-instruct-gsm8k": _dream("eval_instruct/eval.sh", "Dream-v0-Instruct-7B", 256, **_DREAM),
    "dream-instruct-mbpp": _dream("eval_instruct/eval.sh", "Dream-v0-Instruct-7B", 1024, **_DREAM),
    "dream-instruct-humaneval": _dream("eval_instruct/eval.sh", "Dream-v0-Instruct-7B", 768, **_DREAM),
    "sdar-gsm8k": _SDAR,
    "sdar-mbpp": _SDAR,
    "sdar-humaneval": _SDAR,
    "fast-dllm-v2-gsm8k": _preset(
        "NVlabs/Fast-dLLM, v2/eval_script.sh, as others quote it",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
        2048,
        {"kind": "block_diffusion", "block_size": 32, "sub_block": 8, "schedule": "dynamic", "tau": 1.0},
        temperature=0.0,
    ),
    "fast-dllm-v2-humaneval": _preset(
        "S2D2's README: min-span 8, threshold 0.9",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
        512,
        {
            "kind": "s2d2", "block_size": 32, "schedule": "dynamic", "tau": 0.9, "router": {"kind": "min_span", "span": 8},
        },
        temperature=0.0,
    ),
}  # fmt: skip
"""The presets by name."""


def with_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """A spec's mapping, with what it leaves out from its preset; an unknown name is left for validation to refuse."""
    preset = PRESETS.get(data.get("preset") or "") if isinstance(data.get("preset"), str) else None
    if preset is None:
        return dict(data)
    merged = dict(data)
    for name, settings in deepcopy(dict(preset.settings)).items():
        own = data.get(name)
        if own is None:
            merged[name] = settings
        elif isinstance(own, dict) and own.get("kind", settings.get("kind")) == settings.get("kind"):
            merged[name] = settings | own
    return merged
