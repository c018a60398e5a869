"""The section `notify` of a spec: commands that are notified that a run has ended or stalls. It holds no secrets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from draftmill.actors.task import as_tuple
from draftmill.decoders.common_settings import Settings
from draftmill.storage.secrets import has_authorization, redacted

Event = Literal["finish", "failure", "stall", "interrupt"]


def _one_or_more(value: Any) -> Any:
    """One word, or a list of them, as a tuple."""
    return (value,) if isinstance(value, str) else as_tuple(value)


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if redacted(word) != word or has_authorization(word):
            raise ValueError(
                "no credentials in the spec, which is copied into the run directory; the command has the driver's environment"
            )
    return words


class NotifySettings(Settings):
    """One receiver of notices."""

    command: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...]),
        Field(min_length=1),
        AfterValidator(_command),
    ] = Field(description="a command and its arguments; it reads the notice from standard input")
    on: Annotated[
        tuple[Event, ...],
        BeforeValidator(_one_or_more, json_schema_input_type=Event | tuple[Event, ...]),
        Field(min_length=1),
    ] = Field(default=("finish", "failure", "stall"), description="the events of which it is notified")


def as_receivers(value: Any) -> Any:
    """One receiver, or a list of them, as a tuple."""
    return (value,) if isinstance(value, dict) else as_tuple(value)


Receivers = Annotated[
    tuple[NotifySettings, ...],
    BeforeValidator(as_receivers, json_schema_input_type=NotifySettings | tuple[NotifySettings, ...]),
]
