"""Mends `dot` of Triton's interpreter.

It keeps bfloat16 as 16-bit integers, and multiplies these. And it leaves the product to a library in which a row's bits depend on
its place in the tile, which they do on no GPU: there each number is added up in the same order.
"""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def mended_dot():
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = widened(a), widened(b)
        total = np.einsum("nk,km->nm", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return TensorHandle(d.data + total, d.dtype.scalar)

    patch = pytest.MonkeyPatch()
    patch.setattr(InterpreterBuilder, "create_dot", mended)
    yield
    patch.undo()


@pytest.fixture
def poisoned():
    """New memory holds NaN until somebody writes it."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
