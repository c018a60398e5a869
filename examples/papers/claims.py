"""The claims of the five papers that can be tested on small models on a CPU: what each says, the figure, and when it holds.

Forwards, acceptance and texts can be compared with a paper's; seconds on its GPUs can't. A figure of a paper that is given
here is quoted with the place where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftmill.jobs.compare.statistics import Interval
from examples.papers.figures import Figure, Forwards, Mean, Metric, Ratio, SameText, WithinTokens

Verdict = Literal["holds", "does not hold", "not decided", "reported"]
NEAR = 0.05
"""What counts as near."""


@dataclass(frozen=True, slots=True)
class Expect:
    """When a claim holds: the interval is below, above or near `value`, the figure equals it, or the interval contains it."""

    how: Literal["below", "above", "near", "equal", "around", "report"]
    value: float = 0.0

    def judge(self, found: Interval) -> Verdict:
        """The verdict on a figure; "not decided" where its interval is on both sides."""
        if self.how == "report":
            return "reported"
        if self.how == "equal":
            return "holds" if found.value == self.value else "does not hold"
        if self.how == "around":
            return "holds" if found.holds(self.value) else "does not hold"
        low = found.value if found.low is None else found.low
        high = found.value if found.high is None else found.high
        if self.how == "near":
            inside, outside = abs(np.array([low, high]) - self.value) <= NEAR, abs(found.value - self.value) > NEAR
            return "holds" if inside.all() else "does not hold" if outside else "not decided"
        below, above = high < self.value, low > self.value
        if not below and not above and not low == high == self.value:
            return "not decided"
        return "holds" if (below if self.how == "below" else above) else "does not hold"

    @property
    def words(self) -> str:
        """The condition in words."""
        value = f"{self.value:g}"
        return {
            "below": f"below {value}",
            "above": f"above {value}",
            "equal": f"exactly {value}",
            "around": f"{value} is inside the interval",
            "near": f"within {NEAR:g} of {value}",
            "report": "",
        }[self.how]


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: what the paper says and where, its own figure in the unit of ours, and ours."""

    says: str
    place: str
    theirs: str
    what: str
    figure: Figure
    expect: Expect


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper: its claims, the presets that test them, and what differs from its own experiments."""

    name: str
    title: str
    setting: str
    presets: tuple[str, ...]
    claims: tuple[Claim, ...]
    remark: str = ""


BELOW_ONE, ABOVE_ONE, SAME, ALL, REPORT = (
    Expect("below", 1.0),
    Expect("above", 1.0),
    Expect("around", 0.0),
    Expect("equal", 1.0),
    Expect("report"),
)

ASSD = Paper(
    "ASSD",
    "Self-speculative decoding accelerates lossless inference in any-order and any-subset autoregressive models",
    "`asarm-tiny` (3 M parameters) fills in Python; the paper: XLNet (110 M), fine-tuned, on WikiText, HumanEval and ROCStories.",
    ("assd", "assd-share", "assd-length", "assd-stories", "assd-lines"),
    (
        Claim(
            "never more forwards than tokens",
            "theorem 1",
            "1",
            "share of samples with at most as many forwards as tokens, k = 5",
            WithinTokens("assd", "self-5"),
            ALL,
        ),
        Claim(
            "drafts of its own save forwards: 434.1 for 486 tokens",
            "table 1",
            "0.893",
            "forwards, of sequential, 95 % hidden",
            Forwards("assd", "sequential", "self-5"),
            BELOW_ONE,
        ),
        Claim(
            "n-gram drafts save forwards of the model: 422.0 for 486",
            "table 1",
            "0.868",
            "forwards, of sequential, 95 % hidden",
            Forwards("assd", "sequential", "ngram-5"),
            BELOW_ONE,
        ),
        Claim(
            "drafts of its own give more tokens per iteration than n-grams (2.24 and 1.15)",
            "section 7.1",
            "1.95",
            "tokens per iteration, self over n-gram",
            Ratio("assd", "new_tokens", "iterations", "self-5", "ngram-5"),
            ABOVE_ONE,
        ),
        Claim(
            "two drafts gain nothing: -4.0 % speed",
            "table 5",
            "1.04 (seconds)",
            "forwards, of sequential, k = 2",
            Forwards("assd", "sequential", "self-2"),
            Expect("near", 1.0),
        ),
        Claim(
            "beyond four drafts the number hardly matters: 8.9 % faster at 5, 9.0 % at 20",
            "table 5",
            "0.999 (seconds)",
            "forwards, k = 20 over k = 5",
            Forwards("assd", "self-5", "self-20"),
            Expect("near", 1.0),
        ),
        Claim(
            "the same distribution as sequential: generative perplexity 107.6 and 107.9, no significant difference",
            "theorem 2, table 1",
            "-0.3 (perplexity)",
            "log-probability under `ar-tiny`, rejection rule minus sequential",
            Metric("assd", "sequential", "rejection-5", "judge_logprob"),
            SAME,
        ),
        Claim(
            "and the same entropy: 7.64 and 7.65",
            "table 1",
            "-0.01",
            "entropy of the tokens, rejection rule minus sequential",
            Metric("assd", "sequential", "rejection-5", "entropy"),
            SAME,
        ),
        Claim(
            "(ours) with coupled noise even the tokens are the same",
            "",
            "",
            "share of samples with equal tokens, k = 5",
            SameText("assd", "sequential", "self-5"),
            ALL,
        ),
        Claim(
            "(ours) verifying and drafting in one forward saves more",
            "",
            "",
            "forwards, one pass over two, k = 5",
            Forwards("assd", "self-5", "one-pass-5"),
            BELOW_ONE,
        ),
        *(
            Claim(
                f"drafts save {theirs} % of the seconds at {tokens} tokens",
                "table 6",
                f"{1 - theirs / 100:.3f} (seconds)",
                f"forwards, of sequential, pieces of at most {chars} characters",
                Forwards(
                    "assd-length",
                    f"chunk_chars-{chars}_decoder-any_subset",
                    f"chunk_chars-{chars}_decoder-assd-k-5-head-none",
                ),
                BELOW_ONE,
            )
            for chars, tokens, theirs in ((192, 128, 8.9), (1152, 512, 9.4))
        ),
        Claim(
            "one hidden sentence of five: fewer forwards than the 32 of diffusion models (10.4)",
            "table 3",
            "10.4 forwards",
            "forwards, of sequential, 1/5 hidden",
            Forwards("assd-stories", "one-sequential", "one-self"),
            BELOW_ONE,
        ),
        Claim(
            "three hidden sentences of five: 30.4 forwards, 64 of diffusion models",
            "table 3",
            "30.4 forwards",
            "forwards, of sequential, 3/5 hidden",
            Forwards("assd-stories", "three-sequential", "three-self"),
            BELOW_ONE,
        ),
        Claim(
            "a hidden line of a HumanEval program: pass@1 38.6 %, near a model 50 times as large (40.7 %)",
            "table 2",
            "0.386",
            "pass@1 of `asarm-tiny`, greedy, one line a problem; there is no larger model here to compare with",
            Mean("assd-lines", "sequential", "pass@1"),
            REPORT,
        ),
        Claim(
            "(ours) forwards for such a line",
            "",
            "",
            "forwards, of sequential",
            Forwards("assd-lines", "sequential", "self-5"),
            BELOW_ONE,
        ),
    ),
)

SPECDIFF = Paper(
    "SpecDiff",
    "Speculative diffusion decoding: accelerating language generation through diffusion",
    "`ar-tiny` with drafts of `mdm-tiny`, both of 3.7 M parameters, and with drafts of `ar-micro` (0.6 M); the paper: GPT-2 XL "
    "and GPT-Neo with drafts of SEDD (90 M) and GPT-2 (86 M) on CNN/DM and OpenWebText. Its speed-ups (up to 8.7x) are "
    "seconds on GPUs.",
    ("specdiff", "specdiff-temperature"),
    (
        Claim(
            "the target's own output",
            "section 4",
            "",
            "share of samples with equal tokens, gamma = 10, coupled noise",
            SameText("specdiff", "sequential", "gamma-10"),
            ALL,
        ),
        Claim(
            "fewer forwards of the target",
            "section 5",
            "",
            "forwards, of sequential, gamma = 10, one step",
            Forwards("specdiff", "sequential", "gamma-10"),
            BELOW_ONE,
        ),
        Claim(
            "more tokens accepted a draft than from a small causal model: about 36 (gamma 40, 0.89) and 4.0 (5, 0.80)",
            "tables 1, 2",
            "8.9",
            "accepted per iteration, gamma = 40 over the small model's k = 5",
            Ratio("specdiff", "accepted", "iterations", "gamma-40", "small-model-5"),
            ABOVE_ONE,
        ),
        Claim(
            "drafting costs fewer forwards of the drafter",
            "section 4",
            "",
            "drafter's forwards per token, gamma = 10 over the small model's k = 5",
            Ratio("specdiff", "nfe_draft", "new_tokens", "gamma-10", "small-model-5"),
            BELOW_ONE,
        ),
        Claim(
            "more drafts, more accepted tokens",
            "table 2",
            "",
            "accepted per iteration, gamma = 40 over gamma = 5",
            Ratio("specdiff", "accepted", "iterations", "gamma-40", "gamma-5"),
            ABOVE_ONE,
        ),
        Claim(
            "the share accepted is a little lower than a causal drafter's five drafts (0.89 and 0.80 to 0.91)",
            "table 1",
            "0.89",
            "share accepted, gamma = 40",
            Ratio("specdiff", "accepted", "proposed", "gamma-40"),
            REPORT,
        ),
        Claim(
            "more steps, better drafts",
            "figure 2",
            "",
            "share accepted, five steps over one, gamma = 10",
            Ratio("specdiff", "accepted", "proposed", "gamma-10-steps-5", "gamma-10"),
            ABOVE_ONE,
        ),
        Claim(
            "(ours) greedy",
            "",
            "",
            "forwards, of sequential, gamma = 10, temperature 0",
            Forwards("specdiff-temperature", "greedy-sequential", "greedy-gamma-10"),
            BELOW_ONE,
        ),
    ),
)

PCLLM = Paper(
    "pcLLM",
    "AR models can be faster and more accurate parallel decoders than diffusion LLMs",
    "`ar-tiny` and `ar-tiny-jacobi`, distilled from it (3.7 M parameters); the paper: Qwen2.5-Coder-7B on HumanEval and MBPP, "
    "Qwen2.5-Math-7B on GSM8K and MATH. Its speed-ups are tokens per second on GPUs.",
    ("pcllm",),
    (
        Claim(
            "Jacobi decoding of a model that was not trained for it gains nothing: 0.97x",
            "table 1",
            "0.97",
            "tokens per forward of `ar-tiny`, blocks of 16",
            Ratio("pcllm", "new_tokens", "nfe", "plain-jacobi-16"),
            Expect("below", 1.2),
        ),
        Claim(
            "after distillation it is several times faster: 3.57x on HumanEval, 2.10x on MBPP",
            "table 1",
            "3.57 and 2.10",
            "tokens per forward, blocks of 16",
            Ratio("pcllm", "new_tokens", "nfe", "jacobi-16"),
            Expect("above", 2.0),
        ),
        Claim(
            "the output is that of greedy decoding",
            "section 2.1",
            "",
            "share of samples with equal tokens, blocks of 16",
            SameText("pcllm", "sequential", "jacobi-16"),
            ALL,
        ),
        Claim(
            "and so is that of multi-block decoding with recycled candidates",
            "section 3.2",
            "",
            "share of samples with equal tokens, blocks of 16, 4 candidates",
            SameText("pcllm", "sequential", "blocks-16-verify-4"),
            ALL,
        ),
        Claim(
            "multi-block decoding and recycling accept more per iteration: up to 4.2x of AR, plain 3.6x",
            "abstract, table 1",
            "",
            "tokens per forward, multi-block with 4 candidates over plain, blocks of 16",
            Ratio("pcllm", "new_tokens", "nfe", "blocks-16-verify-4", "jacobi-16"),
            ABOVE_ONE,
        ),
        Claim(
            "a running window accepts more than fixed blocks",
            "figure 4b",
            "",
            "tokens per forward, running over fixed, 16 drafts",
            Ratio("pcllm", "new_tokens", "nfe", "running-16", "jacobi-16"),
            ABOVE_ONE,
        ),
        Claim(
            "larger blocks accept more with multi-block decoding",
            "figure 4b",
            "",
            "tokens per forward, blocks of 32 over blocks of 8, 4 candidates",
            Ratio("pcllm", "new_tokens", "nfe", "blocks-32-verify-4", "blocks-8-verify-4"),
            ABOVE_ONE,
        ),
        Claim(
            "verifying several candidates accepts more than one",
            "section 4.3",
            "",
            "tokens per forward, 4 candidates over 1, blocks of 16",
            Ratio("pcllm", "new_tokens", "nfe", "blocks-16-verify-4", "blocks-16-verify-1"),
            ABOVE_ONE,
        ),
    ),
    "What distillation costs in quality: 3 points of pass@1 in the paper; the README of `ar-tiny-jacobi` has its perplexity.",
)

SSD = Paper(
    "SSD",
    "Self speculative decoding for diffusion large language models",
    "`mdm-tiny` (3.7 M parameters), blocks of 8, caches rebuilt every 8 tokens; the paper: LLaDA and Dream (7 and 8 B) with the "
    "same settings on GSM8K, MATH, HumanEval and MBPP. Its speed-ups (up to 3.46x) are tokens per second on a GPU.",
    ("ssd",),
    (
        Claim(
            "the output is that of one token per step",
            "section 3.2",
            "",
            "share of samples with equal tokens, 4 drafts",
            SameText("ssd", "stepwise", "drafts-4"),
            ALL,
        ),
        *(
            Claim(
                f"{number} drafts cut the steps by {cut}",
                "table 1, means over tasks",
                theirs,
                f"forwards, of stepwise, {number} drafts",
                Forwards("ssd", "stepwise", f"drafts-{number}"),
                Expect("below", 0.5),
            )
            for number, cut, theirs in (
                (3, "55.5 to 61.9 %", "0.381 to 0.445"),
                (4, "58.6 to 65.5 %", "0.345 to 0.414"),
                (5, "59.9 to 67.6 %", "0.324 to 0.401"),
            )
        ),
        Claim(
            "each further draft saves steps, less and less",
            "table 1",
            "0.97",
            "forwards, 5 drafts over 4",
            Forwards("ssd", "drafts-4", "drafts-5"),
            BELOW_ONE,
        ),
    ),
    "Why not: `mdm-tiny` is unsure of Python, so a round's surest place is often not the next one. The same weights, trained on "
    "lines that repeat until they are sure, take 0.40, 0.37 and 0.35 of the forwards with 3, 4 and 5 drafts without a cache, and "
    "0.48, 0.46 and 0.46 with these caches: there all five claims hold (RESULTS.md, SSD where the model is sure of its text).",
)

S2D2 = Paper(
    "S2D2",
    "Fast decoding for diffusion LLMs via training-free self-speculation",
    "`block-tiny` (3.7 M parameters), blocks of 8, temperature 1; the paper: SDAR (1.7 to 8 B), Fast-dLLM v2 and LLaDA2.1 on "
    "GSM8K, MBPP, HumanEval and IFEval. Its speed-ups are seconds. Quality is accuracy there, and here the log-probability under "
    "`ar-tiny` at temperature 0; above it dynamic denoising reveals the surest of its draws, which a log-probability rewards.",
    ("s2d2", "s2d2-greedy"),
    (
        Claim(
            "faster than one token at a time: 2.5x and 4.7x (SDAR-1.7B)",
            "table 1",
            "0.40 and 0.21 (seconds)",
            "forwards, of block size 1 by two forwards a token, as in the paper's code, always verifying",
            Forwards("s2d2", "as-published", "always"),
            BELOW_ONE,
        ),
        Claim(
            "(ours) of block size 1 by one forward a token",
            "",
            "",
            "forwards, of sequential, always verifying",
            Forwards("s2d2", "sequential", "always"),
            REPORT,
        ),
        Claim(
            "faster than dynamic denoising: 1.57x (SDAR-1.7B, config B)",
            "table 1",
            "0.64 (seconds)",
            "forwards, of dynamic, always verifying",
            Forwards("s2d2", "dynamic", "always"),
            BELOW_ONE,
        ),
        Claim(
            "and better: 52.9 and 48.4 % accuracy",
            "table 1",
            "+4.5 points",
            "log-probability, always verifying minus dynamic, temperature 0",
            Metric("s2d2-greedy", "dynamic", "always", "judge_logprob"),
            Expect("above", 0.0),
        ),
        Claim(
            "dynamic denoising is worse than one token at a time: 48.4 and 56.4 % accuracy",
            "table 1",
            "-8.0 points",
            "log-probability, dynamic minus sequential, temperature 0",
            Metric("s2d2-greedy", "sequential", "dynamic", "judge_logprob"),
            Expect("below", 0.0),
        ),
        Claim(
            "(ours) the same at temperature 1",
            "",
            "",
            "log-probability, dynamic minus sequential, temperature 1",
            Metric("s2d2", "sequential", "dynamic", "judge_logprob"),
            REPORT,
        ),
        Claim(
            "verifying long spans alone keeps much of the speed",
            "section 4.3",
            "",
            "forwards, spans of at least 4 over always",
            Forwards("s2d2", "always", "span-4"),
            REPORT,
        ),
        Claim(
            "routing by an estimated gain pays against dynamic denoising",
            "section 4.3",
            "",
            "forwards, of dynamic, score by entropy",
            Forwards("s2d2", "dynamic", "score-entropy"),
            BELOW_ONE,
        ),
        Claim(
            "the estimators differ little",
            "appendix A.5",
            "",
            "forwards, margin over entropy",
            Forwards("s2d2", "score-entropy", "score-margin"),
            REPORT,
        ),
        Claim(
            "(ours) always verifying over a causal cache is exact",
            "",
            "",
            "share of samples with the tokens of sequential",
            SameText("s2d2", "sequential", "always-fused"),
            ALL,
        ),
        Claim(
            "(ours) drafting in the forward that verifies saves forwards",
            "",
            "",
            "forwards, of sequential, fused",
            Forwards("s2d2", "sequential", "always-fused"),
            BELOW_ONE,
        ),
        Claim(
            "(ours) a draft head saves more",
            "",
            "",
            "forwards, of fused, with the head of `block-tiny`",
            Forwards("s2d2", "always-fused", "always-head"),
            BELOW_ONE,
        ),
        Claim(
            "(ours) its tokens are the same",
            "",
            "",
            "share of samples with the tokens of sequential",
            SameText("s2d2", "sequential", "always-head"),
            ALL,
        ),
    ),
)

PAPERS = (ASSD, SPECDIFF, PCLLM, SSD, S2D2)
