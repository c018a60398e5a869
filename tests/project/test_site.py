"""The site of docs/ has every page, and its hook unlinks what the site lacks. `make docs` checks its links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from docs.site_hooks import on_page_markdown

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation: a page, a list, or titles with either."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    files = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(MKDOCS["nav"])) == sorted(files)


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("engine.md", "see [RESULTS](../benchmarks/RESULTS.md#a-step).", "see `RESULTS`."),
        ("decisions/engine.md", "[infra](../../infra/Dockerfile)", "`infra`"),
        ("decisions/engine.md", "[engine](../engine.md)", "[engine](../engine.md)"),
        ("engine.md", "[kernels](#kernels), [specs](specs.md)", "[kernels](#kernels), [specs](specs.md)"),
        ("engine.md", "[Ray](https://docs.ray.io/../x)", "[Ray](https://docs.ray.io/../x)"),
        ("specs.md", r"| `<\|end\|>` | a \| b |", r"| `<|end|>` | a \| b |"),
        ("specs.md", r"in a sentence `a \| b` stays", r"in a sentence `a \| b` stays"),
    ],
)
def test_links_out_of_docs_become_text_and_bars_in_tables_stay(page: str, text: str, shown: str) -> None:
    assert on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page))) == shown
