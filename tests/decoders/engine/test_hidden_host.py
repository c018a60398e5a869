"""A forward that starts before the one before it is read: the same texts and counts, and no wait while the device has nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.base import Outcome, Request, RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.engine import Engine, Running
from draftmill.decoders.engine.penalties import Penalties
from tests.decoders.engine.test_broken_numbers import ANY, BROKEN, CAUSAL, broken_model, engine_of, request
from tests.decoders.engine.test_chunks import given
from tests.decoders.engine.test_prefix_cache import CASES, made, model, said
from tests.decoders.support import decoder_settings, engine, run_all, texts

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU; whether a forward was started between that of each record and its reading."""
    found, launched = list[bool](), list[Running]()
    launch, settle = Engine._launch, Engine._settle

    def noted(engine: Engine, turn: Any) -> Running:
        launched.append(launch(engine, turn))
        return launched[-1]

    def read(engine: Engine, running: Running) -> Any:
        found.append(running is not launched[-1])
        return settle(engine, running)

    monkeypatch.setattr("draftmill.decoders.engine.engine.hides_host", lambda backbone: True)
    monkeypatch.setattr(Engine, "_launch", noted)
    monkeypatch.setattr(Engine, "_settle", read)
    yield found


def both_ways(name: str, requests: list[Request], budget: int | None) -> tuple[Any, dict[int, Outcome], Any]:
    """The decoder whose host is hidden, its outcomes, and the same without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftmill.decoders.engine.engine.hides_host", lambda backbone: False)
        plain = made(name, 4, budget)
    expected, decoder = run_all(plain, requests), made(name, 4, budget)
    return decoder, run_all(decoder, requests), (plain, expected)


@pytest.mark.parametrize("budget", [None, 3, 64])
@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_a_hidden_host_changes_no_text_and_no_count(name, budget, hidden):
    requests = [
        replace(one, settings=RowSettings(token_logprobs=True, top_logprobs=one.index % 3)) for one in given(name)
    ]
    decoder, found, (plain, expected) = both_ways(name, requests, budget)
    assert said(found) == said(expected)
    for index, outcome in expected.items():
        assert found[index].top_logprobs == outcome.top_logprobs
        assert found[index].token_logprobs.tolist() == outcome.token_logprobs.tolist()  # type: ignore[union-attr]
    ours, theirs = decoder.stats, plain.stats
    assert (ours.committed, ours.prompt_rows) == (theirs.committed, theirs.prompt_rows)
    # Another row of a prompt may be shared where others' prompts come in other steps.
    assert ours.useful_rows + ours.prompt_rows_shared == theirs.useful_rows + theirs.prompt_rows_shared
    assert decoder._running is None and decoder.active == 0
    reads = hidden[len(hidden) - decoder.stats.steps :]
    assert sum(reads) >= 0.9 * len(reads) - 1, "the last record has nothing behind it"


def test_a_stop_ends_a_text_where_it_stands_and_its_next_row_is_dropped(hidden):
    first = run_all(made("autoregressive", 4, 3), given("autoregressive"))
    stops = {index: int(outcome.tokens[2]) for index, outcome in first.items()}
    requests = [replace(one, settings=RowSettings(stop_ids=(stops[one.index],))) for one in given("autoregressive")]
    decoder, found, (plain, expected) = both_ways("autoregressive", requests, 3)
    assert said(found) == said(expected) and {len(one.tokens) for one in found.values()} <= {1, 2, 3}
    ours, theirs = decoder.stats, plain.stats
    assert ours.useful_rows + ours.prompt_rows_shared == theirs.useful_rows + theirs.prompt_rows_shared
    assert ours.computed_rows > ours.useful_rows, "the rows that were dropped"


@pytest.mark.parametrize("settings", [RowSettings(penalties=Penalties(frequency=1.5)), RowSettings(temperature=0.0)])
def test_a_row_whose_logits_depend_on_its_text_is_read_first(settings, hidden):
    requests = [replace(one, settings=settings) if one.index % 5 == 2 else one for one in given("autoregressive")]
    decoder, found, (_, expected) = both_ways("autoregressive", requests, 7)
    assert said(found) == said(expected)
    reads = hidden[len(hidden) - decoder.stats.steps :]
    assert (False in reads[:-1]) == (settings.penalties is not None)


@pytest.mark.parametrize(("name", "settings"), [("ar-tiny", CAUSAL), ("asarm-tiny", ANY)])
def test_a_sample_with_nan_ends_alone_while_its_next_row_runs(name, settings, hidden):
    bad = [request(index, BROKEN - 3, 24, 12) for index in range(2)]
    good = [request(2 + index, 200 + 20 * index, 20, 6) for index in range(4)]
    found = run_all(engine_of(*broken_model(name), settings, sampling=GREEDY), [good[0], *bad, *good[1:]])
    assert [found[one.index].error_kind for one in bad] == ["nan_logits"] * 2
    assert [found[one.index].error_kind for one in good] == [None] * 4
    assert texts({one.index: found[one.index] for one in good}) == texts(
        run_all(engine_of(*broken_model(name), settings, sampling=GREEDY), good)
    )


def test_a_cleared_engine_forgets_the_forward_that_runs(hidden):
    decoder, requests = made("autoregressive", 4, 3), given("autoregressive")
    expected = said(run_all(made("autoregressive", 4, 3), requests))
    decoder.admit(requests[:4])
    for _ in range(9):
        decoder.step()
    assert decoder._running is not None
    assert sorted(decoder.clear()) == [0, 1, 2, 3]
    assert said(run_all(decoder, requests)) == expected


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_a_choice_waits_until_no_forward_runs_that_was_formed_without_it(name, hidden, monkeypatch):
    folder = CASES[name][0]
    decoder = engine(
        *model(folder),
        decoder_settings("fastest", like=name),
        Sampling(temperature=0.9),
        rows=4,
        max_tokens=1 << 16,
        stops=Stops() if folder != "asarm-tiny" else None,
        trace=True,
        prompt_rows=7,
    )
    rng, auto = np.random.default_rng(0), decoder.algorithm.auto
    choices = len(auto.lengths)

    def choose(*_: Any) -> None:
        if rng.random() < 0.3:
            auto._use(0 if rng.random() < 0.6 else int(rng.integers(choices)))

    monkeypatch.setattr(AutoLength, "note_step", choose)
    requests = given(name)
    expected, found = run_all(made(name, 4), requests), run_all(decoder, requests)
    assert texts(found) == texts(expected)
    for index, one in found.items():
        assert one.logprob == pytest.approx(expected[index].logprob, rel=1e-5)
        assert sum(count * times for count, times in enumerate(one.accept_hist)) == len(one.tokens)
        # What a trace shows as proposed was verified: as many as the counts say.
        assert sum(len(step.proposed) for step in one.trace or []) == one.proposed >= one.accepted
    assert sum(one.proposed for one in found.values()) > 0
    reads = hidden[len(hidden) - decoder.stats.steps :]
    assert {True, False} <= set(reads[:-1])
