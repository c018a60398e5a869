"""The parts of a report's HTML page: escaped text, tables with captions, figures, style sheet. No scripts, no addresses."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from draftmill.storage.errors import printable

STYLE: Final = """
:root { --ink: #1b1f24; --soft: #4d5661; --line: #d5dae0; --band: #f4f6f8; --mark: #0b5394; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, header, footer { max-width: 66rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; padding-top: .5rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; max-width: 50rem; }
.lead, .note, figcaption, caption, footer { color: var(--soft); }
.note, figcaption, caption, footer { font-size: .88rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: 1rem 0 0; }
a { color: var(--mark); }
a:focus-visible, summary:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.4rem 0 0; }
.cards div { background: var(--band); border-radius: .4rem; padding: .7rem .9rem; }
.cards dt { font-size: .82rem; color: var(--soft); }
.cards dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: .8rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .2rem 0 .5rem; caption-side: top; }
caption span { display: block; max-width: calc(100vw - 5rem); }
td, tbody th { white-space: nowrap; }
th, td { padding: .35rem .8rem .35rem 0; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child, td.words, th.words { text-align: left; }
td.words { min-width: 9rem; white-space: normal; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
tbody th { font-weight: 600; }
.facts td, .facts th { text-align: left; }
.facts th { font-weight: 400; color: var(--soft); white-space: nowrap; }
.facts td { overflow-wrap: anywhere; white-space: normal; }
figure { margin: 1.2rem 0 2rem; }
figure h3 { margin: 0 0 .3rem; }
.plot { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--mark); }
pre { background: var(--band); padding: .9rem 1rem; border-radius: .4rem; overflow-x: auto; font-size: .85rem; }
footer { padding-top: 1rem; padding-bottom: 3rem; margin-top: 2.5rem; border-top: 1px solid var(--line); }
@media print {
  @page { margin: 15mm; }
  body { font-size: 10.5pt; }
  main, header, footer { max-width: none; padding: 0; }
  nav, details { display: none; }
  h2, h3 { break-after: avoid; }
  figure, tr, .cards div { break-inside: avoid; }
  .cards div, pre { background: none; border: 1px solid var(--line); }
  .wide, .plot, pre { overflow: visible; }
  svg { min-width: 0; }
  pre { white-space: pre-wrap; }
  table { font-size: 8.5pt; }
  a { color: inherit; text-decoration: none; }
}
""".strip()


MADE_BY: Final = '<meta name="generator" content="draftmill report">'
"""How a report is recognized, to be replaced by a newer one."""


def text(value: object) -> str:
    """A value as HTML text; control characters are shown as escapes."""
    return html.escape(printable(str(value)))


def section(name: str, title: str, parts: Iterable[str]) -> str:
    """A section with a heading; empty if it has no content."""
    content = "\n".join(part for part in parts if part)
    if not content:
        return ""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{text(title)}</h2>\n{content}\n</section>'


def paragraph(content: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{f' class={kind}' if kind else ''}>{text(content)}</p>" if content else ""


def facts(title: str, pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    rows = "\n".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in pairs)
    head = f"<caption><span>{text(title)}</span></caption>"
    return f'<div class="wide"><table class="facts">{head}<tbody>\n{rows}\n</tbody></table></div>'


def table(title: str, rows: Sequence[Sequence[str]], *, words: Sequence[int] = ()) -> str:
    """A table with a header row; the first cell of each row is its heading, `words` are columns of text."""
    head, *body = rows
    kinds = [' class="words"' if column in words else "" for column in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{text(cell)}</th>' for cell, kind in zip(head, kinds, strict=True))
    lines = []
    for first, *rest in body:
        cells = "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(rest, kinds[1:], strict=True))
        lines.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    return (
        f'<div class="wide"><table><caption><span>{text(title)}</span></caption><thead><tr>{top}</tr></thead><tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """A few large figures."""
    inner = "\n".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="cards">\n{inner}\n</dl>'


def figure(name: str, title: str, caption: str, svg: str, description: str) -> str:
    """A plot with its heading and caption, and its figures in words for everyone."""
    words = details("The figures in words", paragraph(description, "note"))
    return (
        f'<figure aria-labelledby="{name}-head"><h3 id="{name}-head">{text(title)}</h3>\n<div class="plot">{svg}</div>\n'
        f"<figcaption>{text(caption)}</figcaption>\n{words}</figure>"
    )


def details(title: str, content: str) -> str:
    """Content that the reader can open."""
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def preformatted(content: str) -> str:
    """Text as it is, in a font of constant width."""
    return f"<pre>{text(content)}</pre>"


def page(title: str, lead: str, top: str, sections: Sequence[tuple[str, str, str]], foot: str) -> str:
    """The whole page; `sections` are (id, title, HTML), of which empty ones are left out."""
    shown = [one for one in sections if one[2]]
    links = "\n".join(f'<li><a href="#{name}">{text(label)}</a></li>' for name, label, _ in shown)
    body = "\n".join(content for _, _, content in shown)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{MADE_BY}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<header>
<h1>{text(title)}</h1>
<p class="lead">{text(lead)}</p>
<nav aria-label="Contents"><ul>
{links}
</ul></nav>
{top}
</header>
<main>
{body}
</main>
<footer>{text(foot)}</footer>
</body>
</html>
"""
