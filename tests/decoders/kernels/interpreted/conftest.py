"""Mends Triton's interpreter for bfloat16: it keeps such numbers as 16-bit integers, and its `dot` multiplies these."""

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def mended_dot():
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended(self, a, b, d, input_precision, max_num_imprecise_acc):
        return plain(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

    patch = pytest.MonkeyPatch()
    patch.setattr(InterpreterBuilder, "create_dot", mended)
    yield
    patch.undo()


@pytest.fixture
def dot_by_rows(monkeypatch):
    """Multiplies each row of a tile by itself, as tensor cores do: the library may round a row by its place in a matrix."""
    from triton.runtime import interpreter

    class Numpy:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def matmul(left, right, dtype):
            return np.stack([row @ right for row in left.astype(dtype)]).astype(dtype)

    monkeypatch.setattr(interpreter, "np", Numpy())
