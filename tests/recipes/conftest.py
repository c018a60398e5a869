"""What the tests of recipes begin with."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from recipes import ar, corpus
from tests.recipes.recipes_of_tests import few_files, small_causal_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prepared() -> corpus.Prepared:
    return corpus.prepare(*corpus.split(few_files()), PreTrainedTokenizerFast.from_pretrained(ar.TOKENIZER))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory):
    return small_causal_model(tmp_path_factory.mktemp("causal"))
