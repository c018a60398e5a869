"""Writes benchmarks/PAPERS.md: a table of claims and a table of cases for every paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftmill.jobs.compare.statistics import Interval
from examples.papers.claims import Claim, Paper, Verdict

HEAD = """# The five papers in small

`make papers` tests what the papers claim on the builtin models, and writes this page. The models are tiny (0.6 to 3.7 million
parameters, trained on Python's own sources), so a claim that does not hold here may well hold for the paper's models.

Forwards of the model (NFE), accepted drafts and texts are compared; seconds on a paper's GPUs are only quoted, and marked.
In brackets: 95 % intervals over samples (shares: Wilson). "holds": the whole interval is on the claim's side.
"not decided": it is on both sides; more samples (`--full`) decide. That nothing differs "holds" where the interval contains
no change. Lines marked (ours) are no claims of the paper.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A claim with our figure; no figure where a case has not run."""

    claim: Claim
    found: Interval | None

    @property
    def verdict(self) -> Verdict | str:
        """The verdict in words."""
        return "not run" if self.found is None else self.claim.expect.judge(self.found)


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One case of a preset: its figures over all samples; None where it has none."""

    preset: str
    case: str
    samples: int
    tokens: int
    nfe_per_token: float | None
    nfe_draft_per_token: float | None
    tokens_per_iteration: float | None
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Section:
    """A paper with its answers, its cases, and the command that runs each preset as it was run."""

    paper: Paper
    answers: Sequence[Answer]
    cases: Sequence[CaseRow]
    commands: Sequence[str]


def page(sections: Iterable[Section], machine: str) -> str:
    """The whole page in Markdown."""
    found = list(sections)
    parts = [HEAD, *summary(found), "", machine, ""]
    for section in found:
        parts += [*section_lines(section), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def summary(sections: Sequence[Section]) -> Iterator[str]:
    """How many of each paper's claims hold."""
    verdicts = ("holds", "does not hold", "not decided", "reported", "not run")
    shown = [one for one in verdicts if any(a.verdict == one for s in sections for a in s.answers)]
    yield f"| paper | {' | '.join(shown)} |"
    yield f"|---{'|---' * len(shown)}|"
    for section in sections:
        theirs = [answer for answer in section.answers if not answer.claim.says.startswith("(ours)")]
        counts = [str(sum(answer.verdict == one for answer in theirs)) for one in shown]
        yield f"| {section.paper.name} | {' | '.join(counts)} |"


def section_lines(section: Section) -> Iterator[str]:
    """One paper."""
    paper = section.paper
    yield from (f"## {paper.name}", "", f"*{paper.title}.* {paper.setting}", "")
    yield "| the paper says | where | its figure | ours | measured as; expected | verdict |"
    yield "|---|---|---|---|---|---|"
    for answer in section.answers:
        claim = answer.claim
        expected = f"; {claim.expect.words}" if claim.expect.words else ""
        cells = (
            claim.says,
            claim.place,
            claim.theirs,
            shown(answer.found),
            f"{claim.what}{expected}",
            f"**{answer.verdict}**",
        )
        yield f"| {' | '.join(cells)} |"
    if paper.remark:
        yield from ("", paper.remark)
    yield from ("", "| case | samples | NFE per token | drafter's | tokens per iteration | accepted |")
    yield "|---|---|---|---|---|---|"
    for row in section.cases:
        figures = (row.nfe_per_token, row.nfe_draft_per_token, row.tokens_per_iteration, row.acceptance)
        yield f"| {' | '.join([f'{row.preset}/{row.case}', f'{row.samples:,}', *map(number, figures)])} |"
    yield from ("", *(f"    {command}" for command in section.commands))


def shown(found: Interval | None) -> str:
    """A figure with its interval."""
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return number(found.value)
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def number(value: float | None) -> str:
    """Three digits; empty for none."""
    return "" if value is None else f"{value:.3f}"
