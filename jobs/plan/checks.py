"""Checks of what will run against its model and tokenizer; each raises a UserError with the field's path."""

from __future__ import annotations

import time

from draftmill.actors.job import RowRecipe
from draftmill.actors.rows.constraints import ConstraintMaker
from draftmill.actors.rows.row_settings import RowRules, penalties_of
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Task
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.constraints.automaton import Automaton
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.settings import DECODERS
from draftmill.storage.errors import RowError, UserError


def check_constraint(recipe: RowRecipe, tokenizer: Tokenizer | None, info: ModelInfo) -> tuple[str, ...]:
    """The size of each constraint's automaton, and the time to build it; UserError if no text of this model can match one."""
    task = recipe.task
    given = getattr(task, "constraint", None)
    if given is None or tokenizer is None:
        return ()
    rules = given.values() if isinstance(given, dict) else given if isinstance(given, tuple) else [given]
    maker, lines = ConstraintMaker(tokenizer, info, recipe.ends), list[str]()
    for rule in filter(None, rules):
        try:
            began_s = time.perf_counter()
            automaton = maker.compiled(rule)
            if isinstance(automaton, Automaton):
                took = f"compiled in {time.perf_counter() - began_s:.1f} s"
                lines.append(f"{rule.shown}: {automaton.num_states:,} states, {took}")
            if isinstance(task, Complete):
                problem = Constraint((automaton,), recipe.ends).problem([task.max_new_tokens])
                if problem:
                    raise UserError(problem, field="task.max_new_tokens")
        except RowError as error:
            raise UserError(error.message.removeprefix("constraint: "), field="task.constraint") from None
    return tuple(lines)


def check_task(task: str, info: ModelInfo) -> None:
    """Raise UserError if no decoder for the model's family supports this kind of task."""
    from draftmill.decoders.backbones.families.table import FAMILIES

    kinds = {decoder.runs_on for decoder in DECODERS.values() if task in decoder.tasks}
    if info.kind not in kinds:
        families = sorted(name for name, family in FAMILIES.items() if family.kind in kinds)
        tasks = dict.fromkeys(
            name for decoder in DECODERS.values() if decoder.runs_on == info.kind for name in decoder.tasks
        )
        raise UserError(
            f"models of family {info.family!r} do not support {task!r}; tasks they support: "
            f"{', '.join(tasks) or 'none yet'}; families that support it: {', '.join(families) or 'none'}",
            field="task.kind",
        )


def length_note(task: Task, info: ModelInfo) -> str | None:
    """What to know of a completion's length: the model may take fewer tokens than the task asks for."""
    asked, most = getattr(task, "max_new_tokens", None), info.max_length
    if not isinstance(task, Complete) or most is None or asked is None or asked < most:
        return None
    return f"task.max_new_tokens is {asked:,}, but the model takes {most:,} tokens with the prompt: texts end there"


def check_recipe(recipe: RowRecipe, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
    """Raise UserError if the tokenizer has no chat template for a chat, if a stop string or an end token can never occur, or if
    sampling settings name tokens that the model does not have."""
    task = recipe.task
    if not isinstance(task, Infill) and task.chat and (tokenizer is None or tokenizer.chat is None):
        reason = "the tokenizer has no chat template (no file chat_template.jinja, and none in tokenizer_config.json)"
        raise UserError(f"{reason}; allowed: false", field="task.chat")
    if info.mask_id in recipe.ends:
        reason = (
            "is an end token of the model, and a mask is never generated; allowed: other ids, or task.ignore_eos: true"
        )
        raise UserError(f"{info.mask_id} {reason}", field="model.mask_id")
    if isinstance(task, Complete) and task.stop:
        problem = RowRules(recipe, tokenizer, info).unseen_stop(task.stop)
        if problem is not None:
            raise UserError(problem, field="task.stop")
    try:
        penalties_of(recipe.sampling, tokenizer, info.vocab_size, recipe.ends)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise UserError(problem, field=f"sampling.{key}") from None
