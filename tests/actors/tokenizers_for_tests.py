"""Two small tokenizers: one byte-level, whose pieces join exactly, and one of words, whose pieces do not."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Task
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DECODERS

CORPUS = ["def f(x):\n    return x\n", "for value in values:\n        total += value\n", "The cat sat. A dog ran! Why?"]
SPECIAL = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE of 300 tokens with special tokens at the front; every text round-trips."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return Tokenizer(core)


@cache
def word_pieces() -> Tokenizer:
    """Words behind a mark for the space in front of them, as SentencePiece has them: a piece alone gets a space too."""
    words = [
        "<unk>",
        *(f"▁{word}" for word in ("the", "cat", "sat", "on", "a", "mat", "dog", "ran", "in")),
        "▁",
        *"abcdefghijklmnopqrst.",
    ]
    core = Core(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return Tokenizer(core)


def model_info(*, vocab_size: int = 300, max_length: int | None = 64) -> ModelInfo:
    return ModelInfo("xlnet", vocab_size, 6, max_length, "any_subset", 1000, suppressed=(6,))


def recipe_of(task: Task, columns: dict[str, str] | None = None, decoder: str = "assd", **more: Any) -> RowRecipe:
    """The recipe of a task's rows; `more` are further fields of it."""
    settings: Any = DECODERS[decoder].model_validate({"kind": decoder, **more.pop("keys", {})})
    return RowRecipe(task, Columns(**(columns or {})), settings, **{"sampling": Sampling()} | more)
