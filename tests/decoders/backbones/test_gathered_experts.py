"""A mixture whose experts' weights are gathered gives what the loop over experts gives, and asks the device for nothing."""

import pytest
import torch

from draftmill.decoders.backbones.moe import SigmoidMixture, SoftmaxMixture
from draftmill.decoders.kernels import experts_reference
from tests.device.pretend import pretending


def softmax_mixture():
    return SoftmaxMixture(12, 20, num_experts=7, num_chosen=3, normalise=True)


def sigmoid_mixture():
    return SigmoidMixture(12, 20, num_experts=8, num_chosen=2, groups=(4, 2), scale=2.5, shared=6)


def filled(mixture):
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return mixture.requires_grad_(False)


@pytest.mark.parametrize("make", [softmax_mixture, sigmoid_mixture])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_gathered_experts_answer_as_the_loop_does(make, rows):
    mixture, hidden = filled(make()), torch.randn(2, rows, 12, generator=torch.Generator().manual_seed(1))
    expected = mixture(hidden)
    mixture.gather(experts_reference.product)
    torch.testing.assert_close(mixture(hidden), expected)


def test_gathered_weights_are_still_the_experts_own():
    mixture = filled(softmax_mixture())
    before = [expert.up_proj.weight.clone() for expert in mixture.experts]
    mixture.gather(experts_reference.product)
    after = [expert.up_proj.weight for expert in mixture.experts]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len({weight.untyped_storage().data_ptr() for weight in after}) == 1, "the weights are in memory once"


@pytest.mark.parametrize("make", [softmax_mixture, sigmoid_mixture])
def test_gathered_experts_do_not_wait_for_the_device(make):
    def waits(*, gathered: bool) -> tuple[int, int]:
        mixture = filled(make())
        with pretending() as counts, torch.no_grad():
            mixture.to("cuda")
            if gathered:
                mixture.gather(experts_reference.product)
            hidden = torch.zeros(9, 12, device="cuda")
            counts.clear()
            mixture(hidden)
            return counts.waits, counts.shapes

    assert waits(gathered=True) == (0, 0)
    assert waits(gathered=False)[0] > 0, "the loop reads back how many rows each expert has"
