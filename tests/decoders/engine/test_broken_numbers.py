"""NaN in a slot ends with its sample: the next one in the slot is decoded as if nothing had been there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftmill.decoders.builtin
from draftmill.decoders.any_subset.settings import AnySubsetSettings
from draftmill.decoders.backbones.load import inspect_model, load_backbone
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Sampling
from tests.decoders.support import decode, texts

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
CAUSAL, ANY = AutoregressiveSettings(kind="autoregressive"), AnySubsetSettings(kind="any_subset")
BROKEN, LENGTH = 77, 24


def request(index, first, length, prompt):
    canvas = np.arange(first, first + length, dtype=np.int32)
    canvas[prompt:] = -1
    return Request(index, 100 + index, canvas)


def broken_model(name: str) -> tuple[Any, ModelInfo]:
    backbone: Any = load_backbone(BUILTIN / name, dtype="float32", device="cpu")
    # The output layer may share these weights, and stays as it is.
    broken = backbone.embedding_VD.clone()
    broken[BROKEN] = torch.nan
    if name == "ar-tiny":
        backbone.model.get_input_embeddings().weight = torch.nn.Parameter(broken, requires_grad=False)
    else:
        backbone.embedding_VD = broken
    return backbone, inspect_model(BUILTIN / name)


@pytest.mark.parametrize(("name", "settings"), [("ar-tiny", CAUSAL), ("asarm-tiny", ANY)])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_sample_is_decoded_alike_after_one_that_left_nan_in_its_slot(name, settings, rows):
    backbone, info = broken_model(name)
    bad = [request(index, BROKEN - 3, LENGTH, 12) for index in range(rows)]
    good = [request(rows + index, 200 + 20 * index, LENGTH - 4, 6) for index in range(rows)]
    found = decode(backbone, info, settings, Sampling(temperature=0.0), [*bad, *good], rows=rows)
    assert [found[one.index].error_kind for one in bad] == ["nan_logits"] * rows
    assert [found[one.index].error_kind for one in good] == [None] * rows
    fresh, _ = broken_model(name)
    alone = decode(fresh, info, settings, Sampling(temperature=0.0), good, rows=rows)
    assert texts(alone) == {one.index: texts(found)[one.index] for one in good}
