"""draftmill decodes whole datasets with speculative and parallel decoders. See README.md, and docs/library.md for Python.

Beside this file are links to the folders jobs, actors, decoders, storage and infra of the checkout, which a wheel holds as
folders: so their import names are draftmill.jobs and so on. docs/decisions/project.md says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftmill.version import __version__ as __version__

if TYPE_CHECKING:
    from draftmill.jobs.api import Error as Error
    from draftmill.jobs.api import RunResults as RunResults
    from draftmill.jobs.api import generate as generate
    from draftmill.jobs.api import open_run as open_run
    from draftmill.jobs.api import run as run

_LIBRARY = ("Error", "RunResults", "generate", "open_run", "run")


def __getattr__(name: str) -> Any:
    """Import the library when it is first used: `import draftmill` alone imports nothing else."""
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("draftmill.jobs.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LIBRARY])
