"""Laws of the block decoders: block size 1 is autoregressive decoding, and S2D2 that verifies always is block size 1."""

import pytest
import torch

from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.common_settings import Sampling
from tests.decoders.blocks.block_tables import GREEDY, SAMPLED, ours, prompts, table, table_info
from tests.decoders.references.sampling import log_law
from tests.decoders.support import decoder_settings, texts

ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)


LENGTHS = [(p, n) for n in (4, 5, 6) for p in range(n)] * 3


@pytest.mark.one_in(7)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(top_k=2), Sampling(temperature=1.5, top_p=0.8)])
@pytest.mark.parametrize(("shift", "size"), [(0, 2), (0, 4), (1, 3)])
def test_coupled_and_at_temperature_zero_its_text_is_that_of_block_size_one(shift, size, sampling):
    info, requests = table_info(shift=shift), prompts(LENGTHS)
    one = texts(ours(requests, info, ONE, sampling, rows=16, length=8))
    always = decoder_settings("s2d2", block_size=size, causal_cache=True, causal_draft=True)
    assert texts(ours(requests, info, always, sampling, rows=16, length=8)) == one
    assert texts(ours(requests, info, decoder_settings("block_diffusion", block_size=size), sampling, length=8)) != one


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_block_size_one_is_autoregressive_decoding_of_the_same_model(shift, sampling):
    """The token at each position is drawn given all to its left: by a mask there, or by the row before it."""
    info = table_info(shift=shift)
    requests = prompts([(p, 6) for p in (1, 2, 5)] * 4)
    found = texts(ours(requests, info, ONE.model_copy(update={"causal_cache": False}), sampling))
    model = table()
    model.allocate(1, 8)
    suppressed = torch.tensor(info.suppressed)
    for request in requests:
        tokens = [int(token) for token in request.canvas if token >= 0]
        while len(tokens) < 6:
            fed = tokens if shift else [*tokens, info.mask_id]
            columns = torch.arange(len(fed))
            sight = torch.zeros(1, len(fed), dtype=torch.int64), (columns + 1).unsqueeze(0)
            rows = token_rows([0], [len(fed)], torch.tensor(fed), columns, columns, sight)
            logits = model.logits(model.forward(rows)[-1:]).index_fill(-1, suppressed, -torch.inf)
            tokens.append(drawn(logits, request.key, len(tokens), sampling))
        assert found[request.index] == tokens[int((request.canvas >= 0).sum()) :]


def drawn(logits, key, position, sampling):
    from draftmill.decoders.draws import noise

    if sampling.temperature == 0.0:
        return int(logits.argmax())
    gumbel = noise.gumbel_rows(noise.key_words([key]), torch.tensor([position]), logits.shape[1])
    return int((log_law(logits, sampling) + gumbel).argmax())
