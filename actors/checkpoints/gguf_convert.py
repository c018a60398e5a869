"""Converts a GGUF file to a folder of safetensors and JSON.

    python -m draftmill.actors.checkpoints.gguf_convert FILE FOLDER SHA256

transformers reads the file (`load_gguf_checkpoint`). That reader ignores some keys on which results depend. This module reads
them, or rejects the file by name: position scaling, the pre-tokenizer's rule, and end tokens other than the first.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from draftmill.actors.checkpoints.gguf_files import by_hand, weights_hash
from draftmill.actors.checkpoints.made_folders import refuse, write_source
from draftmill.decoders.backbones.families import any_causal

# Keys that change what a model computes and that no family here supports, with their neutral values.
_NEUTRAL: Final = {
    "attention.scale": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}
_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# Pre-tokenizer rules that transformers does not know; each is a part of a tokenizer.json.
_PLAIN: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: Final = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _PLAIN]}
_RULES: Final = {"default": _PLAIN, "gpt-2": _PLAIN, "gpt2": _PLAIN, "smollm": _DIGITS}
# Vocabularies that encode a word that is itself a token as that token, regardless of its merges.
_WHOLE_WORDS: Final = {"llama3", "llama-v3", "llama-bpe", "tekken"}


@dataclass
class GGUF:
    """An open file."""

    path: Path

    @cached_property
    def reader(self) -> Any:
        from gguf import GGUFReader

        return GGUFReader(self.path)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` if the file lacks it."""
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    @cached_property
    def num_embeddings(self) -> int | None:
        """The number of ids in the embedding table; other id counts in the file may exclude its padding."""
        sizes = [tensor.n_elements for tensor in self.reader.tensors if tensor.name == "token_embd.weight"]
        return int(sizes[0]) // int(self.own("embedding_length")) if sizes else None

    def end_ids(self) -> list[int]:
        """The ids that end a text or a turn, in order of _END_KEYS."""
        ids = (self.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
        return list(dict.fromkeys(int(token) for token in ids if token is not None))


def convert(file: Path, folder: Path, content: str) -> None:
    """Write the checkpoint of `file` into `folder`. Raises ValueError if a part of it can't be preserved."""
    from transformers import AutoModelForCausalLM

    from draftmill.decoders.backbones.checkpoint import inspect_model

    gguf = GGUF(file)
    config = read_config(gguf)
    if config["model_type"] not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"its architecture {gguf.architecture!r} is not supported; supported families: {known}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(any_causal.parse(config["model_type"], config))
    write_weights(gguf, model, config, folder)
    _write(folder / "config.json", config | {"architectures": [type(model).__name__]})
    ends, begin = gguf.end_ids(), gguf.get("tokenizer.ggml.bos_token_id")
    generation = {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    _write(folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None})
    problem = write_tokenizer(gguf, folder)
    source = {"file": file.name, "sha256": content, "weights": weights_hash(content)}
    write_source(folder, source | ({"tokenizer": problem} if problem else {}))
    inspect_model(folder)


# ---- config ------------------------------------------------------------------------------------------------------


def read_config(gguf: GGUF) -> dict[str, Any]:
    """The file's config in the format of a config.json."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(gguf.path.parent), gguf_file=gguf.path.name).to_dict()
    config = {key: value for key, value in config.items() if key not in {"_name_or_path", "_model_name_or_path"}}
    for key, neutral in _NEUTRAL.items():
        value = gguf.own(key)
        if value is not None and float(value) not in {neutral, 0.0}:
            raise ValueError(f"it has {gguf.architecture}.{key} = {value}, which no family here supports")
    if gguf.architecture == "gpt2":
        config |= {"n_positions": gguf.own("context_length"), "n_inner": gguf.own("feed_forward_length")}
    config["vocab_size"] = gguf.num_embeddings or config["vocab_size"]
    width = gguf.own("attention.key_length")
    if width is not None and "head_dim" in config:
        config["head_dim"] = int(width)
    scaled = _rope_parameters(gguf, config)
    return config if scaled is None else config | {"rope_parameters": scaled}


def _rope_parameters(gguf: GGUF, config: dict[str, Any]) -> dict[str, Any] | None:
    """The rope parameters of a model with scaled positions; None for any other."""
    rope = dict(config.get("rope_parameters") or {})
    kind, factors = gguf.own("rope.scaling.type", "none"), _tensor(gguf, "rope_freqs.weight")
    if factors is not None:
        return _llama3(rope, factors, config)
    factor = gguf.own("rope.scaling.factor", gguf.own("rope.scale_linear"))
    if kind == "none" and factor in {None, 0.0, 1.0}:
        return None
    if kind in {"linear", "none"}:
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = int(gguf.own("rope.scaling.original_context_length"))
        return rope | {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    supported = "none, linear, yarn, and Llama 3's"
    raise ValueError(f"its position scaling {kind!r} is not supported; supported: {supported}")


def _llama3(rope: dict[str, Any], factors: Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's rule: the file holds the resulting factors, not the rule's parameters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original, most = 8192, float(factors.max())
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
    scaled = rope | {"rope_type": "llama3", "factor": most} | rule
    sizes = {key: config[key] for key in ("head_dim", "hidden_size", "num_attention_heads") if config.get(key)}
    parsed = LlamaConfig(**sizes, max_position_embeddings=config["max_position_embeddings"], rope_parameters=scaled)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](parsed, torch.device("cpu"))
    count = torch.arange(0, 2 * len(factors), 2, dtype=torch.float32) / (2 * len(factors))
    plain = float(rope["rope_theta"]) ** -count
    if frequencies.shape != factors.shape or not torch.allclose(plain / factors, frequencies, rtol=1e-4):
        raise ValueError("the position factors in rope_freqs.weight are not those of Llama 3.1's rule")
    return scaled


# ---- weights -----------------------------------------------------------------------------------------------------


def write_weights(gguf: GGUF, model: Any, config: dict[str, Any], folder: Path) -> None:
    """Write model.safetensors: every tensor of the file, in a narrow dtype if that represents all of its numbers."""
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, load_gguf_checkpoint
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map as names_of

    processor = TENSOR_PROCESSORS.get(gguf.architecture, TensorProcessor)(config=config)
    named = names_of(model, processor)
    passed_over = {tensor.name for tensor in gguf.reader.tensors} - named.keys() - {"rope_freqs.weight"}
    weights = load_gguf_checkpoint(str(gguf.path), return_tensors=True, model_to_load=model)["tensors"]
    if "lm_head.weight" in weights:
        passed_over -= {"output.weight"}
    if passed_over:
        raise ValueError(
            f"it holds tensors that transformers' reader does not know: {', '.join(sorted(passed_over)[:5])}"
        )
    tensors = {name: narrow(tensor).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def narrow(tensor: Tensor) -> Tensor:
    """The tensor in float16 or bfloat16 if that represents every number exactly, else unchanged."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return tensor.to(dtype)
    return tensor


def _tensor(gguf: GGUF, name: str) -> Tensor | None:
    from gguf import dequantize

    for tensor in gguf.reader.tensors:
        if tensor.name == name:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float().flatten()
    return None


# ---- tokenizer ---------------------------------------------------------------------------------------------------


def write_tokenizer(gguf: GGUF, folder: Path) -> str | None:
    """Write the tokenizer's files. If the file's own rules can't be preserved, write none and return the reason."""
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, rule = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre", "default")
    if kind not in {"gpt2", "llama"}:
        return f"the file has a tokenizer of kind {kind!r}; supported: gpt2, llama"
    if kind == "gpt2" and rule not in _RULES and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        return f"the file's pre-tokenizer rule {rule!r} (tokenizer.ggml.pre) is not known"
    AutoTokenizer.from_pretrained(str(gguf.path.parent), gguf_file=gguf.path.name).save_pretrained(folder)
    if kind == "gpt2":
        path = folder / "tokenizer.json"
        held = json.loads(path.read_text(encoding="utf-8"))
        held["pre_tokenizer"] = _RULES.get(rule, held["pre_tokenizer"])
        held["model"]["ignore_merges"] = rule in _WHOLE_WORDS or held["model"].get("ignore_merges", False)
        path.write_text(json.dumps(held, ensure_ascii=False), encoding="utf-8")
    begins = gguf.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule in _WHOLE_WORDS)
    _begin_with(folder / "tokenizer.json", int(gguf.get("tokenizer.ggml.bos_token_id")) if begins else None)
    return None


def _begin_with(path: Path, token_id: int | None) -> None:
    """Make tokenizer.json put this token, or none, before a text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    core = Tokenizer.from_file(str(path))
    begin = [] if token_id is None else [(str(core.id_to_token(token_id)), token_id)]
    names, ids = [name for name, _ in begin], [number for _, number in begin]
    if core.encode("a", add_special_tokens=True).ids != [*ids, *core.encode("a", add_special_tokens=False).ids]:
        core.post_processor = TemplateProcessing(single=[*names, "$A"], pair=[*names, "$A", "$B"], special_tokens=begin)
        core.save(str(path))


def _write(path: Path, held: dict[str, Any]) -> None:
    path.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Convert a file; prints a refusal on standard output, for `draftmill.actors.checkpoints.made_folders.run_maker`."""
    file, folder, content = Path(arguments[0]), Path(arguments[1]), arguments[2]
    try:
        convert(file, folder, content)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a damaged file makes its reader raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "use the safetensors checkpoint that it was made from, or convert it with other versions of its reader"
        refuse(f"{file.name} can't be converted: {reason.rstrip('.')}; {advice}:\n{by_hand(file)}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
