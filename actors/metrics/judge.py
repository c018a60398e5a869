"""Judges: the log-probability of each text under another causal model, batched by the scorer of `task: score`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftmill.actors.checkpoints.models import fetch_model
from draftmill.actors.faults import lost_device
from draftmill.actors.job import ModelPlace
from draftmill.actors.loop.loading import build, load_networks
from draftmill.actors.loop.memory import fit
from draftmill.actors.metrics.base import MeasuredRow, Stopping, Values
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.text import load_tokenizer
from draftmill.actors.task import Columns, Score
from draftmill.decoders.base import Decoder, Outcome, Request
from draftmill.decoders.causal.settings import AutoregressiveSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.storage.errors import RowError
from draftmill.storage.stores.interface import S3Options


@dataclass(slots=True)
class JudgeMeter:
    """A judge that is loaded: `prompt` is the kept column that stands before the text, if any."""

    decoder: Decoder
    maker: Maker
    prompt: str | None

    def measure(self, rows: Sequence[MeasuredRow], stopping: Callable[[], bool]) -> list[Values | Exception | None]:
        answers: list[Values | Exception | None] = [None] * len(rows)
        waiting: list[Request] = []
        for index, row in enumerate(rows):
            if row.text is None:
                continue
            try:
                canvas = self._canvas(row)
            except Exception as error:  # noqa: BLE001 - tokenizers raise bare exceptions; the error is this row's alone
                answers[index] = error
                continue
            waiting.append(Request(index, 0, canvas.tokens, score_from=canvas.score_from))
        waiting.sort(key=lambda request: (-len(request.canvas), request.index))
        for index, answer in self._answers(deque(waiting), stopping).items():
            answers[index] = answer
        return answers

    def _canvas(self, row: MeasuredRow) -> Canvas:
        values: dict[str, object] = {"completion": row.text}
        if self.prompt is not None:
            values["prompt"] = row.values.get(self.prompt)
        return self.maker.make(values, 0)

    def _answers(self, waiting: deque[Request], stopping: Callable[[], bool]) -> dict[int, Values | Exception]:
        """Score all requests, longest first; the decoder is empty before and after.

        Where the decoder raises, its texts are scored again one by one: the one that fails alone has the error.
        """
        found: dict[int, Values | Exception] = {}
        active: dict[int, Request] = {}
        suspects: deque[Request] = deque()
        while waiting or active or suspects:
            if stopping():
                self.decoder.clear()
                raise Stopping
            try:
                self._admit(suspects, waiting, active)
                outcomes = self.decoder.step()
            except Exception as error:
                self.decoder.clear()
                if lost_device(error) or not active:
                    raise
                if len(active) == 1:
                    found |= dict.fromkeys(active, error)
                else:
                    suspects.extend(active.values())
                active.clear()
                continue
            for outcome in outcomes:
                active.pop(outcome.index)
                found[outcome.index] = _values(outcome)
        return found

    def _admit(self, suspects: deque[Request], waiting: deque[Request], active: dict[int, Request]) -> None:
        """Fill the decoder; a suspect gets it alone."""
        if suspects:
            if not active:
                self._give([suspects.popleft()], active)
            return
        while waiting and (room := self._room(len(waiting[0].canvas))):
            self._give([waiting.popleft() for _ in range(min(room, len(waiting)))], active)

    def _give(self, requests: list[Request], active: dict[int, Request]) -> None:
        active |= {request.index: request for request in requests}
        self.decoder.admit(requests)

    def _room(self, length: int) -> int:
        return max(self.decoder.room(length), 0 if self.decoder.active else 1)


def _values(outcome: Outcome) -> Values | Exception:
    if outcome.error_kind is not None or outcome.logprob is None:
        return RowError(outcome.error_kind or "decode_error", "decode", outcome.error or "the judge gave no score")
    count = len(outcome.tokens)
    return outcome.logprob, math.exp(min(-outcome.logprob / count, 700.0)), float(count)


def load_judge(place: ModelPlace, *, prompt: str | None, max_rows: int, threads: int, s3: S3Options) -> JudgeMeter:
    """Load a judge. Raises UserError or ValueError if the model can't be loaded or is not causal."""
    import torch

    from draftmill.decoders.backbones.checkpoint import inspect_model

    torch.set_num_threads(threads)
    folder = fetch_model(place.path, revision=place.revision, s3=s3)
    info, task, decoder = inspect_model(folder), Score(kind="score"), AutoregressiveSettings(kind="autoregressive")
    networks = load_networks(folder, place, decoder, s3)
    max_tokens = max_rows * (512 if networks.backbone.device.type == "cpu" else 2048)
    scorer = build(networks, info, task, decoder, Sampling(), stops=None, max_rows=max_rows, max_tokens=max_tokens)
    fit(scorer, threads=threads)
    tokenizer = load_tokenizer(folder, place.tokenizer)
    columns = Columns(completion="completion", prompt=None if prompt is None else "prompt")
    maker = maker_for(task, columns, tokenizer, info, decoder=decoder, sampling=Sampling())
    return JudgeMeter(scorer, maker, prompt)
