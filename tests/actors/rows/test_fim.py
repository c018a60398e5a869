"""A causal model is asked for the middle of a text as its family was trained: templates, holes in a row, cuts, refusals.

The golden prompts are written by hand from the model cards. The tokenizers are small ones that hold the special tokens.
"""

import numpy as np
import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Core

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.fim import Infilling, TextPart, cut, template_of, together
from draftmill.actors.rows.makers import FimMaker, maker_for
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Columns, Fim, Infill
from draftmill.decoders.base import HOLE, ModelInfo, Outcome, Request, TraceStep
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import RowError, UserError
from tests.actors.fakes import outcome
from tests.actors.tokenizers_for_tests import byte_level, word_pieces
from tests.decoders.support import decoder_settings

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
        "<|repo_name|>", "<|file_sep|>")  # fmt: skip
STARCODER = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>")
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<|EOT|>",
)
CODEGEMMA = ("<bos>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")
CODESTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")
BEFORE, AFTER = "def f(x):\n    ", "\n    return x\n"


def with_tokens(
    base: Tokenizer, tokens: tuple[str, ...], *, lead: str | None = None, bos: str | None = None
) -> Tokenizer:
    """The vocabulary with more special tokens; `lead` is put in front of every text."""
    core = Core.from_str(base._core.to_str())
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    if lead is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{lead} $A", special_tokens=[(lead, core.token_to_id(lead))]
        )
    return Tokenizer(core, bos_id=None if bos is None else core.token_to_id(bos))


def causal_info(*, vocab_size: int = 400, max_length: int | None = None) -> ModelInfo:
    return ModelInfo("llama", vocab_size, None, max_length, "causal", 1000)


def infill(mask: dict | None = None, **task) -> Infill:
    return Infill.model_validate({"kind": "infill", "mask": mask or {"kind": "marker"}} | task, strict=True)


def maker(tokenizer: Tokenizer | None = None, *, columns: dict[str, str] | None = None, max_length: int | None = None,
          **task) -> FimMaker:  # fmt: skip
    decoder = decoder_settings("autoregressive")
    recipe = RowRecipe(infill(**task), Columns(**(columns or {})), decoder, Sampling())
    found = maker_for(recipe, tokenizer or with_tokens(byte_level(), QWEN), causal_info(max_length=max_length))
    assert isinstance(found, FimMaker)
    return found


def spelled(tokenizer: Tokenizer, canvas: Canvas) -> list[str]:
    """The first prompt, token by token."""
    names = {number: token for token, number in tokenizer.vocabulary().items()}
    return [names[token] for token in canvas.tokens.tolist() if token != HOLE]


@pytest.mark.parametrize(
    ("tokenizer", "golden"),
    [
        (with_tokens(byte_level(), QWEN), f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"),
        (with_tokens(byte_level(), STARCODER), f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"),
        (
            with_tokens(byte_level(), DEEPSEEK, bos="<｜begin▁of▁sentence｜>"),
            f"<｜begin▁of▁sentence｜><｜fim▁begin｜>{BEFORE}<｜fim▁hole｜>{AFTER}<｜fim▁end｜>",
        ),
        (
            with_tokens(byte_level(), CODEGEMMA, lead="<bos>", bos="<bos>"),
            f"<bos><|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>",
        ),
        (with_tokens(byte_level(), CODESTRAL, lead="<s>", bos="<s>"), f"<s>[SUFFIX]{AFTER}[PREFIX]{BEFORE}"),
        (with_tokens(byte_level(), CODELLAMA, lead="<s>", bos="<s>"), f"<s>▁<PRE>{BEFORE}▁<SUF>{AFTER}▁<MID>"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codegemma", "codestral", "codellama"],
)
def test_a_prompt_is_that_of_the_model_card(tokenizer, golden):
    canvas = maker(tokenizer, max_new_tokens=3).make({"text": f"{BEFORE}<mask>{AFTER}"}, 1)
    given = canvas.tokens[canvas.tokens != HOLE].tolist()
    assert tokenizer.decode(given) == golden and given == tokenizer.parse(golden)
    assert canvas.tokens.tolist()[len(given) :] == [HOLE] * 3


def test_a_suffix_gets_no_space_that_a_vocabulary_puts_before_a_text():
    """As the reference codes of CodeLlama and Codestral encode: the prefix as a text, the suffix without the space."""
    llama = with_tokens(word_pieces(), (*CODELLAMA, "<s>"), lead="<s>", bos="<s>")
    canvas = maker(llama).make({"text": "the cat<mask>t a mat"}, 1)
    assert spelled(llama, canvas) == ["<s>", "▁<PRE>", "▁the", "▁cat", "▁<SUF>", "t", "▁a", "▁mat", "▁<MID>"]
    mistral = with_tokens(word_pieces(), (*CODESTRAL, "<s>"), lead="<s>", bos="<s>")
    canvas = maker(mistral).make({"text": "the cat<mask> sat"}, 1)
    assert spelled(mistral, canvas) == ["<s>", "[SUFFIX]", "▁sat", "[PREFIX]", "▁the", "▁cat"]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (QWEN, set(QWEN)),
        (STARCODER, set(STARCODER)),
        (CODELLAMA, set(CODELLAMA)),
        (DEEPSEEK, set(DEEPSEEK) - {"<｜begin▁of▁sentence｜>"}),
        (CODEGEMMA, set(CODEGEMMA) - {"<bos>"}),
        (CODESTRAL, set(CODESTRAL)),
    ],
)
def test_what_ends_a_hole(tokens, ends):
    tokenizer = with_tokens(byte_level(), tokens)
    names = {number: token for token, number in tokenizer.vocabulary().items()}
    assert {names[token] for token in template_of("auto", tokenizer, causal_info()).ends} == ends


def test_named_tokens_come_before_those_that_are_known():
    tokenizer = with_tokens(byte_level(), QWEN)
    named = Fim(prefix="<cls>", suffix="<sep>", middle="<pad>", order="spm", ends=("</s>",))
    canvas = maker(tokenizer, fim=named.model_dump() | {"ends": ["</s>"]}).make({"text": "a<mask>b"}, 1)
    assert spelled(tokenizer, canvas) == ["<sep>", "b", "<cls>", "a", "<pad>"]
    assert template_of(named, tokenizer, causal_info()).ends == tuple(sorted([2, 3, 4, 5]))


def test_a_tokenizer_without_the_tokens_is_refused_by_name():
    with pytest.raises(UserError, match=r"task\.fim: 'auto': .*<fim_prefix> <fim_suffix> <fim_middle> \(StarCoder"):
        template_of("auto", byte_level(), causal_info())
    with pytest.raises(UserError, match=r"task\.fim: the model's tokenizer has no token '<a>', '<e>'"):
        template_of(Fim(prefix="<a>", suffix="<sep>", middle="<pad>", ends=("<e>",)), byte_level(), causal_info())
    with pytest.raises(UserError, match=r"task\.fim: .*model\.tokenizer is 'none'"):
        template_of("auto", None, causal_info())
    # The vocabulary may be larger than the model: a token that it has no row for is none.
    with pytest.raises(UserError, match=r"task\.fim: 'auto'"):
        template_of("auto", with_tokens(byte_level(), QWEN), causal_info(vocab_size=300))


def visible(canvas: Canvas, tokenizer: Tokenizer) -> list[str]:
    assert canvas.infilling is not None
    return [tokenizer.decode(piece.tolist()) for piece in canvas.infilling.pieces]


def limits(canvas: Canvas) -> tuple[int, ...]:
    assert canvas.infilling is not None
    return canvas.infilling.limits


@pytest.mark.parametrize(
    ("mask", "columns", "values", "pieces", "wanted"),
    [
        ({"kind": "marker"}, {}, {"text": "a<mask>b<mask:3>c"}, ["a", "b", "c"], (9, 3)),
        ({"kind": "marker"}, {}, {"text": "<mask>"}, ["", ""], (9,)),
        ({"kind": "marker"}, {"prefix": "p", "suffix": "s"}, {"p": "a", "s": "b<mask>"}, ["a", "b<mask>"], (9,)),
        ({"kind": "marker"}, {"suffix": "s"}, {"s": "b"}, ["", "b"], (9,)),
        ({"kind": "lines", "count": 9}, {}, {"text": "a\n b\nc"}, ["", "\n", "\n", ""], (9, 9, 9)),
        ({"kind": "spans"}, {"spans": "w"}, {"text": "abcdef", "w": [[1, 2], [3, 5]]}, ["a", "c", "f"], (9, 9)),
        ({"kind": "spans", "count": 1, "length": 4}, {}, {"text": "wxyz"}, ["", ""], (9,)),
        ({"kind": "span_fraction", "fraction": 1.0}, {"tokens": "ids"}, {"ids": [70, 71]}, ["", ""], (9,)),
        ({"kind": "lines", "count": 1}, {}, {"text": "\n \n"}, ["\n \n"], ()),
    ],
)
def test_what_a_mask_leaves_and_how_long_a_hole_may_get(mask, columns, values, pieces, wanted):
    tokenizer = with_tokens(byte_level(), QWEN)
    make = maker(tokenizer, mask=mask, columns=columns, max_new_tokens=9)
    canvas = make.make(values, 1)
    assert visible(canvas, tokenizer) == pieces and limits(canvas) == wanted
    assert make.size(values, 1) == canvas.size and canvas.size.masked == sum(wanted)


def test_random_spans_are_those_of_the_key():
    tokenizer = with_tokens(byte_level(), QWEN)
    make = maker(tokenizer, mask={"kind": "spans", "count": 2, "length": 3})
    text = "for value in values:\n        total += value\n"
    found = {tuple(visible(make.make({"text": text}, key), tokenizer)) for key in range(8)}
    assert len(found) > 4 and all(len(pieces) == 3 for pieces in found)
    assert limits(make.make({"text": text}, 1)) == (128, 128)


@pytest.mark.parametrize(
    ("values", "kind"),
    [({"text": "no hole"}, "marker_absent"), ({"text": None}, "missing_column"), ({"text": "<mask:0>"}, "bad_mask")],
)
def test_a_row_that_does_not_fit_fails_by_name(values, kind):
    with pytest.raises(RowError) as caught:
        maker().make(values, 1)
    with pytest.raises(RowError) as planned:
        maker().size(values, 1)
    assert planned.value.kind == caught.value.kind == kind


def test_a_hole_as_large_as_the_model_is_refused():
    with pytest.raises(
        RowError, match="a hole of up to 29 tokens leaves no room for text; the model takes 32"
    ) as caught:
        maker(max_length=32, max_new_tokens=29).make({"text": "a<mask>b"}, 1)
    assert caught.value.kind == "too_long"
    assert maker(max_length=32, max_new_tokens=28).make({"text": "a<mask>b"}, 1).size.length == 32


def fill(asked_tokens: list[int], *, finish: str = "length", **counts) -> Outcome:
    found = outcome(Request(0, 0, np.zeros(0, dtype=np.int32)), 0.0)
    found.tokens, found.finish = np.array(asked_tokens, dtype=np.int32), finish
    for name, value in counts.items():
        setattr(found, name, value)
    return found


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def row_of(max_length: int | None = None) -> Infilling:
    tokenizer = with_tokens(byte_level(), QWEN)
    return Infilling(
        template_of("auto", tokenizer, causal_info()), (ids(10, 11), ids(20), ids(30, 31)), (4, 5), max_length
    )


def prompt(row: Infilling, fills: list[np.ndarray]) -> list[int]:
    template, canvas = row.template, row.ask(fills).canvas
    names = {template.prefix: -10, template.suffix: -20, template.middle: -30}
    return [names.get(token, token) for token in canvas[canvas != HOLE].tolist()]


def test_a_hole_sees_what_the_holes_before_it_were_filled_with_and_nothing_of_those_after_it():
    row = row_of()
    assert prompt(row, []) == [-10, 10, 11, -20, 20, 30, 31, -30]
    assert prompt(row, [ids(7, 8, 9)]) == [-10, 10, 11, 7, 8, 9, 20, -20, 30, 31, -30]
    assert (row.ask([]).canvas == HOLE).sum() == 4 and (row.ask([ids(7)]).canvas == HOLE).sum() == 5
    assert [part.tolist() for part in row.filled([ids(7), ids()])] == [[10, 11], [7], [20], [], [30, 31]]


def test_what_the_model_does_not_take_is_cut_from_the_far_ends():
    row = row_of(max_length=11)
    asked = row.ask([])  # 11 - 3 control tokens - 4 of the hole: 4 tokens of the 5 around it
    assert prompt(row, []) == [-10, 10, 11, -20, 20, 30, -30] and asked.cut == 1 and len(asked.canvas) == 11
    assert prompt(row, [ids(7, 8, 9)]) == [-10, 9, 20, -20, 30, -30] and row.ask([ids(7, 8, 9)]).cut == 5


@pytest.mark.parametrize(
    ("before", "after", "room", "kept"),
    [(9, 9, 10, (5, 5)), (9, 9, 9, (5, 4)), (2, 9, 9, (2, 7)), (9, 2, 9, (7, 2)), (3, 4, 9, (3, 4)), (9, 9, 1, (1, 0))],
)
def test_each_side_has_half_of_the_room_and_what_the_other_leaves(before, after, room, kept):
    front, back = cut(ids(*range(before)), ids(*range(after)), room)
    assert (len(front), len(back)) == kept
    assert front.tolist() == list(range(before))[before - kept[0] :] and back.tolist() == list(range(kept[1]))


def test_the_counts_of_all_holes_add_up():
    row = row_of()
    first = TextPart(row.ask([]), fill([7, 2], finish="eos", nfe=2, accept_hist=[0, 2], batch_rows=4.0, logprob=-1.5))
    second = TextPart(row.ask([ids(7)]), fill([8, 9, 9], nfe=6, accept_hist=[1, 0, 2], batch_rows=8.0, logprob=-2.0))
    whole = together([first, second])
    assert whole.tokens.tolist() == [7, 2, 8, 9, 9] and whole.finish == "length" and whole.logprob == -3.5
    assert (whole.nfe, whole.accept_hist, whole.batch_rows) == (8, [1, 2, 2], 7.0)
    assert first.fill.tolist() == [7] and second.fill.tolist() == [8, 9, 9]
    assert together([first, first]).finish == "eos" and whole.token_logprobs is None


def test_scores_and_steps_of_all_holes_follow_one_another():
    row = row_of()
    scored = [np.array(scores, dtype=np.float32) for scores in ([-1, -2], [-3])]
    steps = [TraceStep(0, 1, [], [7], [6]), TraceStep(1, 2, [], [2], [7])]
    first = TextPart(row.ask([]), fill([7, 2], finish="eos", nfe=2, token_logprobs=scored[0], trace=steps))
    second = TextPart(row.ask([ids(7)]), fill([8], nfe=1, token_logprobs=scored[1], trace=steps[:1]))
    whole = together([first, second])
    assert whole.token_logprobs is not None and whole.token_logprobs.tolist() == [-1, -2, -3]
    assert [(step.iteration, step.nfe) for step in whole.trace or ()] == [(0, 1), (1, 2), (2, 3)]


def test_a_row_fails_with_its_hole():
    row = row_of()
    first = TextPart(row.ask([]), fill([7], nfe=1))
    second = TextPart(row.ask([ids(7)]), fill([], nfe=2, error_kind="nan_logits", error="not finite"))
    whole = together([first, second])
    assert (whole.error_kind, whole.tokens.tolist(), whole.nfe) == ("nan_logits", [], 3)
