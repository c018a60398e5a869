"""Progressive consistency distillation: the packed sequence, its mask and the loss against the public code, and the rounds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes import ar, causal, consistency, corpus, distillation, jacobi_report, loop, packing, trajectories
from recipes.packing import Trajectory

BUILTIN = Path(__file__).resolve().parents[2] / "decoders" / "builtin"
SMALL = causal.Shape(32, 1, 2, 1, 64, vocab_size=24)


def public_cases(golden: Path, kind: str) -> dict:
    cases = json.loads((golden / "jacobi" / "train_cases.json").read_text())["cases"]
    return {case["name"]: case for case in cases if case["kind"] == kind}


def trajectory_of(case: dict) -> Trajectory:
    return Trajectory(np.array(case["prompt_ids"]), [np.array(states) for states in case["trajectories"]])


def packed_case(golden: Path) -> packing.Packed:
    case = public_cases(golden, "train_prepare")["prep.window"]
    trajectory = trajectory_of(case)
    chosen = [states[i] for states, i in zip(trajectory.blocks, case["chosen_traj_index"], strict=True)]
    return packing.pack(trajectory, chosen)


def test_states_are_chosen_and_packed_as_in_the_public_code(golden):
    case = public_cases(golden, "train_prepare")["prep.window"]
    trajectory = trajectory_of(case)
    noisy = packing.noisy_states(trajectory.blocks, np.linspace(0, 1, case["window"]))
    packed = packing.pack(trajectory, noisy)
    assert packed.ids.tolist() == case["complete_training_sequence_ids"]
    assert packed.ids.tolist() == packed_case(golden).ids.tolist()
    layout = public_cases(golden, "train_layout")["train.w4"]
    assert packed.positions.tolist() == layout["position_ids"]


@pytest.mark.parametrize(("name", "window"), [("train.w4", 4), ("train.w2", 2), ("train.nowindow", None)])
def test_the_mask_is_the_public_codes(golden, name, window):
    expected = load_file(golden / "jacobi" / "arrays.safetensors")[f"{name}.mask"]
    batch = packing.collate([packed_case(golden)], window)
    assert torch.equal(batch.visible[0], expected)


@pytest.mark.parametrize(("name", "window"), [("train.w4", 4), ("train.w2", 2)])
def test_both_losses_are_the_public_codes(golden, name, window, monkeypatch):
    case = public_cases(golden, "train_layout")[name]
    logits = load_file(golden / "jacobi" / "arrays.safetensors")[f"{name}.logits"]
    batch = packing.collate([packed_case(golden)], window)
    assert batch.student.tolist() == case["student_positions"]
    assert batch.teacher.tolist() == case["teacher_positions"]
    assert batch.inputs.tolist() == case["ar_logit_positions"]
    assert batch.targets.tolist() == case["ar_targets"]
    monkeypatch.setattr(loop, "autocast", lambda device: torch.enable_grad())
    model = causal.load_model(golden / "jacobi", torch.device("cpu"))
    rows = model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask={"full_attention": batch.visible.unsqueeze(1)},
    ).logits
    torch.testing.assert_close(rows.double(), logits, atol=2e-4, rtol=1e-4)
    found = distillation.losses(model, batch)
    assert found.consistency.item() / case["T"] == pytest.approx(case["consistency_loss"], rel=1e-4)  # theirs is over T
    assert found.clean.item() == pytest.approx(case["ar_loss"], rel=1e-4)


def random_trajectory(rng: np.random.Generator, num_prompt: int, num_blocks: int, n: int = 4) -> Trajectory:
    blocks = []
    for _ in range(num_blocks):
        final = rng.integers(9, 24, n)
        states = [np.where(np.arange(n) < kept, final, rng.integers(9, 24, n)) for kept in range(n + 1)]
        blocks.append(np.stack(states))
    return Trajectory(rng.integers(9, 24, num_prompt), blocks)


def test_noise_is_the_share_from_the_first_difference_on():
    states = np.array([[1, 2, 9, 4], [9, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]])
    assert packing.noise(states).tolist() == [0.5, 1.0, 0.25, 0.0]
    assert packing.progressive_ratios(4).tolist() == [0.0, 0.25, 0.5, 0.75]
    chosen = packing.noisy_states([states] * 4, packing.progressive_ratios(4), offset=1)
    assert [row.tolist() for row in chosen] == [states[i].tolist() for i in (2, 0, 0, 3)]


def test_a_padded_sample_of_a_batch_has_the_logits_it_has_alone():
    rng = np.random.default_rng(0)
    samples = [random_trajectory(rng, 5, 3), random_trajectory(rng, 3, 1)]
    packed = [packing.pack(one, packing.noisy_states(one.blocks, packing.progressive_ratios(4))) for one in samples]
    model = causal.new_model(SMALL, 0)
    together, alone = packing.collate(packed, None), packing.collate(packed[1:], None)

    def logits(batch: packing.Batch) -> torch.Tensor:
        mask = {"full_attention": batch.visible.unsqueeze(1)}
        return model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask).logits

    with torch.no_grad():
        both, one = logits(together), logits(alone)
    assert both.isfinite().all()
    torch.testing.assert_close(both[1:, : one.shape[1]], one)
    length = together.ids.shape[1]
    for rows in ("student", "teacher", "inputs"):
        mine = getattr(together, rows)
        assert (mine[mine >= length] - length).tolist() == getattr(alone, rows).tolist()


def test_versions_of_one_sample_do_not_see_each_other():
    rng = np.random.default_rng(3)
    trajectory = random_trajectory(rng, 4, 3)
    versions = [packing.noisy_states(trajectory.blocks, packing.progressive_ratios(4), offset) for offset in (1, 2)]
    model = causal.new_model(SMALL, 0)

    def student_logits(*chosen: list[packing.IDS]) -> list[torch.Tensor]:
        packed = packing.pack(trajectory, *chosen)
        batch = packing.collate([packed], 2)
        mask = {"full_attention": batch.visible.unsqueeze(1)}
        with torch.no_grad():
            logits = model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask).logits[0]
        of_version = [batch.student[torch.from_numpy(packed.version)[batch.student] == v] for v in range(len(chosen))]
        assert (batch.positions[0, batch.student] == batch.positions[0, batch.teacher]).all()
        return [logits[rows] for rows in of_version]

    both = student_logits(*versions)
    for number, version in enumerate(versions):
        torch.testing.assert_close(both[number], student_logits(version)[0])


def trainer_of(trajectories: list[Trajectory], steps: int, seed: int = 0) -> distillation.Trainer:
    plan = distillation.Plan(
        steps=steps, seed=seed, lengths=(16,), length_shares=(1.0,), warmup=2, learning_rate=5e-3, ratios=4
    )
    text = np.random.default_rng(5).integers(9, 24, 400)
    source = causal.new_model(SMALL, 7)
    return distillation.Trainer(
        causal.new_model(SMALL, seed), plan, trajectories, text, source, device=torch.device("cpu")
    )


@pytest.mark.slow
def test_distillation_is_deterministic_and_brings_noisy_rows_to_the_fixed_point():
    rng = np.random.default_rng(2)
    trajectories = [random_trajectory(rng, 4, 3) for _ in range(3)]
    trainer, again = trainer_of(trajectories, 40), trainer_of(trajectories, 40)
    assert [trainer.advance() for _ in range(40)] == [again.advance() for _ in range(40)]
    held = trainer.batch(1000)
    with torch.no_grad():
        before = distillation.losses(trainer_of(trajectories, 1).model, held)
        after = distillation.losses(trainer.model, held)
    assert after.consistency < before.consistency - 0.3
    assert after.clean < before.clean - 0.3


def traced(
    final: list[int], num_prompt: int, drafts: list[list[int]], commits: list[int]
) -> list[tuple[int, list[int]]]:
    """Each iteration's first position and draft, from what was committed before it."""
    starts = np.concatenate([[num_prompt], num_prompt + np.cumsum(commits)])
    return [(int(start), draft) for start, draft in zip(starts, drafts, strict=False)]


def test_block_states_are_rebuilt_from_the_drafts_of_every_iteration():
    # Prompt 1 2; blocks of three; the first forward after (3 4 5) commits the seed of the next block with it.
    final = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9])
    drafts = traced(final.tolist(), 2, [[0, 0, 5], [4, 0], [0, 0], [8]], [1, 3, 1, 2])
    blocks = trajectories.blocks_of(final, 2, drafts)
    assert [block.tolist() for block in blocks] == [
        [[0, 0, 5], [3, 4, 0], [3, 4, 5]],
        [[6, 0, 0], [6, 7, 8]],
    ]


def test_a_block_that_the_completion_ends_in_is_cut_and_an_empty_draft_is_none():
    final = np.array([1, 3, 4, 5])
    blocks = trajectories.blocks_of(final, 1, [(1, [3, 0, 0, 9]), (3, [9, 9]), (3, [])])
    assert [block.tolist() for block in blocks] == [[[3, 0, 0], [3, 4, 9], [3, 4, 5]]]


def test_rounds_are_named_by_block_size_and_noise_ratios():
    assert consistency.rounds("16:16,32:live") == [consistency.Round(16, 16), consistency.Round(32, None)]


def test_a_row_is_weighed_by_its_distance_from_the_divergence():
    states = np.array([[1, 9, 9, 4], [9, 9, 9, 9], [1, 2, 3, 4]])
    packed = packing.pack(Trajectory(np.array([5, 6]), [states]), [states[0]], [states[1]])
    batch = packing.collate([packed], None)
    assert batch.positions[0, batch.student].tolist() == [3, 4, 5, 2, 3, 4, 5]
    assert batch.depth.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_fading_sharpening_and_the_sources_law_are_what_they_say():
    rng = np.random.default_rng(4)
    samples = [random_trajectory(rng, 5, 2), random_trajectory(rng, 3, 2)]
    packed = [packing.pack(one, [states[1] for states in one.blocks]) for one in samples]
    batch, model, source = packing.collate(packed, None), causal.new_model(SMALL, 0), causal.new_model(SMALL, 1)
    with torch.no_grad():
        found = distillation.losses(model, batch, fade=0.5, sharp=0.25, source=source)
        mask = {"full_attention": batch.visible.unsqueeze(1)}
        logits = model(input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask).logits.flatten(0, 1)
        total = weight = 0.0
        for student, teacher, depth in zip(batch.student, batch.teacher, batch.depth.tolist(), strict=True):
            law = logits[teacher].softmax(-1) * 0.75
            law[logits[teacher].argmax()] += 0.25
            total -= 0.5**depth * float((law * logits[student].log_softmax(-1)).sum())
            weight += 0.5**depth
        clean = []
        for number, one in enumerate(samples):
            line = torch.from_numpy(np.concatenate([one.prompt, *(states[-1] for states in one.blocks)]))
            law = source(input_ids=line[None]).logits[0, :-1].softmax(-1)
            rows = batch.inputs[batch.inputs // batch.ids.shape[1] == number]
            clean += (-(law * logits[rows].log_softmax(-1)).sum(-1)).tolist()
    assert found.consistency.item() == pytest.approx(total / weight, rel=2e-2)  # bfloat16 products
    assert found.clean.item() == pytest.approx(np.mean(clean), rel=2e-2)


def test_prompts_of_a_range_of_lengths_are_as_often_short_as_long(tmp_path):
    ids = np.arange(3000) % 50
    stream = corpus.TokenStream(ids, ids == 0, np.array([0, 3000]))
    prepared = corpus.Prepared(None, stream, stream, [])  # type: ignore[arg-type]
    path = tmp_path / "prompts.jsonl"
    found = consistency.draw_prompts(prepared, path, training=True, count=300, lengths=(8, 400), seed=0)
    lengths = [len(prompt) for prompt in found.ids.values()]
    assert min(lengths) >= 8 and max(lengths) <= 400
    assert 0.4 < np.mean(np.array(lengths) < np.sqrt(8 * 401)) < 0.6
    assert [json.loads(line)["tokens"] for line in path.read_text().splitlines()] == [
        p.tolist() for p in found.ids.values()
    ]


def test_a_blend_lies_between_two_models(tmp_path):
    folders = BUILTIN / "ar-tiny", BUILTIN / "ar-tiny-jacobi"
    out = consistency.blend(*folders, 0.25, tmp_path / "out")
    one, other, made = (load_file(folder / "model.safetensors") for folder in (*folders, out))
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, (0.75 * one[name].float() + 0.25 * other[name].float()).half())


def test_a_share_of_the_last_rounds_change_is_kept_once_and_said(tmp_path):
    before, made = (shutil.copytree(BUILTIN / name, tmp_path / name) for name in ("ar-tiny", "ar-tiny-jacobi"))
    (tmp_path / "round-1").mkdir()
    plan = tmp_path / "round-1" / "plan.json"
    plan.write_text('"words"')
    flags = consistency.parse(["--out", str(tmp_path / "out"), "--rounds", "8:8,8:8", "--last-share", "0.25"])
    flags.work = tmp_path
    first, last = (load_file(folder / "model.safetensors") for folder in (before, made))
    assert consistency.keep_share(flags, before, made, 0) == made, "another round follows"
    for _ in range(2):
        assert consistency.keep_share(flags, before, made, 1) == made
        kept = load_file(made / "model.safetensors")
        for name, weights in kept.items():
            torch.testing.assert_close(weights, torch.lerp(first[name], last[name], 0.25), atol=2e-3, rtol=1e-2)
    assert json.loads(plan.read_text()) == "words; 25% of its change of the weights is kept"


def test_tokens_per_forward_and_common_beginnings_are_counted_by_hand():
    one = jacobi_report.Decoded({"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}, forwards=5)
    other = jacobi_report.Decoded({"a": [1, 2, 9, 4], "b": [5, 6, 7, 8]}, forwards=2)
    assert one.tokens_per_forward == 8 / 5
    for pair in ((one, other), (other, one)):
        assert jacobi_report.same_text({"jacobi": {(8, 32): pair}}) == 0.75


@pytest.mark.ray
@pytest.mark.slow
def test_the_recipe_distils_from_a_jobs_traces_and_goes_on_where_it_was(ray_session, tmp_path, monkeypatch):
    train, held_out = corpus.split(corpus.standard_library())
    few = train[:12] + [file for file in held_out if 6_000 < len(file.text) < 20_000][:2]
    monkeypatch.setattr(corpus, "standard_library", lambda: few)
    # Each of these is a job more; the round has one.
    runs = jacobi_report.Decoded({"0": [7, 8]}, 2), jacobi_report.Decoded({"0": [7, 9]}, 1)
    found = {kind: {(8, 32): runs} for kind in ("jacobi", "multiblock_jacobi")}
    monkeypatch.setattr(consistency, "measure", lambda flags, prepared: found)
    source, out = tmp_path / "source", tmp_path / "made"
    assert ar.main(["--size", "micro-test", "--steps", "3", "--threads", "1", "--out", str(source)]) == 0
    flags = ["--model", str(source), "--out", str(out), "--threads", "1", "--steps", "3", "--batch-tokens", "256"]
    sizes = [
        "--rounds",
        "4:4,4:live",
        "--prompts",
        "6",
        "--prompt-tokens",
        "10",
        "--new-tokens",
        "16",
        "--samples",
        "2",
    ]
    assert consistency.main([*flags, *sizes, "--minutes", "0"]) == 3
    assert not out.exists()
    assert consistency.main([*flags, *sizes]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    text = (out / "README.md").read_text()
    assert "| 8 to 32 | 1.00 | 2.00 | 2.00 | 1.00 | 2.00 | 1.00 |" in text
    assert "the first 50% of the tokens are the same" in text
    assert "| 512 |" in text and "round 1: blocks of 4 tokens, 4 noise" in text
    assert "round 2: blocks of 4 tokens, live" in text
