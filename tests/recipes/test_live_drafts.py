"""Live drafts: every training step carries them one Jacobi iteration further, and a resumed training has the same ones."""

import numpy as np
import pytest
import torch

from recipes import causal, distillation, live_drafts, loop
from recipes.live_drafts import LiveDrafts
from recipes.packing import IDS, Trajectory

SMALL = causal.Shape(32, 1, 2, 1, 64, vocab_size=24)
N, VERSIONS = 4, 2


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the loop below says the same tokens."""
    monkeypatch.setattr(loop, "autocast", lambda device: torch.enable_grad())


def greedy(model: torch.nn.Module, prompt: IDS, count: int) -> IDS:
    line = prompt.tolist()
    for _ in range(count):
        line.append(int(model(input_ids=torch.tensor([line])).logits[0, -1].argmax()))
    return np.array(line[len(prompt) :])


@torch.no_grad()
def some_texts(model: torch.nn.Module, count: int = 4) -> list[Trajectory]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(9, 24, size) for size in rng.integers(3, 9, count)]
    return live_drafts.texts(prompts, [greedy(model, prompt, 3 * N + 2) for prompt in prompts], N)


def trainer_of(texts: list[Trajectory], model: torch.nn.Module, steps: int = 10) -> distillation.LiveTrainer:
    plan = distillation.Plan(
        steps=steps, lengths=(16,), length_shares=(1.0,), warmup=2, versions=VERSIONS, window=1, text_weight=0.0
    )
    drafts = LiveDrafts(texts, N, VERSIONS, seed=0)
    text, source = np.arange(100) % 24, causal.new_model(SMALL, 7)
    return distillation.LiveTrainer(model, plan, drafts, text, source, device=torch.device("cpu"), most_rows=10**6)  # type: ignore[arg-type]


def test_whole_blocks_of_a_completion_are_the_fixed_points():
    (text,) = live_drafts.texts([np.array([7])], [np.arange(1, 10)], N)
    assert [block.tolist() for block in text.blocks] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]


def test_the_first_drafts_are_right_tokens_and_then_tokens_of_the_prompt():
    texts = some_texts(causal.new_model(SMALL, 0))
    drafts = LiveDrafts(texts, N, VERSIONS, seed=0)
    assert drafts.drafts.shape == (4, VERSIONS, 3 * N)
    for number, text in enumerate(texts):
        for version in drafts.versions(number):
            for block, states in zip(version, text.blocks, strict=True):
                wrong = np.flatnonzero(block != states[-1])
                assert set(block[wrong[0] :] if len(wrong) else []) <= {*text.prompt, *states[-1]}


def test_a_step_is_one_jacobi_iteration_of_the_model_on_the_finished_text_before_each_block():
    model = causal.new_model(SMALL, 0)
    texts = some_texts(model)
    trainer = trainer_of(texts, model)
    for step in range(5):
        before = trainer.drafts.drafts.copy()
        _, tokens = trainer.trajectory_losses(step)
        assert tokens > 0
        for number in range(len(texts)):
            for version in range(VERSIONS):
                check_iteration(model, texts[number], before[number, version], trainer.drafts.drafts[number, version])


@torch.no_grad()
def check_iteration(model: torch.nn.Module, text: Trajectory, before: IDS, after: IDS) -> None:
    """Every block of `after` is what a plain Jacobi iteration makes of `before`; or the text was not drawn, or starts again."""
    if (before == after).all():
        return
    final = np.concatenate([states[-1] for states in text.blocks])
    for start in range(0, len(final), N):
        draft, right = before[start : start + N].tolist(), final[start : start + N].tolist()
        line = [*text.prompt.tolist(), *final[:start].tolist()]
        says = model(input_ids=torch.tensor([line + draft])).logits[0].argmax(-1)[len(line) - 1 :].tolist()
        wrong = next((i for i in range(N) if draft[i] != right[i]), N)
        expected = [right[i] if i <= wrong else says[i] for i in range(N)]
        if expected == right:
            assert set(after[start : start + N]) <= set(text.prompt)
        else:
            assert after[start : start + N].tolist() == expected


def test_a_resumed_training_has_the_drafts_and_losses_of_one_that_was_not_stopped(tmp_path):
    texts = some_texts(causal.new_model(SMALL, 0))
    whole, first = (trainer_of(texts, causal.new_model(SMALL, 3)) for _ in range(2))
    losses = [whole.advance() for _ in range(8)]
    for _ in range(4):
        first.advance()
    first.save(tmp_path)
    second = trainer_of(texts, causal.new_model(SMALL, 3))
    assert second.restore(tmp_path)
    assert [second.advance() for _ in range(4)] == losses[4:]
    assert (second.drafts.drafts == whole.drafts.drafts).all()


def test_a_step_takes_texts_of_like_length_up_to_its_rows():
    model = causal.new_model(SMALL, 0)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(9, 24, size) for size in range(4, 44)]
    texts = live_drafts.texts(prompts, [rng.integers(9, 24, 2 * N) for _ in prompts], N)
    trainer = trainer_of(texts, model)
    trainer.most_rows = 120
    for step in range(20):
        numbers = trainer._neighbours(np.random.default_rng(step))
        lengths = [len(prompts[number]) for number in numbers]
        assert len(set(numbers)) == len(numbers) and max(lengths) == lengths[0]
        assert len(numbers) * (lengths[0] + (1 + VERSIONS) * 2 * N) <= 120 or len(numbers) == 1
        assert max(lengths) - min(lengths) <= 4 * len(numbers)
