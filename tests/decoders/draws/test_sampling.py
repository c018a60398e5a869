"""Warps, draws and the rejection rule, on rows small enough to check by hand."""

import pytest
import torch

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws import sampling as draws_sampling
from draftmill.decoders.draws.sampling import coupled_draw, inverse_cdf_draw, log_law, log_laws, nucleus_draw, residual


def test_temperature_zero_is_one_hot_on_the_lowest_index_of_a_tie():
    law = log_law(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), Sampling(temperature=0.0))
    assert law.exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert coupled_draw(law, None).tolist() == [1]


def test_temperature_divides_logits():
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    torch.testing.assert_close(log_law(logits, Sampling(temperature=0.5)), torch.log_softmax(logits / 0.5, -1))


def test_top_k_keeps_the_best_and_ties_at_the_edge():
    law = log_law(torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]]), Sampling(top_k=2)).exp()
    assert (law > 0).tolist() == [[False, True, True, True, False]]
    assert law.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1e-9, 1), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    law = log_law(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log(), Sampling(top_p=top_p))
    assert int((law > -torch.inf).sum()) == kept


def test_the_nucleus_is_the_same_whether_rows_are_peaked_or_flat():
    # Flat rows need more tokens than are looked at first; ties are broken towards the lower index.
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(20, 1000, generator=generator) * 6
    flat = torch.zeros(5, 1000)
    logits = torch.cat([peaked, flat, peaked.round()])
    for top_p in (0.3, 0.9, 0.999):
        law = log_law(logits, Sampling(top_p=top_p))
        for row, found in zip(torch.log_softmax(logits, -1).exp(), law > -torch.inf, strict=True):
            ordered, index = row.sort(descending=True, stable=True)
            count = int(((ordered.double().cumsum(0) - ordered) < top_p).sum())
            assert set(found.nonzero().flatten().tolist()) == set(index[:count].tolist())


def test_a_draw_that_looks_for_the_nucleus_late_is_the_draw_from_the_nucleus():
    generator = torch.Generator().manual_seed(1)
    logits = torch.cat([torch.randn(200, 400, generator=generator) * scale for scale in (0.0, 1.0, 5.0)])
    gumbel = noise.gumbel_rows(noise.key_words(list(range(600))), torch.zeros(600, dtype=torch.int64), 400)
    for top_p in (0.05, 0.5, 0.95):
        early = coupled_draw(log_law(logits, Sampling(top_p=top_p)), gumbel)
        late = nucleus_draw(log_law(logits, Sampling()), gumbel, top_p)
        assert torch.equal(early, late)
        assert not torch.equal(late, coupled_draw(log_law(logits, Sampling()), gumbel))


def test_where_looking_at_the_data_would_wait_the_same_tokens_are_drawn_from_the_same_distributions(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    logits = torch.cat([torch.randn(60, 300, generator=generator) * scale for scale in (0.0, 1.0, 6.0)]).round(
        decimals=1
    )
    gumbel = noise.gumbel_rows(noise.key_words(list(range(180))), torch.zeros(180, dtype=torch.int64), 300)
    shares = torch.tensor([0.1, 0.6, 0.97, torch.inf], dtype=torch.float64).repeat(45).unsqueeze(1)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.3, 2.0], dtype=torch.float64).repeat(36).unsqueeze(1)

    def found():
        for top_p in (0.1, 0.6, 0.97):
            yield log_law(logits, Sampling(top_p=top_p, top_k=200))
            yield nucleus_draw(log_law(logits, Sampling()), gumbel, top_p)
        yield log_laws(logits, temperatures, top_k=250, top_p_R1=shares)
        yield nucleus_draw(log_laws(logits, temperatures), gumbel, shares)

    expected = list(found())
    monkeypatch.setattr(draws_sampling, "_looks", lambda law: False)
    assert all(torch.equal(one, other) for one, other in zip(found(), expected, strict=True))


@pytest.mark.parametrize("looks", [True, False])
def test_a_row_of_nan_gives_an_id_in_range(monkeypatch, looks):
    monkeypatch.setattr(draws_sampling, "_looks", lambda law: looks)
    law = torch.full((2, 9), torch.nan)
    law[1] = torch.log_softmax(torch.arange(9.0), -1)
    drawn = nucleus_draw(law, torch.zeros(2, 9), 0.5)
    assert 0 <= int(drawn[0]) < 9 and int(drawn[1]) == 8
    assert 0 <= int(log_law(law, Sampling(top_p=0.5))[0].argmax()) < 9


def test_suppressed_tokens_stay_at_probability_zero():
    logits = torch.tensor([[0.1, -torch.inf, 0.2]])
    for sampling in (Sampling(), Sampling(temperature=0.3), Sampling(top_k=3), Sampling(top_p=0.99)):
        assert log_law(logits, sampling)[0, 1] == -torch.inf


def test_inverse_cdf_counts_the_values_at_or_below_the_uniform():
    mass = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.1999, 0.2000001, 0.6999, 0.999999999])
    assert inverse_cdf_draw(mass, uniform).tolist() == [0, 0, 2, 2, 3]


def test_inverse_cdf_never_gives_a_token_without_mass_at_the_end():
    mass = torch.tensor([[0.4, 0.6, 0.0, 0.0]])
    assert inverse_cdf_draw(mass, torch.tensor([1.0 - 1e-17], dtype=torch.float64)).tolist() == [1]


def test_the_residual_falls_back_to_p_where_it_has_no_mass():
    p = torch.tensor([[0.25, 0.75]]).log()
    torch.testing.assert_close(residual(p, p), p.exp())


def test_rejection_gives_the_target_law_by_exact_sums():
    p = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    accepted = q * torch.minimum(torch.ones(3), p / q)
    rest = residual(p.log().unsqueeze(0), q.log().unsqueeze(0))[0]
    output = accepted + (1 - accepted.sum()) * rest / rest.sum()
    torch.testing.assert_close(output, p, atol=1e-15, rtol=0)
