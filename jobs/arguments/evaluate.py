"""The options of `draftmill eval`."""

from __future__ import annotations

import argparse
from typing import Any

from draftmill.jobs.arguments.shared import Commands, driver_arguments, run_options, spec_arguments
from draftmill.jobs.harness.options import REFUSED, SEEDS, EvalOptions, documents, named, seeds
from draftmill.storage.errors import UserError


def add(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the command to `commands`."""
    command = commands.add_parser(
        "eval",
        parents=[common],
        allow_abbrev=False,
        help="run lm-evaluation-harness's tasks with a spec's model and decoder, or resume that",
    )
    spec_arguments(command)
    driver_arguments(command)
    command.add_argument("--tasks", nargs="+", required=True, metavar="T", help="names, patterns, files or folders")
    command.add_argument("--include_path", metavar="FOLDER", help="tasks of your own")
    command.add_argument("--num_fewshot", type=int, metavar="N")
    command.add_argument(
        "--limit", type=float, metavar="N", help="documents of each task, or a share below 1; for trials"
    )
    command.add_argument("--samples", metavar="JSON", help='documents of each task: {"task": [0, 5]}, or a file')
    command.add_argument("--gen_kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="override generation_kwargs")
    command.add_argument("--apply_chat_template", nargs="?", const="true", default="false", metavar="true|false")
    command.add_argument("--fewshot_as_multiturn", nargs="?", const="true", metavar="true|false")
    command.add_argument("--system_instruction", metavar="TEXT")
    command.add_argument("--seed", metavar="N", help="of Python, numpy, torch, few-shot: one or four numbers")
    command.add_argument("--confirm_run_unsafe_code", action="store_true", help="allow tasks that run generated code")
    command.add_argument("--predict_only", action="store_true", help="answers without scores")
    command.add_argument("--log_samples", action="store_true", help="has no effect: samples are always written")
    command.add_argument("--write_out", action="store_true", help="print the first prompts")
    command.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="for tasks that need some")
    for option, reason in REFUSED.items():
        command.add_argument(option, nargs="*", action=_Refused, reason=reason, help=argparse.SUPPRESS)
    command.set_defaults(command=_eval, resumes=True)


def _eval(arguments: argparse.Namespace) -> int:
    from draftmill.jobs.driving.driver import interruptible

    with interruptible():
        from draftmill.jobs.commands.evaluate import evaluate

        return evaluate(arguments.spec, arguments.set, _eval_options(arguments), run_options(arguments))


class _Refused(argparse.Action):
    """An option that is known and not supported, with the reason."""

    def __init__(self, *, reason: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]}: {self._reason}")


def _eval_options(arguments: argparse.Namespace) -> EvalOptions:
    multiturn = arguments.fewshot_as_multiturn
    return EvalOptions(
        tasks=tuple(name for given in arguments.tasks for name in given.split(",") if name),
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        samples=documents(arguments.samples),
        include_path=arguments.include_path,
        gen_kwargs=named(arguments.gen_kwargs, "--gen_kwargs"),
        apply_chat_template=_truth(arguments.apply_chat_template, "--apply_chat_template"),
        fewshot_as_multiturn=None if multiturn is None else _truth(multiturn, "--fewshot_as_multiturn"),
        system_instruction=arguments.system_instruction,
        seeds=SEEDS if arguments.seed is None else seeds(arguments.seed),
        confirm_run_unsafe_code=arguments.confirm_run_unsafe_code,
        predict_only=arguments.predict_only,
        write_out=arguments.write_out,
        metadata=named(arguments.metadata, "--metadata"),
    )


def _truth(text: str, option: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise UserError(
            f"{text!r} is not allowed; allowed: true, false (templates have no names here: the tokenizer's own is used)"
            if option == "--apply_chat_template"
            else f"{text!r} is not allowed; allowed: true, false",
            field=option,
        )
    return text.lower() == "true"
