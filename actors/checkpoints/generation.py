"""Sampling settings that a checkpoint recommends: its generation_config.json, the file that transformers' `generate` reads.

honoured     temperature, top_k, .. : for the keys of `sampling` that a spec leaves out, if `sampling.from_checkpoint` says so
elsewhere    ends of texts, lengths, caches, outputs: read in other places, or without effect on what is drawn
refused      what changes a text and is not supported, such as beams, with any other value than the neutral ones
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import brief

HONOURED: Final = {
    **{key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")},
    **{"bad_words_ids": "bad_words", "suppress_tokens": "suppress_tokens", "min_new_tokens": "min_new_tokens"},
    **{"do_sample": "temperature", "sequence_bias": "logit_bias"},
}
"""Keys of generation_config.json, and the key of `sampling` that each one sets."""

ELSEWHERE: Final = frozenset(
    # The ends and the beginning of texts, which every job reads from here; the task says how long texts are.
    {"eos_token_id", "bos_token_id", "pad_token_id", "max_length", "max_new_tokens", "_from_model_config"}
    # What is kept and told of a run.
    | {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"}
    | {"output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"}
    | {"compile_config", "disable_compile", "continuous_batching_config", "transformers_version"}
    # Speculation of `generate`, which changes no distribution; `decoder` says how drafts are made here.
    | {"assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"}
    | {"is_assistant", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"}
    | {"prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"}
    # Results that are not finite fail their row, and distributions are normalised anyway.
    | {"remove_invalid_values", "renormalize_logits"}
)
"""Keys that change nothing of what is drawn, or that are read in other places."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "length_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "top_h"), (1,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff", "min_length"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size",), (0,)),
    **dict.fromkeys(("early_stopping", "token_healing"), (False,)),
    **dict.fromkeys(("begin_suppress_tokens", "force_words_ids", "constraints", "stop_strings"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "max_time"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "dola_layers"), ()),
}
"""Keys that change what is drawn and are not supported, with the values that change nothing; null never does."""


def from_checkpoint(sampling: Sampling, config: Mapping[str, Any], path: Path) -> Sampling:
    """The settings of a spec with those of a checkpoint for the keys that the spec leaves out. ValueError, which names the file
    and the key, for what is not supported."""
    found = dict[str, Any]()
    for key, value in config.items():
        if value is None or key in ELSEWHERE:
            continue
        if key in HONOURED:
            found |= _setting(key, value, path)
        elif not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in NEUTRAL.get(key, ())
        ):
            raise ValueError(
                f"{path} has {key} = {brief(str(value))}, which is not supported; allowed: sampling.from_checkpoint: false, "
                "and the wanted keys in sampling"
            )
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    news = {key: value for key, value in found.items() if key not in sampling.model_fields_set}
    try:
        return Sampling.model_validate(sampling.model_dump(exclude_unset=True) | news, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path} has {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _setting(key: str, value: Any, path: Path) -> dict[str, Any]:
    """The fields of Sampling that a key sets; values that cut nothing off are those of a spec that says so."""
    if key == "do_sample":
        return {}
    if key == "sequence_bias":
        pairs = [(run, bias) for run, bias in value] if isinstance(value, list) else []
        if not pairs or any(len(run) != 1 for run, _ in pairs):
            raise ValueError(f"{path} has sequence_bias = {brief(str(value))}; supported: biases of single tokens")
        return {"logit_bias": {run[0]: bias for run, bias in pairs}}
    if key == "top_k" and value == 0:
        value = None
    return {HONOURED[key]: tuple(map(tuple, value)) if key == "bad_words_ids" else value}
