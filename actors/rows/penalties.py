"""Sampling settings in tokens: texts of `logit_bias`, `bad_words` and `suppress_tokens` become ids, by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftmill.actors.rows.text import Tokenizer
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.penalties import Penalties
from draftmill.storage.errors import brief


def penalties_of(
    sampling: Sampling, tokenizer: Tokenizer | None, *, vocab_size: int | None = None, ends: Sequence[int] = ()
) -> Penalties | None:
    """What changes the logits by these settings; None if nothing does. `ends` end a text. ValueError, which begins with the key,
    for a text that is not one token where it must be, and for ids that the model has not."""
    size = tokenizer.size if vocab_size is None and tokenizer is not None else vocab_size
    biases = {_one_token("logit_bias", given, tokenizer, size): bias for given, bias in sampling.logit_bias.items()}
    banned = dict[tuple[int, ...], None]()
    for given in sampling.suppress_tokens:
        banned[(_one_token("suppress_tokens", given, tokenizer, size),)] = None
    for word in sampling.bad_words:
        # As transformers does, an end may stand alone: else no text could end.
        banned |= {run: None for run in _runs_of(word, tokenizer, size) if len(run) > 1 or run[0] not in ends}
    made = Penalties(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        ngram=sampling.no_repeat_ngram_size,
        biases=tuple((token, bias) for token, bias in biases.items() if bias),
        banned=tuple(banned),
        min_new=sampling.min_new_tokens,
        ends=tuple(ends) if sampling.min_new_tokens else (),
    )
    return None if made == Penalties() else made


def _one_token(key: str, given: int | str, tokenizer: Tokenizer | None, size: int | None) -> int:
    """The id of a token that is given by its id or text: behind other text, at the beginning of one, or as a special token."""
    if isinstance(given, int):
        return _known(key, given, size)
    core = _needed(key, tokenizer)
    spellings = [encode(given) for encode in (core.encode_behind, core.encode, core.parse)]
    one = next((ids[0] for ids in spellings if len(ids) == 1), None)
    if one is None:
        raise ValueError(f"{key}: {brief(given)} is {len(spellings[0])} tokens; allowed: ids, and texts of one token")
    return one


def _runs_of(given: tuple[int, ...] | str, tokenizer: Tokenizer | None, size: int | None) -> Iterator[tuple[int, ...]]:
    """The runs of tokens that spell a text inside of another one, with a space before it or not."""
    if isinstance(given, tuple):
        yield tuple(_known("bad_words", token, size) for token in given)
        return
    core = _needed("bad_words", tokenizer)
    for text in (given, f" {given.lstrip()}"):
        if run := tuple(core.encode_behind(text)):
            yield run


def _known(key: str, token: int, size: int | None) -> int:
    if size is not None and token >= size:
        raise ValueError(f"{key}: {token} is not an id of the model; allowed: 0 to {size - 1}")
    return token


def _needed(key: str, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(f"{key}: texts need a tokenizer, and model.tokenizer is 'none'; allowed: ids")
    return tokenizer
