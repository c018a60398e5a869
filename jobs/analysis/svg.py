"""A matplotlib figure as SVG to put into an HTML page: no addresses, ids of its own, the same bytes every time."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from draftmill.storage.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONTS: Final = "'DejaVu Sans', Verdana, Arial, sans-serif"

SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",  # text stays text: readable aloud, selectable, and small
    "svg.hashsalt": "draftmill",
    "svg.image_inline": True,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": "#222222",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "path.simplify": True,
}

_DROPPED = (
    re.compile(r"<\?xml.*?\?>\s*", re.DOTALL),
    re.compile(r"<!DOCTYPE.*?>\s*", re.DOTALL),
    re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL),
    re.compile(r"\s*<style type=\"text/css\">.*?</style>", re.DOTALL),
    re.compile(r"\s*<defs>\s*</defs>"),
)


@contextmanager
def plotting() -> Iterator[None]:
    """Inside, figures are made with SETTINGS. UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the plots of a report need matplotlib: pip install 'draftmill[report]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style file would change the bytes
        settings: Any = SETTINGS  # its keys are plain strings, not matplotlib's literals
        matplotlib.rcParams.update(settings)
        yield


def inline_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element; `name` is a prefix of its ids, unique in the page.

    Screen readers get the title and the description in the place of the drawing.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    for pattern in _DROPPED:
        text = pattern.sub("", text)
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", text)
    text = re.sub(r"font: ([^;\"]*?) ?'DejaVu Sans'[^;\"]*", rf"font: \1 {FONTS}", text)
    head, body = text.split(">", 1)
    return _opening(head, name, title, description) + _with_own_ids(body, name).rstrip()


def _opening(head: str, name: str, title: str, description: str) -> str:
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None, "matplotlib writes a viewBox"
    return (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-desc">{html.escape(description)}</desc>'
    )


def _with_own_ids(body: str, name: str) -> str:
    """Keep the ids that something refers to, under the figure's own prefix; drop the others."""
    used = set(re.findall(r'href="#([^"]+)"', body)) | set(re.findall(r"url\(#([^)]+)\)", body))
    renamed: Callable[[re.Match[str]], str] = lambda match: f' id="{name}-{match[1]}"' if match[1] in used else ""  # noqa: E731
    body = re.sub(r' id="([^"]+)"', renamed, body)
    body = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    return re.sub(r"\n\s*", "\n", body)
