"""The trial that a worker makes on its device: it passes here, and finds kernels that are wrong or fail."""

import logging

import pytest
import torch

from draftmill.decoders.kernels import attention, choice, experts, notes, trial

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_work_in_the_interpreter(dtype):
    assert trial.attention_works(CPU, dtype, num_heads=3, key_heads=1, width=20)
    assert trial.experts_work(CPU, dtype)


def test_the_choice_and_the_notes_work_in_the_interpreter():
    assert trial.choice_works(CPU) and trial.notes_work(CPU)


def test_a_wrong_kernel_is_found(monkeypatch, caplog):
    plain = experts.product
    monkeypatch.setattr(experts, "product", lambda *args: plain(*args) * 1.01)
    with caplog.at_level(logging.WARNING):
        assert not trial.experts_work(CPU, torch.float32)
    assert "the kernel for experts is wrong here by up to" in caplog.text


def test_wrong_tokens_are_found(monkeypatch):
    plain = choice.choose

    def wrong(logits, warp, keys, positions):
        return plain(logits, warp, keys, positions + 1)

    monkeypatch.setattr(choice, "choose", wrong)
    assert not trial.choice_works(CPU)


@pytest.mark.parametrize("row", [0, 4])
def test_a_wrong_note_is_found(monkeypatch, caplog, row):
    plain = notes.note

    def wrong(*args, **more):
        found = plain(*args, **more)
        found[row, 3] += 0.01 if row else 1
        return found

    monkeypatch.setattr(notes, "note", wrong)
    with caplog.at_level(logging.WARNING):
        assert not trial.notes_work(CPU)
    assert "the kernel for notes is wrong here by up to" in caplog.text


def test_numbers_that_are_not_finite_are_found(monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda query, *_, **__: torch.full_like(query, torch.nan))
    assert not trial.attention_works(CPU, torch.float16, num_heads=2, key_heads=2, width=16)


def test_a_kernel_that_fails_is_not_used(monkeypatch, caplog):
    def failing(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(attention, "attend", failing)
    with caplog.at_level(logging.WARNING):
        assert not trial.attention_works(CPU, torch.float32, num_heads=2, key_heads=2, width=16)
    assert (
        "the kernel for attention fails here, torch's own operations run instead: Failed to find C compiler"
        in caplog.text
    )
