"""Imports transformers' models without torch's compilers, its distributed parts and scipy, which take long to import.

A model class of transformers imports torch._dynamo, torch._inductor, sympy and torch.distributed for decorators and type checks
that decoding never uses; they take as long as all other imports. During the import torch reports that it lacks them, and code
that asks for them gets a stand-in that does nothing, or that loads the real module on use. Afterwards they can be imported as
usual. Modules that are already imported stay unchanged.

transformers imports scipy for the training losses of its object detectors, and torchao, which needs the compilers, for its own
quantized models. During the import both are reported as not installed, so these do not work in a process that decodes.

transformers itself scans the files of all its models twice before it imports one; the second scan is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.compiler
import torch.distributed

_HELD = ("torch._dynamo", "torch.distributed.tensor")
_REPORTED_MISSING = ("is_scipy_available", "is_torchao_available")
_WRAPPED = "torch._dynamo._trace_wrapped_higher_order_op"


def from_transformers(name: str) -> Any:
    """A class of transformers by its name; AttributeError if there is none."""
    with lean():
        import transformers

        return getattr(transformers, name)


@contextmanager
def lean() -> Iterator[None]:
    """Within the `with` block, imports find neither compilers nor distributed parts."""
    if any(name in sys.modules for name in _HELD):
        yield
        return
    stands_in = {"torch._dynamo": _dynamo(), _WRAPPED: _trace_module()}
    available, disable = torch.distributed.is_available, torch.compiler.disable
    torch.distributed.is_available = lambda: False
    torch.compiler.disable = _unchanged  # type: ignore[assignment]
    if "transformers.models" not in sys.modules:
        stands_in["transformers.models"] = _models()
    sys.modules |= stands_in
    try:
        with _without_others():
            yield
    finally:
        torch.distributed.is_available, torch.compiler.disable = available, disable
        for name, module in stands_in.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


@contextmanager
def _without_others() -> Iterator[None]:
    utils: Any = importlib.import_module("transformers.utils")
    real = {name: getattr(utils, name) for name in _REPORTED_MISSING if hasattr(utils, name)}
    for name in real:
        setattr(utils, name, lambda: False)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(utils, name, function)


@contextmanager
def empty_modules() -> Iterator[None]:
    """Within the `with` block, modules are built on the meta device without drawing random weights. torch would import its
    compilers to draw them, and to count up on that device: ranges are real ones."""
    arange = torch.arange
    kinds: tuple[Any, ...] = (torch.nn.Embedding, torch.nn.Linear)
    before = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        with torch.device("meta"):
            torch.empty(0)  # torch notes what makes tensors at the first call, which must find the real arange
            torch.arange = partial(_on_cpu, arange)
            yield
    finally:
        torch.arange = arange
        for kind, method in zip(kinds, before, strict=True):
            kind.reset_parameters = method


def _on_cpu(arange: Callable[..., Any], *args: Any, device: Any = None, **kwargs: Any) -> Any:
    return arange(*args, device="cpu" if device is None else device, **kwargs)


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without, that changes nothing."""
    return function if function is not None else lambda inner: inner


def _models() -> ModuleType:
    """A package in which the models of transformers are found; the real one lists what each of them exports."""
    spec = importlib.util.find_spec("transformers")
    module = ModuleType("transformers.models")
    module.__path__ = [f"{folder}/models" for folder in (spec.submodule_search_locations or ())] if spec else []
    return module


def _dynamo() -> ModuleType:
    module = ModuleType("torch._dynamo")
    module.__path__ = []
    for name in ("assume_constant_result", "disable", "allow_in_graph", "mark_static_address"):
        setattr(module, name, _unchanged)
    return module


def _trace_module() -> ModuleType:
    module = ModuleType(_WRAPPED)

    class TransformGetItemToIndex:
        """Create the real object when it is used."""

        def __new__(cls) -> Any:
            return importlib.import_module(_WRAPPED).TransformGetItemToIndex()

    module.TransformGetItemToIndex = TransformGetItemToIndex  # type: ignore[attr-defined]
    return module
