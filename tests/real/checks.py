"""The checks of `make real`: each runs jobs on the real model and says how much of what should be equal was.

A check returns Findings, one for each line of the table; it raises nothing for a difference, only for a job that failed.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftmill.actors.checkpoints.models import fetch_model
from tests.real import lm_eval_on_it as harness
from tests.real.jobs_on_it import Place, Row, call, finish, kill_after, rows_of, same
from tests.real.prompts import prompts
from tests.real.theirs import Theirs

WARM = {"temperature": 0.8}
RESULT = ("text", "tokens", "finish", "logprob", "prompt_tokens", "new_tokens", "key")
"""What a lossless decoder, another batch or another number of workers must leave as it is."""
CLOSE = 1e-3
"""How far the log-probabilities of a text may be apart where sums are taken in another order, in nats."""

DECODERS: dict[str, dict] = {
    "speculative, n-gram, k = 5": {"kind": "speculative", "k": 5},
    "speculative, n-gram, k = auto": {"kind": "speculative", "k": "auto"},
    "speculative, a model drafts": {"kind": "speculative", "k": 4, "drafter": {"kind": "model", "path": "DRAFTER"}},
    "jacobi": {"kind": "jacobi"},
    "jacobi, running": {"kind": "jacobi", "window": "running"},
    "multiblock_jacobi": {"kind": "multiblock_jacobi"},
    "fastest": {"kind": "fastest"},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: `equal` of `of` agreed; it fails where they are not the same, unless `passes` says otherwise."""

    what: str
    equal: int
    of: int
    note: str = ""
    passes: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether the line holds; a line about nothing does not."""
        return self.of > 0 and (self.equal == self.of if self.passes is None else self.passes)


@dataclass
class Bench:
    """What the checks share: the place of the jobs, the checkpoint's folder, how much is asked."""

    place: Place
    count: int = 64
    new_tokens: int = 48
    threads: int = 2
    held: dict[str, dict[str, Row]] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        return fetch_model(self.place.model)

    @cached_property
    def theirs(self) -> Theirs:
        torch.set_num_threads(self.threads)
        return Theirs(self.folder)

    @cached_property
    def asked(self) -> list[str]:
        """The prompts: all of them, or an even choice."""
        every = prompts()
        return [every[i * len(every) // self.count] for i in range(self.count)]

    @cached_property
    def rows(self) -> list[dict]:
        return [{"id": f"p{number:02}", "prompt": prompt} for number, prompt in enumerate(self.asked)]

    @cached_property
    def ids(self) -> dict[str, list[int]]:
        """The prompts' tokens by row, as transformers' own chat template gives them."""
        return {row["id"]: self.theirs.chat_ids(row["prompt"]) for row in self.rows}

    @cached_property
    def expected(self) -> dict[str, list[int]]:
        """transformers' greedy continuations by row."""
        return self.theirs.greedy(self.ids, self.new_tokens, [self.end])

    @cached_property
    def end(self) -> int:
        return int(self.theirs.model.generation_config.eos_token_id)

    @property
    def chat(self) -> dict:
        """The task of most jobs."""
        return {"kind": "complete", "chat": True, "max_new_tokens": self.new_tokens}

    def greedy(self) -> dict[str, Row]:
        return self.once("greedy", {})

    def baseline(self) -> dict[str, Row]:
        """Rows of sequential decoding at temperature 0.8."""
        return self.once("sampled", {"sampling": WARM})

    def once(self, name: str, changes: dict) -> dict[str, Row]:
        """Rows of a job over all prompts, run when they are first asked for."""
        if name not in self.held:
            self.held[name] = self.place.run(name, self.chat, self.rows, **changes)
        return self.held[name]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.theirs.tokenizer.decode(list(tokens), skip_special_tokens=True))


def check_greedy(bench: Bench) -> list[Finding]:
    """Greedy chat is transformers' `generate`, token for token; two logits that are as good as equal may part them."""
    rows, equal, ties = bench.greedy(), 0, 0
    for key, expected in bench.expected.items():
        ours = rows[key]["tokens"]
        equal += ours == expected
        ties += ours != expected and bench.theirs.is_tie(bench.ids[key], ours, expected)
    texts = sum(rows[key]["text"] == bench.text(rows[key]["tokens"]) for key in rows)
    lengths = sorted(map(len, bench.ids.values()))
    prompts_equal = sum(rows[key]["prompt_tokens"] == len(ids) for key, ids in bench.ids.items())
    note = f"prompts of {lengths[0]} to {lengths[-1]:,} tokens" + (f"; {ties} part at a tie" if ties else "")
    return [
        Finding("tokens of the prompt: transformers' chat template", prompts_equal, len(rows)),
        Finding("greedy chat: transformers' generate", equal, len(rows), note, equal + ties == len(rows)),
        Finding("text: transformers' decode of these tokens", texts, len(rows)),
    ]


def check_decoders(bench: Bench) -> list[Finding]:
    """At temperature 0.8 every causal decoder gives the rows of sequential decoding (every second one is decoded), to the bit.

    `multiblock_jacobi` reads its candidates through columns of their own, and so sums in another order: of it the last bits of
    log-probabilities may differ, and no token.
    """
    baseline, found = bench.baseline(), []
    drafter = write_drafter(bench.folder, bench.place.root / "drafter")
    for what, settings in DECODERS.items():
        decoder = json.loads(json.dumps(settings).replace("DRAFTER", str(drafter)))
        name = what.replace(", ", "-").replace(" ", "")
        rows = bench.place.run(name, bench.chat, bench.rows[::2], sampling=WARM, decoder=decoder)
        tokens, nfe = (sum(row[name] for row in rows.values()) for name in ("new_tokens", "nfe"))
        note = f"{nfe / tokens:.2f} forwards a token"
        columns: tuple[str, ...] = RESULT
        if settings["kind"] == "multiblock_jacobi":
            columns = tuple(column for column in RESULT if column != "logprob")
            apart = max(abs(row["logprob"] - baseline[key]["logprob"]) for key, row in rows.items())
            note += f"; log-probabilities at most {apart:.1e} apart"
            assert apart < CLOSE, note
        found.append(Finding(f"{what}: autoregressive, T = 0.8", same(rows, baseline, columns), len(rows), note))
    distinct = len({tuple(row["tokens"]) for row in baseline.values()})
    greedy = same(bench.greedy(), baseline, ("tokens",))
    note = f"{greedy} rows equal the greedy ones"
    found.append(Finding("T = 0.8 draws other texts than T = 0", distinct, len(baseline), note, greedy < distinct // 2))
    return found


def write_drafter(folder: Path, target: Path) -> Path:
    """The model with its weights rounded to 8 bits (float8, 3 bits of fraction): it drafts well, and not always right."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in {".json", ".jinja"} and file.name != "draftmill_source.json":
            shutil.copy(file, target)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: tensor.to(torch.float8_e4m3fn).to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(rounded, target / "model.safetensors", metadata={"format": "pt"})
    return target


def check_two_workers(bench: Bench) -> list[Finding]:
    """Two workers and small batches change no row."""
    changes = {"sampling": WARM, "workers": {"count": 2, "cpus": 1}, "batching": {"max_rows": 5}}
    rows = bench.once("two-workers", changes)
    workers = len({row["worker"] for row in rows.values()})
    note = f"{workers} workers took part"
    return [
        Finding("two workers, 5 slots each: one with 16 or more", same(rows, bench.baseline(), RESULT), len(rows), note)
    ]


def check_resume(bench: Bench) -> list[Finding]:
    """A job that is killed and started again gives the rows of one that was not."""
    size = max(1, len(bench.rows) // 8)
    folder = bench.place.spec("killed", bench.chat, bench.rows, sampling=WARM, output={"unit_rows": size})
    shutil.rmtree(folder / "run", ignore_errors=True)
    done = kill_after(folder, 2)
    before = rows_of(folder)
    rows = finish(folder)
    kept = same(before, rows, (*RESULT, "started_at", "worker"))
    units = -(-len(rows) // size)
    return [
        Finding("killed with -9 and resumed: never killed", same(rows, bench.baseline(), RESULT), len(rows)),
        Finding(
            "what was committed before stays",
            kept,
            len(before),
            f"{done} of {units} units",
            kept == len(before) and 0 < done < units,
        ),
    ]


def check_scores(bench: Bench) -> list[Finding]:
    """The log-probability of a text is transformers'."""
    asked = [
        {"id": row["id"], "prompt": row["prompt"], "completion": bench.greedy()[row["id"]]["text"] or "x"}
        for row in bench.rows
    ]
    task = {"kind": "score", "chat": True}
    rows = bench.place.run("scores", task, asked)
    close, worst = 0, 0.0
    for row in asked:
        text = bench.theirs.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        expected, ours = bench.theirs.score(bench.ids[row["id"]], text), rows[row["id"]]["logprob"]
        off = abs(ours - expected) / len(text)
        worst = max(worst, off)
        close += off < 1e-4
    return [Finding("scores: transformers' log-probabilities", close, len(asked), f"at most {worst:.1e} a token apart")]


def check_stops(bench: Bench) -> list[Finding]:
    """Stop strings and several end tokens end a text where transformers' own tokens say."""
    stops = [".", "\n\n", " a"]
    rows = bench.place.run("stops", bench.chat | {"stop": stops}, bench.rows)
    equal = sum(rows[key]["text"] == stopped(bench, tokens, stops) for key, tokens in bench.expected.items())
    hit = sum(row["finish"] == "stop" for row in rows.values())
    first = Finding(
        "stop strings: generate, cut by hand", equal, len(rows), f"{hit} ended by one", equal == len(rows) and hit > 0
    )
    found = [token for tokens in bench.expected.values() for token in set(tokens) if token != bench.end]
    second = max(sorted(set(found)), key=found.count)  # it stands in most of the continuations
    folder = with_ends(bench.folder, bench.place.root / "two-ends", [bench.end, second])
    place = Place(bench.place.root, str(folder), bench.place.threads)
    rows = place.run("ends", bench.chat, bench.rows)
    expected = bench.theirs.greedy(bench.ids, bench.new_tokens, [bench.end, second])
    equal = sum(rows[key]["tokens"] == tokens for key, tokens in expected.items())
    hit = sum(row["finish"] == "eos" and row["tokens"][-1] == second for row in rows.values())
    note = f"{hit} ended by the second"
    return [first, Finding("two end ids: generate", equal, len(rows), note, equal == len(rows) and hit > 0)]


def stopped(bench: Bench, tokens: Sequence[int], stops: Sequence[str]) -> str:
    """The text of tokens up to the first stop string, as it appears when they come one by one."""
    for count in range(1, len(tokens) + 1):
        text = bench.text(tokens[:count])
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if found:
            return text[: min(found)[1]]
    return bench.text(tokens)


def with_ends(folder: Path, target: Path, ends: list[int]) -> Path:
    """The checkpoint with other end tokens in its generation config."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name not in {"generation_config.json", "draftmill_source.json"}:
            os.symlink(file, target / file.name)
    (target / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": ends}))
    return target


def check_bfloat16(bench: Bench) -> list[Finding]:
    """In bfloat16 every token is one that transformers' bfloat16 forward ranks first, or next to it by a rounding."""
    rows = few_rows(bench, "bfloat16", model={"dtype": "bfloat16"})
    half = Theirs(bench.folder, torch.bfloat16)
    near = count = 0
    for key, row in rows.items():
        logits = half.logits(bench.ids[key], row["tokens"])
        behind = logits.amax(1) - logits.gather(1, torch.tensor(row["tokens"]).unsqueeze(1)).squeeze(1)
        near, count = near + int((behind <= BF16_STEPS).sum()), count + len(row["tokens"])
    first = Finding(f"bfloat16: tokens within {BF16_STEPS:g} of transformers' best logit", near, count)
    return [first, like_float32(bench, "bfloat16", rows)]


def check_int8(bench: Bench) -> list[Finding]:
    """With products of integers a small batch changes no row."""
    found = list[Finding]()
    for kind in ("int8", "w8a8"):
        model = {"weights": kind, "exact": True}
        rows = few_rows(bench, kind, model=model)
        small = few_rows(bench, f"{kind}-small", model=model, batching={"max_rows": 3})
        found.append(Finding(f"{kind}, exact, 3 slots: one with 16", same(rows, small, RESULT), len(rows)))
        found.append(like_float32(bench, kind, rows, most=8 if kind == "w8a8" else None))
    return found


def few_rows(bench: Bench, name: str, **changes) -> dict[str, Row]:
    """Rows of a job over every fourth prompt, with few new tokens."""
    task = bench.chat | {"max_new_tokens": min(24, bench.new_tokens)}
    return bench.place.run(name, task, bench.rows[::4], **changes)


def like_float32(bench: Bench, form: str, rows: dict[str, Row], *, most: int | None = None) -> Finding:
    """The share of texts, or of their first `most` tokens, that equal float32's; rounding may change any of them, but not all."""
    cut = {key: row["tokens"][:most] for key, row in rows.items()}
    equal = sum(tokens == bench.expected[key][: len(tokens)] for key, tokens in cut.items())
    what = "texts" if most is None else f"first {most} tokens"
    return Finding(f"{form}: {what} of float32", equal, len(rows), f"{equal / len(rows):.0%}", equal > 0)


BF16_STEPS = 0.75
"""bfloat16 has 8 bits of fraction: logits of 16 to 32 stand 0.125 apart, and thirty layers add a few such steps."""


def check_openai(bench: Bench) -> list[Finding]:
    """A batch file of OpenAI's format in, its answers out: every request once, with the text of the plain job."""
    chosen = bench.rows[::2]
    requests = [
        {
            "custom_id": row["id"],
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}]},
        }
        for row in chosen
    ]
    bench.place.run("openai", bench.chat, requests)
    out = bench.place.root / "openai" / "answers.jsonl"
    code, said = call("export", str(out.parent / "run"), "--format", "openai", "--out", str(out), "--overwrite")
    assert code == 0, said
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    greedy = bench.greedy()
    equal = sum(
        answer["response"]["body"]["choices"][0]["message"]["content"] == greedy[answer["custom_id"]]["text"]
        for answer in answers
    )
    once = len({answer["custom_id"] for answer in answers}) == len(answers) == len(chosen)
    return [
        Finding("OpenAI batch in and out: the plain job's texts", equal, len(chosen), "", once and equal == len(chosen))
    ]


def check_lm_eval(bench: Bench) -> list[Finding]:
    """`draftmill eval` answers like lm_eval's own `hf` model: texts at temperature 0, log-probabilities and `is_greedy`."""
    harness.offline()
    questions = [text for text in bench.asked if len(text) < 600]
    tasks = harness.write_tasks(bench.place.root / "lm_eval" / "tasks", questions, min(32, bench.new_tokens))
    chat = harness.ours(bench.place, tasks, ["answers"], "--apply_chat_template")
    plain = harness.ours(bench.place, tasks, ["words", "texts"])
    pair = bench.theirs.model, bench.theirs.tokenizer
    expected = dict(harness.theirs(*pair, tasks, ["answers"], apply_chat_template=True)["samples"])
    expected |= harness.theirs(*pair, tasks, ["words", "texts"])["samples"]
    texts = sum(a["resps"] == b["resps"] for a, b in zip(chat["answers"], expected["answers"], strict=True))
    answers = [one for sample in chat["answers"] for of in sample["draftmill"] for one in of]
    nfe, tokens = (sum(one[key] for one in answers) for key in ("nfe", "new_tokens"))
    words = harness.same_choices(plain["words"], expected["words"], CLOSE)
    pairs = list(zip(plain["texts"], expected["texts"], strict=True))
    rolled = sum(abs(float(a["resps"][0][0]) - float(b["resps"][0][0])) < 10 * CLOSE for a, b in pairs)
    return [
        Finding("eval, generate_until: lm_eval's hf", texts, len(questions), f"{nfe / tokens:.2f} forwards a token"),
        Finding("eval, loglikelihood: lm_eval's hf", words, len(questions), f"{len(harness.CHOICES)} choices each"),
        Finding("eval, loglikelihood_rolling: lm_eval's hf", rolled, len(questions)),
    ]


CHECKS: dict[str, Callable[[Bench], list[Finding]]] = {
    "greedy": check_greedy,
    "decoders": check_decoders,
    "workers": check_two_workers,
    "resume": check_resume,
    "scores": check_scores,
    "stops": check_stops,
    "bfloat16": check_bfloat16,
    "int8": check_int8,
    "openai": check_openai,
    "lm_eval": check_lm_eval,
}
