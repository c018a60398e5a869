"""A step's network, output layer and draws are one graph: nothing of it reads a number back, and no shape depends on data.

torch.compile refuses to make one graph (`fullgraph`) of code that does either. Compiled and plain code must agree.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.moe import Mixture
from draftmill.decoders.backbones.rows import RowShape, StreamRows, TokenRows, number_rows, token_rows
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.sampling import Warp, sample
from draftmill.decoders.draws.settings import NOTES
from tests.decoders.references.sampling import warp_of
from tests.decoders.shipped import BUILTIN

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
FAMILIES = {
    "causal": BUILTIN / "ar-tiny",
    "any-subset": DATA / "xlnet_asarm",
    "masked (LLaDA)": DATA / "llada",
    "masked (MDLM, told its noise)": DATA / "mdlm",
    "blocks (Fast-dLLM v2)": DATA / "fast_dllm_v2",
    "blocks of experts (LLaDA2)": DATA / "llada2",
}
WIDE = 64


def token_step(counts: list[int], firsts: list[int]) -> TokenRows:
    """Rows of three slots; each sees the text before it, and in a second interval itself."""
    column_N = torch.cat([torch.arange(first, first + count) for count, first in zip(counts, firsts, strict=True)])
    sight = torch.stack([torch.zeros_like(column_N), column_N]), torch.stack([column_N, column_N + 1])
    token_N = column_N * 7 % 50 + 1
    return token_rows(range(3), counts, token_N, column_N, column_N, sight, sigma_G=torch.tensor([0.5, 1.0, 2.0]))


def stream_step(counts: list[int], firsts: list[int]) -> StreamRows:
    """Content rows of three slots, and two queries of each that see what was written."""
    owner_C, line_C = number_rows(counts)
    column_C = line_C + torch.tensor(firsts)[owner_C]
    owner_Q, line_Q = number_rows([2, 2, 2])
    ends_B = torch.tensor(firsts) + torch.tensor(counts)
    shape = RowShape(
        num_slots=3,
        num_lines=max(counts),
        num_queries=2,
        num_columns=int(ends_B.max()),
        num_positions=12,
        slots=slice(0, 3),
        some_blind=False,
    )
    return StreamRows(
        slots_G=torch.arange(3),
        owner_N=owner_C,
        line_N=line_C,
        token_N=column_C * 7 % 50 + 1,
        column_N=column_C,
        limit_N=column_C + 1,
        owner_Q=owner_Q,
        line_Q=line_Q,
        rank_Q=ends_B[owner_Q] + line_Q,
        limit_Q=ends_B[owner_Q],
        shape=shape,
    )


def grouped(rows_PD: Tensor, weight_EMD: Tensor, end_E: Tensor) -> Tensor:
    """The product with each row's expert, of one shape whatever the choices; a device has a kernel for it."""
    expert_P = torch.searchsorted(end_E, torch.arange(len(rows_PD)), right=True)
    return torch.einsum("pd,pmd->pm", rows_PD, weight_EMD[expert_P])


def loaded(folder: Path) -> tuple:
    """A model with room for three slots, and what makes rows for it; in float64 no weights are packed, as on a device."""
    backbone = load_backbone(folder, dtype="float64", device="cpu")
    backbone.allocate(3, WIDE)
    for part in getattr(backbone, "base", torch.nn.Module()).modules():
        if isinstance(part, Mixture):
            part.gather(grouped)
    if isinstance(backbone, XLNetBackbone):
        for slot in range(3):
            backbone.set_order(slot, torch.randperm(12, generator=torch.Generator().manual_seed(slot)))
        return backbone, stream_step
    return backbone, token_step


def drawn(backbone, rows, asked_R: Tensor, key_R2: Tensor, warp: Warp) -> tuple[Tensor, Tensor]:
    """What a step does on the device: the network, the output layer of the asked rows, their draws and what is told of them."""
    logits_RV = backbone.logits(backbone.forward(rows).index_select(0, asked_R))
    return logits_RV, sample(logits_RV, warp, key_R2, asked_R, wanted=NOTES, warped=True, mask_id=1, ahead=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_a_step_of_every_family_is_one_graph(family):
    backbone, make = loaded(FAMILIES[family])
    prompt, step = make([5, 3, 4], [0, 0, 0]), make([1, 2, 1], [5, 3, 4])
    asked_R = torch.tensor([0, 2, 3])
    warp = warp_of(3, backbone.vocab_size, temperature=(0.8, 0.0, 1.5), suppressed=(0,))
    work = asked_R, noise.key_words([11, 12, 13]), warp
    with torch.no_grad():
        backbone.forward(prompt)
        plain = drawn(backbone, step, *work)
        torch.compiler.reset()
        compiled = torch.compile(drawn, fullgraph=True, dynamic=False, backend="aot_eager")(backbone, step, *work)
    torch.testing.assert_close(compiled, plain, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_reading_a_number_back_is_found():
    """The test above can fail: the experts' products on a CPU are cut by numbers that are read back."""
    backbone = load_backbone(FAMILIES["blocks of experts (LLaDA2)"], device="cpu")
    backbone.allocate(3, WIDE)
    rows = token_step([1, 2, 1], [0, 0, 0])
    rows = replace(rows, shape=replace(rows.shape, num_columns=WIDE))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"(?i)graph|data.?dependent|unsupported"), torch.no_grad():
        torch.compile(backbone.forward, fullgraph=True, dynamic=False, backend="aot_eager")(rows)
