"""Graphs on a CPU: what was captured is done again by the same Python code, with the same tensors for input and output.

As with a CUDA graph, nothing that the first forward knew on the host may differ in a later one: a number that was not sent gives
another result here too. References stand in for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmill.decoders.engine.graphs import Work
from draftmill.decoders.kernels import attention_reference, choice_reference, notes_reference


class Replaying:
    """Repeats the work, and counts what it captured."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, work: Callable[[], Work]) -> tuple[Callable[[], None], Work]:
        """See draftmill.decoders.engine.graphs.Recorder."""
        self.num_captured += 1
        found = work()

        def replay() -> None:
            again = work()
            assert again.num_computed == found.num_computed
            found.hidden_ND.copy_(again.hidden_ND)
            found.record.copy_(again.record)

        return replay, found


def use_references(monkeypatch: Any) -> None:
    """Let models and draws use the references of the kernels, as they use the kernels on a GPU."""
    for module in ("transformer", "xlnet"):
        monkeypatch.setattr(
            f"draftmill.decoders.backbones.{module}.find_attention", lambda *_, **__: attention_reference.attend
        )
    monkeypatch.setattr("draftmill.decoders.engine.answers.find_choice", lambda *_: choice_reference)
    for module in ("named_answers", "picks"):
        monkeypatch.setattr(f"draftmill.decoders.engine.{module}.find_notes", lambda *_: notes_reference.note)


def use_graphs(monkeypatch: Any) -> Replaying:
    """Capture and replay on this CPU, or on a pretended GPU."""
    use_references(monkeypatch)
    recorder = Replaying()
    monkeypatch.setattr("draftmill.decoders.engine.graphs.find_recorder", lambda device: recorder)
    return recorder
