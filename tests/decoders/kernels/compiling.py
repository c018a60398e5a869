"""How kernels compile ahead of time, without a GPU: `python -m tests.decoders.kernels.compiling` prints a table.

It has a row for each of test_compiled.py's cases and a column for each GPU: registers of a thread, bytes that a thread stores and
loads because it has too few of them, and the shared memory of a program. The exit code is 1 if a case does not compile, or does
not fit, for a GPU on which kernels are used (find.LEAST_CAPABILITY).
"""

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from unittest import mock

import torch

from draftmill.decoders.kernels import seen
from draftmill.decoders.kernels.find import LEAST_CAPABILITY

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a program may have, by compute capability."""


class Recorder:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def launched(module, names, wanted, call):
    """A case: calls a function with a module of kernels, of which those named are replaced by recorders. Returns the wanted
    kernel and its only launch: grid, arguments and keyword arguments."""
    where = importlib.import_module(f"draftmill.decoders.kernels.{module}")
    recorders = {name: Recorder(getattr(where, name)) for name in names}
    with contextlib.ExitStack() as stack:
        for name, recorder in recorders.items():
            stack.enter_context(mock.patch.object(where, name, recorder))
        call(where)
    (found,) = recorders[wanted].launches
    return recorders[wanted].kernel, found


def compiled(kernel, launch, capability):
    """Compile a kernel for the arguments of a launch, of which those that are specialized are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, args, kwargs = launch
    given = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in constants}
    constants |= {name: None for name, value in given.items() if value is None}
    signature = dict.fromkeys(constants, "constexpr")
    for name in given.keys() - constants.keys():
        value = given[name]
        signature[name] = (
            TYPES[value.dtype] if isinstance(value, torch.Tensor) else {int: "i32", float: "fp32"}[type(value)]
        )
    assert set(signature) == set(kernel.arg_names)
    aligned = [
        parameter.num
        for parameter in kernel.params
        if isinstance(value := given.get(parameter.name), torch.Tensor | int)
        and (isinstance(value, torch.Tensor) or value % 16 == 0)
        and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    ]
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def variant(kernel, launch):
    """What Triton compiles a kernel anew for: types, alignments and constants of a launch's arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return bind(*launch[1], **launch[2])[1]


@dataclass(frozen=True)
class Made:
    """What a case takes on a GPU, or why it does not compile."""

    registers: int = 0
    spilled: tuple[int, int] = (0, 0)
    shared_bytes: int = 0
    problem: str = ""

    def fits(self, capability):
        return not self.problem and self.shared_bytes <= SHARED_KIB[capability] * 1024

    def __str__(self):
        return self.problem or f"{self.registers} {self.spilled[0]}+{self.spilled[1]} {self.shared_bytes / 1024:.0f}K"


def make(case, capability):
    """Compile a case; None where there is nothing to compile: GPUs before Ampere have no bfloat16."""
    import triton

    # Turing has less shared memory: its tiles are smaller (seen.py).
    with mock.patch.multiple(seen, _is_old=lambda device: capability < 80):
        kernel, launch = launched(*case)
    types = {value.dtype for value in launch[1] if isinstance(value, torch.Tensor)}
    if capability < 80 and torch.bfloat16 in types:
        return None
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder, "TRITON_DUMP_PTXAS_LOG": "1"}),
        contextlib.redirect_stdout(log),
    ):
        try:
            metadata = compiled(kernel, launch, capability).metadata
        except (RuntimeError, triton.TritonError) as error:
            return Made(problem=str(error).strip().splitlines()[0][:40])
    told = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", log.getvalue(), re.S)
    assert told, log.getvalue()
    stored, loaded, registers = map(int, told.groups())
    return Made(registers, (stored, loaded), metadata.shared)


def _make_named(name, capability):
    from tests.decoders.kernels.test_compiled import CASES

    return make(CASES[name], capability)


def main():
    """Print the table; return the exit code."""
    from tests.decoders.kernels.test_compiled import CASES

    wanted = [(name, capability) for name in CASES for capability in SHARED_KIB]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        made = dict(zip(wanted, pool.map(_make_named, *zip(*wanted, strict=True)), strict=True))
    wide = max(map(len, CASES)) + 2
    print("registers, bytes of spill stores + loads of a thread, shared memory in KiB (in brackets: what there is)")
    print(" " * wide + "".join(f"sm_{capability} ({kib})".ljust(18) for capability, kib in SHARED_KIB.items()))
    for name in CASES:
        print(name.ljust(wide) + "".join(str(made[name, c] or "no bfloat16").ljust(18) for c in SHARED_KIB))
    least = LEAST_CAPABILITY[0] * 10 + LEAST_CAPABILITY[1]
    wrong = [(name, c) for (name, c), one in made.items() if one is not None and not one.fits(c)]
    for name, capability in wrong:
        note = "" if capability >= least else f" (kernels are used from sm_{least} on)"
        print(f"sm_{capability}: {name}: {made[name, capability].problem or 'too much shared memory'}{note}")
    return int(any(capability >= least for _, capability in wrong))


if __name__ == "__main__":
    sys.exit(main())
