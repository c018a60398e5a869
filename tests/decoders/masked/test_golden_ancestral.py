"""Reverse steps held to the public code's probabilities (MDLM, SEDD), and its whole runs replayed with its own numbers.

Where ours differs on purpose: MDLM's last step is an argmax there and a draw here; a prompt's canvas starts at time 1 there and
at its own share of masks here; the public code draws by a race of float32 numbers. The replays therefore take its times, its
race and its numbers, and our chances and laws.
"""

import pytest
import torch
from safetensors.torch import load_file

from draftmill.decoders.draws.schedule import LAST_TIME, log_scale, total_noise
from draftmill.decoders.masked.ancestral import chances
from tests.decoders.backbones.masked_models import copy_changed, load, look_alone
from tests.decoders.references.absorbing import masked_share
from tests.golden_data import read_arrays, read_json

MASK = 64
MDLM_RUNS = (
    *("run.ddpm.notc.s10", "run.ddpm.tc.s10", "run.ddpm_cache.notc.s10", "run.ddpm_cache.tc.s10"),
    *("run.ddpm_cache.notc.s50", "run.ddpm_cache.tc.s30"),
)
SEDD_RUNS = ("run.analytic.uncond", "run.analytic.cond", "run.euler.uncond", "run.euler.cond")


def cases_of(folder):
    arrays = load_file(folder / "laws.safetensors") | read_arrays(folder / "steps.safetensors")
    return read_json(folder / "cases.json"), arrays


def law_of(logits_RV):
    """Given that it is revealed: the softmax over all but the mask."""
    return logits_RV.index_fill(-1, torch.tensor([MASK]), -torch.inf).double().softmax(-1)


def step_of(logits_RV, kind, time, later):
    """What each masked row becomes: its tokens' probabilities, and in the mask's place that of staying one."""
    chance_R = torch.full((len(logits_RV),), 1.0 - later / time, dtype=torch.float64)
    if kind in {"analytic", "euler"}:
        scores_R = logits_RV.double().index_fill(-1, torch.tensor([MASK]), -torch.inf).logsumexp(-1)
        total_R = (scores_R - log_scale(total_noise(time), logits_RV.shape[1])).exp()
        chance_R = torch.from_numpy(chances(total_R.numpy(), time, later, euler=kind == "euler"))
    probabilities = chance_R.unsqueeze(1) * law_of(logits_RV)
    probabilities[:, MASK] = 1.0 - chance_R
    return probabilities


@pytest.mark.parametrize("mode", ["no_time_cond", "time_cond"])
def test_reverse_steps_of_mdlm_are_the_public_ones(golden, mode):
    cases, arrays = cases_of(golden / "mdlm")
    canvas_of, num_rows = {case["id"]: case for case in cases["log_probs"]}, 0
    for update in cases["updates"]:
        if update["time_conditioning"] != (mode == "time_cond"):
            continue
        case, expected = canvas_of[update["canvas"]], arrays[update["unnormalised_probs"]["array"]]
        logits = arrays[case[mode]["backbone_logits"]["array"]]
        for row, (canvas, time) in enumerate(zip(arrays[case["x"]["array"]], update["t"], strict=True)):
            masked = canvas == MASK
            # Its own analytic update is the same law, by way of scores in float32.
            tolerance = 2e-4 if update["kind"] == "analytic" else 1e-5
            ours = step_of(logits[row][masked], "ddpm", time, time - update["dt"])
            theirs = expected[row][masked].double()
            theirs = theirs / theirs.sum(1, keepdim=True)
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0.0)
            num_rows += len(ours)
    assert num_rows > 100


def race(probabilities, uniforms):
    """The public sampler's draw."""
    return (probabilities / (1e-10 - (uniforms.double() + 1e-10).log())).argmax(-1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MDLM_RUNS)
def test_public_runs_of_mdlm_are_those_of_our_steps_and_their_numbers(golden, tmp_path, name):
    cases, arrays = cases_of(golden / "mdlm")
    run = next(run for run in cases["sample_runs"] if run["id"] == name)
    folder = copy_changed(golden / "mdlm", tmp_path, config={"time_conditioning": run["time_conditioning"]})
    backbone, steps, changed = load(folder), run["num_steps"], 0
    states, uniforms = arrays[run["states_after_each_update"]["array"]], arrays[run["uniforms"]["array"]]
    for row in range(run["batch"]):
        canvas = torch.full((run["length"],), MASK)
        for step in range(steps):
            time, later = (1 + (run["eps"] - 1) * at / steps for at in (step, step + 1))
            masked = canvas == MASK
            sigma = total_noise(time)
            logits = backbone.logits(look_alone(backbone, canvas.tolist(), sigma=sigma))
            found = canvas.clone()
            found[masked] = race(step_of(logits[masked], run["kind"], time, later), uniforms[step, row][masked])
            assert torch.equal(found, states[step, row])
            changed += int((found != canvas).sum())
            canvas = states[step, row]
        logits = backbone.logits(look_alone(backbone, canvas.tolist(), sigma=total_noise(LAST_TIME)))
        last = torch.where(canvas == MASK, law_of(logits).argmax(-1), canvas)
        assert torch.equal(last, arrays[run["final_x"]["array"]][row])
    assert changed > 12 * run["batch"]


@pytest.mark.parametrize("kind", ["analytic", "euler", "denoiser"])
def test_reverse_steps_of_sedd_are_the_public_ones(golden, kind):
    cases, arrays = cases_of(golden / "sedd")
    backbone, num_rows = load(golden / "sedd"), 0
    canvas_of = {case["id"]: case for case in cases["score"]}
    for update in (update for update in cases["updates"] if update["kind"] == kind):
        expected = arrays[update["probs_as_sampled"]["array"]]
        tokens = arrays[canvas_of[update["canvas"]]["x"]["array"]]
        for row, (canvas, time) in enumerate(zip(tokens, update["t"], strict=True)):
            masked = canvas == MASK
            sigma = total_noise(time)
            logits = backbone.logits(look_alone(backbone, canvas.tolist(), sigma=sigma))[masked]
            theirs = expected[row][masked].double()
            if kind == "denoiser":
                # Theirs has no column for the mask and is not normalised.
                ours, theirs = law_of(logits)[:, :MASK], theirs / theirs.sum(1, keepdim=True)
            else:
                ours = step_of(logits, kind, time, time - update["dt"])
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
            num_rows += len(ours)
    assert num_rows > 50


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SEDD_RUNS)
def test_public_runs_of_sedd_are_those_of_our_steps_and_their_numbers(golden, name):
    cases, arrays = cases_of(golden / "sedd")
    run = next(run for run in cases["sample_runs"] if run["id"] == name)
    backbone, steps, changed = load(golden / "sedd"), run["steps"], 0
    pinned = run["projection"] or {"positions": [], "tokens": []}
    states, uniforms = arrays[run["raw_samples_after_each_update"]["array"]], arrays[run["uniforms_updates"]["array"]]
    for row in range(run["batch"]):
        canvas = torch.full((run["length"],), MASK)
        for step in range(steps + 1):
            canvas = canvas.clone()
            canvas[pinned["positions"]] = torch.tensor(pinned["tokens"], dtype=torch.int64)
            masked, found = canvas == MASK, canvas.clone()
            time, later = (1 + (run["eps"] - 1) * at / steps for at in (step, step + 1))
            sigma = total_noise(time)
            logits = backbone.logits(look_alone(backbone, canvas.tolist(), sigma=sigma))[masked]
            if step == steps:
                numbers = arrays[run["uniforms_denoiser"]["array"]][row][masked]
                found[masked] = race(law_of(logits)[:, :MASK], numbers)
                assert torch.equal(found, arrays[run["final_x"]["array"]][row])
                break
            found[masked] = race(step_of(logits, run["predictor"], time, later), uniforms[step, row][masked])
            assert torch.equal(found, states[step, row])
            changed += int((found != canvas).sum())
            canvas = states[step, row]
    assert changed >= 5, "most masks of this model stay for the last step"


def test_in_the_public_graph_only_masks_become_something_else(golden):
    """What the chances above rest on: backwards in time a mask may have been any token with the share masked meanwhile, and by
    the rate with weight 1; any other token only itself."""
    cases, arrays = cases_of(golden / "sedd")
    graph, num_masks = cases["graph"], 0
    for row, sigma in enumerate(graph["sigma"]):
        share = masked_share(torch.tensor(sigma))
        tokens, moves, rates = (arrays[graph[name]["array"]][row] for name in ("x", "transp_transition", "transp_rate"))
        for token, move, rate in zip(tokens.tolist(), moves, rates, strict=True):
            own = torch.nn.functional.one_hot(torch.tensor(token), MASK + 1)
            num_masks += token == MASK
            expected = torch.where(own > 0, 1.0, share) if token == MASK else own * (1.0 - share)
            torch.testing.assert_close(move, expected, atol=1e-6, rtol=0.0)
            assert rate.tolist() == (1 - own if token == MASK else -own).tolist()
    assert 0 < num_masks < 12
