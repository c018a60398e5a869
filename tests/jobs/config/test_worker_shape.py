"""`workers` as one mapping or as a list of kinds: what is refused, by its own path, and that it changes no fingerprint."""

import pytest

from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.storage.errors import UserError
from tests.jobs.specs import completion


def spec(workers) -> JobSpec:
    return check_spec(completion(workers=workers))


def test_a_mapping_is_one_kind_and_a_list_several():
    assert [shape.count for shape in spec({"count": 3}).shapes] == [3]
    assert [shape.count for shape in spec([{"count": 3}, {}]).shapes] == [3, "auto"]
    again = spec([{"labels": {"zone": "in(a, b)"}, "gpus": 0.5}])
    assert check_spec(again.model_dump(mode="json")) == again


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"gpus": 1.5}, "workers.gpus: 1.5 is not allowed; allowed: auto, 0, a fraction below 1, or a whole number"),
        ([{}, {"gpus": 1.5}], "workers.1.gpus: 1.5 is not allowed"),
        (
            [{"gpu": 1}],
            "workers.0.gpu: unknown key; did you mean workers.0.gpus? known under workers.0: count, gpus, cpus",
        ),
        ({"gpu": 1}, "workers.gpu: unknown key; did you mean workers.gpus? known under workers: count, gpus, cpus"),
        ([{"count": 0}], "workers.0.count: 0 is not allowed; allowed: auto or >= 1"),
        ([], "workers: [] is not allowed; allowed: a length of at least 1"),
        (3, "workers: 3 is not allowed; allowed: a mapping"),
        ([3], "workers.0: 3 is not allowed; allowed: a mapping"),
        (
            {"labels": {"zone": "a b"}},
            "workers.labels: zone: 'a b' is not allowed; allowed: VALUE, !VALUE, in(A, B), !in(A, B)",
        ),
        ({"labels": {"a b": "x"}}, "workers.labels: 'a b' is not a label of a node"),
        ({"labels": {"zone": "in()"}}, "workers.labels: zone: 'in()' is not allowed"),
        ({"stall_s": 0}, "workers.stall_s: 0 is not allowed; allowed: >= 1"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(workers, message):
    with pytest.raises(UserError) as caught:
        spec(workers)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["a", "!a", "in(a)", "in(a,b)", "!in(a, b-1)", "A.b_c"])
def test_a_label_that_is_allowed_is_one_of_rays(value):
    from ray._private.label_utils import validate_label_selector

    spec({"labels": {"ray.io/accelerator-type": value}})
    assert not validate_label_selector({"ray.io/accelerator-type": value})


def test_no_kind_of_worker_changes_what_a_run_is():
    kinds = [{}, {"count": 2, "gpus": 0.5, "labels": {"a": "b"}}, [{}, {"cpus": 2.0}]]
    assert len({repr(spec(workers).results_key()) for workers in kinds}) == 1


@pytest.mark.parametrize("gpus", [1, 0.5, 3])
def test_the_parts_of_a_split_model_have_a_gpu_each_or_none(gpus):
    with pytest.raises(UserError, match=r"gpus: .* but gpus_per_model is 2; allowed: auto, 0, 2"):
        spec({"gpus_per_model": 2, "gpus": gpus})
    for allowed in ("auto", 0, 2):
        assert spec({"gpus_per_model": 2, "gpus": allowed}).shapes[0].gpus_per_model == 2


def test_a_split_model_is_another_run_and_the_same_for_all_kinds_of_workers():
    assert spec({"gpus_per_model": 1}).results_key() == spec({}).results_key()
    assert spec({"gpus_per_model": 2}).results_key()["model"]["gpus_per_model"] == 2
    with pytest.raises(UserError, match="gpus_per_model is 2, 1; allowed: the same for all kinds of workers"):
        spec([{"gpus_per_model": 2}, {}])
