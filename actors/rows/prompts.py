"""Makes the prompts of rows by a spec's `prompt:`: a template over their columns, a system message, and examples.

    columns --template--> a text: the prompt of complete and score, the text with its holes of infill
    conversation:  system | example | answer | example | answer | the row's own messages

A template sees its row's columns by name, any name as `row['NAME']`, and the examples as `examples`. It is rendered as chat
templates are (chat.py), within the same limits. A column that the row lacks is an error, and so is a null that is printed: a
prompt with "None" in it would be found too late. Pure: no files, no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Const, Getattr, Getitem, Name, Node

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.chat import LimitedEnvironment, environment
from draftmill.actors.rows.row import Messages, Values, check_text, missing, prompt_of, string_of
from draftmill.actors.task import Columns, Infill, Score
from draftmill.storage.errors import RowError, UserError, list_names
from draftmill.storage.inputs.kept import plain

FIELD: Final = "prompt.template"
TEXT: Final = FIELD
"""The column in which a row's rendered text is put; errors name it."""

ROW, EXAMPLES = "row", "examples"
"""Names of a template that are no columns."""

SYSTEM_ROLES: Final = ("system", "developer")


class PrintsNull(TemplateError):
    """A template prints a null."""


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise PrintsNull
    return value


@lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """A template of prompts."""
    made = environment(undefined=StrictUndefined)
    count = made.finalize
    assert count is not None, "LimitedEnvironment counts what is printed"
    made.finalize = lambda value: count(_refuse_null(value))
    return made.from_string(source)


@lru_cache(maxsize=64)
def columns_of(source: str) -> tuple[str, ...]:
    """The names that a template reads, sorted. ValueError if it is no template, or if they can't be known."""
    try:
        tree = environment().parse(source)
        names = find_undeclared_variables(tree)
        compiled(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    if ROW in names:
        names = names - {ROW} | _items_of_row(tree)
    return tuple(sorted(names - environment().globals.keys()))


def _items_of_row(tree: Node) -> set[str]:
    """The columns that a template reads as `row['NAME']` or `row.NAME`; ValueError if it uses `row` in another way."""
    inner = [node for node in tree.find_all((Getattr, Getitem)) if isinstance(node, Getattr | Getitem)]
    named = [node for node in inner if isinstance(node.node, Name) and node.node.name == ROW]
    items = [node.attr if isinstance(node, Getattr) else node.arg for node in named]
    values = [item.value if isinstance(item, Const) else item for item in items]
    names = {value for value in values if isinstance(value, str)}
    if len(values) < sum(node.name == ROW for node in tree.find_all(Name)) or len(names) < len(set(values)):
        raise ValueError(f"{ROW} stands for the whole row, of which only named columns are read; write {ROW}['NAME']")
    return names


def read_columns(recipe: RowRecipe) -> dict[str, str]:
    """The columns to read of each row, as readers take them: those of the task, and those of the template."""
    own = () if recipe.prompt.template is None else columns_of(recipe.prompt.template)
    return recipe.columns.to_read(recipe.task) | {f"{FIELD}.{name}": name for name in own}


def render(source: str, values: Values, examples: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The text of a row by a template; RowError `missing_column` if the row lacks a column, `bad_template` for other errors.

    Values are in JSON form: times are ISO 8601, and NaN is null.
    """
    row = {name: plain(values[name]) for name in columns_of(source) if name in values}
    template = compiled(source)
    assert isinstance(template.environment, LimitedEnvironment)
    template.environment.start()
    more = {} if examples is None else {EXAMPLES: examples}
    try:
        return check_text(template.render({ROW: row} | row | more), TEXT)
    except PrintsNull:
        nulls = list_names(name for name, value in row.items() if value is None)
        raise _missing(
            f"a null is printed; null columns: {nulls}; `default('', true)` prints nothing for a null"
        ) from None
    except UndefinedError as error:
        raise _missing(f"{error.message}; the row has {list_names(values)}") from None
    except RowError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        raise RowError("bad_template", "read", f"{FIELD}: {type(error).__name__}: {error}"[:1000]) from None


def _missing(message: str) -> RowError:
    return RowError("missing_column", "read", f"{FIELD}: {message}"[:1000])


@dataclass(frozen=True, slots=True)
class Prompter:
    """Makes prompts by a recipe, whose examples are `turns` of a chat, or `examples` of a template."""

    recipe: RowRecipe
    turns: Sequence[dict[str, Any]] = ()
    examples: Sequence[dict[str, Any]] | None = None

    def fill(self, values: Values) -> Values:
        """The row with the template's text in the column TEXT, if there is a template; RowError if it can't be rendered."""
        template = self.recipe.prompt.template
        return values if template is None else {**values, TEXT: render(template, values, self.examples)}

    def surround(self, messages: Messages, values: Values) -> Messages:
        """A conversation with the system message and the examples before it.

        The row's column of system texts comes before the conversation's own system message, and this before the spec's.
        """
        has_own = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
        head, rest = messages[: int(has_own)], messages[int(has_own) :]
        column, text = self.recipe.columns.system, None if has_own else self.recipe.prompt.system
        if column is not None and column not in values:
            raise missing(values, column)
        if column is not None and values[column] not in (None, ""):
            text = string_of(values, column)
        if text is not None:
            head = [{"role": "system", "content": text}]
        return [*head, *self.turns, *rest]


def prompter_of(recipe: RowRecipe) -> Prompter:
    """The prompter of a job, whose examples have been read. UserError if an example can't be a turn of the chat."""
    given = recipe.prompt.examples
    if given is None:
        return Prompter(recipe)
    assert given.rows is not None, "examples are read before any row"
    rows = [plain(row) for row in given.rows]
    if given.answer is None:
        return Prompter(recipe, examples=rows)
    return Prompter(recipe, turns=_turns(recipe, rows, given.answer))


def own_columns(recipe: RowRecipe) -> Columns:
    """The columns that a task reads of a row that was filled: the template's text takes the place of a prompt or a text."""
    task = recipe.task
    if recipe.prompt.template is None:
        return recipe.columns
    gives_text = isinstance(task, Infill) or (isinstance(task, Score) and task.mask is not None)
    return recipe.columns.model_copy(update={"text" if gives_text else "prompt": TEXT})


def _turns(recipe: RowRecipe, rows: Sequence[Values], answer: str) -> Messages:
    task, template, turns = recipe.task, recipe.prompt.template, Messages()
    assert not isinstance(task, Infill), "no conversation without a chat"
    for number, row in enumerate(rows, start=1):
        try:
            own = None if template is None else render(template, row)
            asked = prompt_of(row, recipe.columns, task, chat=False) if own is None else own
            answered = string_of(row, answer)
        except RowError as error:
            raise UserError(f"example {number}: {error.message}", field="prompt.examples") from None
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return turns
