"""`draftmill models`: lists the model families, the decoders of each, and the models that ship with the project."""

from __future__ import annotations

from draftmill.actors.checkpoints.models import builtin_models
from draftmill.decoders.backbones.families.table import FAMILIES
from draftmill.decoders.settings import DECODERS, decoders_of
from draftmill.jobs.exit_codes import OK


def print_catalog() -> int:
    """Print the lists; returns the exit code."""
    print("families (model.family; read from config.json with auto)")
    for name, family in sorted(FAMILIES.items()):
        print(f"  {name:<16} decoders: {', '.join(decoders_of(family.kind))}")
    print("decoders (decoder.kind)")
    for kind, settings in DECODERS.items():
        print(f"  {kind:<16} {first_sentence(settings.__doc__)}")
        options = [name for name in settings.model_fields if name != "kind"]
        if options:
            print(f"  {'':<16} settings: {', '.join(options)}")
    print("builtin models (model.path)")
    for name in builtin_models():
        print(f"  builtin:{name}")
    return OK


def first_sentence(doc: str | None) -> str:
    """The first line of a docstring."""
    return (doc or "").strip().splitlines()[0] if doc else ""
