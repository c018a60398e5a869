"""How a task wants its texts generated: lm-evaluation-harness's generation_kwargs as settings of a job.

max_gen_toks (max_new_tokens, max_tokens, max_completion_tokens)    task.max_new_tokens
until                                                               task.stop
do_sample, temperature, top_k, top_p                                sampling
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import UserError

MOST: Final = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names of the maximum number of tokens; the first one that is given counts, as in lm_eval."""

DEFAULT_MOST: Final = 256
"""Maximum number of tokens of a task that gives none, as in lm_eval."""

KNOWN: Final = (*MOST, "until", "do_sample", "temperature", "top_k", "top_p")

WITHOUT_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1, None),
    "length_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_p": (0, None),
    "use_cache": (True, False, None),
    "seed": (None,),
}
"""Other keys, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How one job generates; `temperature` 0 takes the most probable token, and then there is no top_k and no top_p."""

    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_k: int | None = None
    top_p: float | None = None


def generation_of(
    given: Mapping[str, Any], task: str, *, sampling: Sampling, temperature: float | None, most: int | None
) -> Generation:
    """The settings for a task's generation_kwargs. UserError, with the task's name and the key, for what no decoder can do.

    `sampling` is the spec's; its top_k and top_p count where the task has none. `temperature` is the spec's own temperature,
    None if it names none: it counts where the task says only that it samples. `most` is the spec's max_new_tokens, or None.
    """
    for key, value in given.items():
        if key not in KNOWN and not _has_no_effect(key, value):
            allowed = (
                ", ".join((*KNOWN, *WITHOUT_EFFECT)) if key not in WITHOUT_EFFECT else _listed(WITHOUT_EFFECT[key])
            )
            raise _refused(task, key, value, allowed)
    found = Generation(_most(given, task, most), _stops(given, task), _temperature(given, task, temperature))
    if found.temperature == 0:
        return found
    top_k, top_p = given.get("top_k", sampling.top_k), given.get("top_p", sampling.top_p)
    top_k = None if top_k in {0, -1} else top_k  # how transformers and vLLM say: all tokens
    top_p = None if top_p == 1 else top_p
    if top_k is not None and (not isinstance(top_k, int) or top_k < 1):
        raise _refused(task, "top_k", top_k, "a whole number from 1")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise _refused(task, "top_p", top_p, "a number above 0, at most 1")
    return Generation(found.max_new_tokens, found.stop, found.temperature, top_k, top_p)


def _most(given: Mapping[str, Any], task: str, most: int | None) -> int:
    key = next((key for key in MOST if given.get(key) is not None), None)
    if key is None:
        return DEFAULT_MOST if most is None else most
    value = given[key]
    if not _is_number(value) or value != int(value) or value < 1:
        raise _refused(task, key, value, "a whole number from 1")
    return int(value)


def _stops(given: Mapping[str, Any], task: str) -> tuple[str, ...]:
    until = given.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    if not all(isinstance(stop, str) for stop in until):
        raise _refused(task, "until", list(until), "a text, or a list of texts")
    return tuple(dict.fromkeys(stop for stop in until if stop))


def _temperature(given: Mapping[str, Any], task: str, own: float | None) -> float:
    value, samples = given.get("temperature"), given.get("do_sample")
    if value is not None and not (_is_number(value) and 0 <= value <= 100):
        raise _refused(task, "temperature", value, "a number from 0 to 100")
    if samples not in {None, True, False}:
        raise _refused(task, "do_sample", samples, "true, false")
    if samples is False:
        return 0.0
    if value is None and samples:
        return 1.0 if own is None else own
    return 0.0 if value is None else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_no_effect(key: str, value: Any) -> bool:
    return value in WITHOUT_EFFECT.get(key, ())


def _refused(task: str, key: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{value!r} is not supported; allowed: {allowed}", field=f"{task}: generation_kwargs.{key}")


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(str(value) for value in values)
