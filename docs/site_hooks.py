"""A hook of the site (mkdocs.yml): what a code host shows otherwise than mkdocs does.

The pages are read on a code host, too. There, links to files outside of docs/ work. The site does not publish those files, so
`mkdocs build --strict` would refuse the links; here they become plain code text. Links inside of docs/ stay and are checked.
A host takes `\\|` for a bar in a table, also inside of code, where mkdocs would show the backslash.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\n]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as mkdocs gets it."""
    folder = posixpath.dirname(page.file.src_uri)

    def unlinked(link: re.Match[str]) -> str:
        leaves = posixpath.normpath(posixpath.join(folder, link[2])).startswith("../")
        return f"`{link[1]}`" if leaves else link[0]

    def with_bars(row: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0])

    return ROW.sub(with_bars, LINK.sub(unlinked, markdown))
