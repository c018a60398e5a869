"""Every kind of manifest is accepted by what reads it, mistakes in it are found, and names of any characters arrive in it."""

import os
import re
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftmill.jobs.cli import parser
from draftmill.jobs.config.spec import load_spec
from draftmill.jobs.remote.manifest import KINDS, comment, crontab, shell, slug, yaml_document, yaml_text
from tests.jobs.remote.made import KUBERAY, RICH, SPEC, data_of, templates, text_of, write_spec
from tests.jobs.remote.validators import kuberay_problems, kubernetes_problems, shell_problems


def problems(kind: str, text: str) -> list[str]:
    if kind in KUBERAY:
        return kuberay_problems(yaml.safe_load(text)) + pod_problems(yaml.safe_load(text))
    if kind == "cronjob":
        return kubernetes_problems(yaml.safe_load(text))
    if kind == "cron":
        return shell_problems(f"#!/bin/bash\n# shellcheck disable=SC1091\n{command_of(text)}\n")
    return shell_problems(text)


def pod_problems(manifest: dict) -> list[str]:
    """KubeRay's schema knows pods, but not which names and quantities Kubernetes allows: its own schema of pods does a part."""
    found = []
    for template in templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"} | template.get("metadata", {})}
        found += kubernetes_problems(pod | {"spec": template["spec"]})
    return found


def command_of(crontab: str) -> str:
    (entry,) = [line for line in crontab.splitlines() if re.match(r"[0-9*]", line)]
    return entry.split(" ", 5)[5]


DATED = {"path": "s3://bucket/nightly/{date:%Y-%m-%d}"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rich", [False, True], ids=["defaults", "many options"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_accepted_by_what_reads_it(kind, rich, tmp_path):
    options = RICH[kind] if rich else {}
    text = text_of(write_spec(tmp_path, output=DATED if rich else SPEC["output"]), kind, **options)
    assert problems(kind, text) == []


MISTAKES: dict[str, list[tuple[str, str, str]]] = {
    "rayjob": [
        ("backoffLimit", "backofLimit", "backofLimit"),
        ("activeDeadlineSeconds: 86400", 'activeDeadlineSeconds: "86400"', "integer"),
        ("replicas: 2", "replicas: two", "integer"),
        ("          containers:\n            - name: ray-head", "          containers:\n            - title: ray-head", "name"),
        ("mode: token", "mode: password", "password"),
    ],
    "raycluster": [("groupName: decode", "group: decode", "groupName")],
    "cronjob": [
        ("concurrencyPolicy", "concurencyPolicy", "concurencyPolicy"),
        ("startingDeadlineSeconds: 3600", 'startingDeadlineSeconds: "3600"', "integer"),
        ("key: auth_token", "keys: auth_token", "key"),
    ],
    "slurm": [
        ('cd "', "cd $", "SC"),
        ('"${nodes[@]:1}"', "${nodes[@]:1}", "SC2068"),
        ("esac", "", "SC"),
    ],
    "cron": [("2>&1", "2>&1 && echo $done", "SC2154")],
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "right", "wrong", "said"),
    [(kind, *mistake) for kind, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_planted_mistake_is_found(kind, right, wrong, said, tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    text = text_of(write_spec(tmp_path), kind)
    text = text.replace(f"cd '{Path.cwd()}'", f'cd "{Path.cwd()}"', kind == "slurm")
    assert right in text
    assert said in "\n".join(problems(kind, text.replace(right, wrong, 1)))


def test_every_kind_has_a_planted_mistake():
    assert MISTAKES.keys() == set(KINDS)


@pytest.mark.parametrize("kind", ["rayjob", "cronjob"])
def test_the_spec_arrives_in_the_pod_as_it_was_written(kind, tmp_path):
    spec = write_spec(tmp_path)
    Path(spec).write_text("# why this job is there\n" + Path(spec).read_text())
    annotations = templates(data_of(spec, kind))[0]["metadata"]["annotations"]
    assert annotations["draftmill-spec.yaml"] == Path(spec).read_text()


def test_a_spec_without_name_keeps_the_name_of_its_file_and_overrides_are_applied(tmp_path):
    path = tmp_path / "evening run.yaml"
    path.write_text(
        "{task: {kind: complete}, input: {path: 'builtin:python-stdlib', chunk_chars: 99}, model: {path: 'builtin:ar-tiny'}, "
        "decoder: {kind: jacobi}, output: {path: 's3://b/c'}}"
    )
    overrides = ["sampling.temperature=1e-3", 'output.path=s3://b/it\'s 100% "new"']
    manifest = data_of(str(path), "rayjob", overrides)
    assert manifest["metadata"]["name"] == "evening-run"
    sent = tmp_path / "sent.yaml"
    sent.write_text(templates(manifest)[0]["metadata"]["annotations"]["draftmill-spec.yaml"])
    assert load_spec(sent) == load_spec(path, overrides)


def test_the_entry_point_has_no_word_that_needs_quotes(tmp_path):
    """KubeRay passes it through two shells, so that no quoting would survive."""
    for output in (SPEC["output"], DATED):
        manifest = data_of(write_spec(tmp_path, output=output), "rayjob")["spec"]
        assert re.fullmatch(r"[A-Za-z0-9/. -]+", manifest["entrypoint"])


@pytest.mark.parametrize("kind", KINDS)
def test_authentication_is_explicit_everywhere(kind, tmp_path):
    assert re.search(r"RAY_AUTH_MODE\W+(value: )?token", text_of(write_spec(tmp_path), kind))


@pytest.mark.parametrize("kind", ["rayjob", "raycluster", "cronjob"])
def test_pods_have_time_to_end_and_no_root(kind, tmp_path):
    for template in templates(data_of(write_spec(tmp_path), kind)):
        spec = template["spec"]
        (container,) = spec["containers"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        grace, patience = int(environment["DRAFTMILL_GRACE_SECONDS"]), int(environment["RAY_JOB_STOP_WAIT_TIME_S"])
        assert 30 <= grace < patience < spec["terminationGracePeriodSeconds"] <= 60
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_secrets_are_references(tmp_path):
    spec = write_spec(tmp_path)
    for kind in KUBERAY:
        for template in templates(data_of(spec, kind)):
            assert template["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "draftmill-s3"}}]
    with_account = templates(data_of(spec, "rayjob", service_account="reader"))[0]["spec"]
    assert with_account["serviceAccountName"] == "reader"
    assert "envFrom" not in with_account["containers"][0]
    environment = templates(data_of(spec, "cronjob"))[0]["spec"]["containers"][0]["env"]
    token = next(one for one in environment if one["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "draftmill", "key": "auth_token"}


@pytest.mark.parametrize(
    ("workers", "options", "nodes", "resources"),
    [
        ({"count": 3, "cpus": 2}, {}, 3, {"cpu": "2", "memory": "8Gi"}),
        ({"count": 5, "gpus": 0.5}, {"nodes": 3}, 3, {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}),
        ({"count": 6, "gpus": 1.0, "cpus": 3}, {"nodes": 2}, 2, {"cpu": "9", "memory": "8Gi", "nvidia.com/gpu": "3"}),
        ({"gpus": 2.0}, {"nodes": 4}, 4, {"cpu": "1", "memory": "8Gi", "nvidia.com/gpu": "2"}),
        ({}, {}, 1, {"cpu": "1", "memory": "8Gi"}),
    ],
)
def test_nodes_have_room_for_the_workers_of_the_spec(workers, options, nodes, resources, tmp_path):
    spec = write_spec(tmp_path, workers=workers)
    (group,) = data_of(spec, "raycluster", **options)["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (nodes, nodes, nodes)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == resources


MINUTE = int(datetime(2026, 7, 9, 3, tzinfo=UTC).timestamp()) // 60


@pytest.mark.parametrize(("name", "date"), [(f"nightly-{MINUTE}", "2026-07-09T03:00:00Z"), ("nightly-now", None)])
def test_a_scheduled_run_has_the_date_of_its_schedule(name, date, tmp_path):
    manifest = data_of(write_spec(tmp_path, output=DATED), "cronjob", **RICH["cronjob"])
    script = templates(manifest)[0]["metadata"]["annotations"]["draftmill-run.sh"]
    assert shell_problems(script) == []
    words = run_script(script, {"JOB_NAME": name}, tmp_path)
    assert words[1:3] == ["submit", "/etc/draftmill/spec.yaml"]
    assert words[words.index("--if-running") + 1] == "skip"
    assert (words[words.index("--logical-date") + 1] if "--logical-date" in words else None) == date
    assert words[words.index("--shared") + 1] == "/data it's"


def test_a_job_without_dates_has_no_script_and_no_logical_date(tmp_path):
    """`draftmill run` refuses --logical-date where the output path has no date."""
    text = text_of(write_spec(tmp_path), "cronjob")
    assert "run.sh" not in text and "--logical-date" not in text and "--if-running" in text


def run_script(script: str, environment: dict[str, str], folder: Path) -> list[str]:
    """The command that a script ends with, as a program in the place of draftmill sees it."""
    fake = folder / "bin" / "draftmill"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "$0" "$@"\n')
    fake.chmod(0o755)
    path = f"{fake.parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash"], input=script, env={"PATH": path} | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("output", [SPEC["output"], DATED], ids=["one directory", "dated"])
@pytest.mark.parametrize("kind", ["rayjob", "cronjob", "slurm", "cron"])
def test_the_program_knows_the_command_that_a_manifest_runs(kind, output, tmp_path):
    text = text_of(write_spec(tmp_path, output=output), kind, ["seed=3"])
    if kind == "cronjob" and output == SPEC["output"]:
        words = templates(yaml.safe_load(text))[0]["spec"]["containers"][0]["command"]
    else:
        (line,) = re.findall(r"^.*(draftmill (?:run|submit) /.*?)(?: >> .*| &|\")?$", text, re.MULTILINE)
        for variable in ('"${date[@]}', '"$(cat "$stamp")"'):
            line = line.replace(variable, "--logical-date 2026-07-09" if "date" in variable else "2026-07-09")
        words = shlex.split(line)
    arguments = parser().parse_args(words[1:])
    assert arguments.if_running == "skip"
    assert 30 < arguments.grace_s <= 45 or kind.startswith("ray")
    assert kind not in {"slurm", "cron"} or arguments.overrides == ["seed=3"]
    assert (arguments.logical_date is not None) == (output == DATED and kind in {"cronjob", "slurm"})


NASTY = [
    "plain", "two words", "it's", 'say "hi"', "100%", "%%", "a\\b", "\\%", "\\\\%", "$HOME", "$(id)", "`id`", "a;b", "a&b",
    "# no comment", "key: value", "- item", "yes", "no", "null", "~", "1e3", "0x1F", "1_000", "2026-11-22", "12:30", "*.yaml",
    "{a: b}", "[1]", "!tag", "&anchor", "*alias", "@at", "|", ">", "tab\there", "ümlaut", "日本", "emoji 😀", "trailing ",
    " leading", "-dash", "--set", "'", '"', "'\"'", "\\", "\\'", "a\\\\", "<<EOF", "!!", "a=b", "?", "%s %d %n", "EOF",
]  # fmt: skip
"""Words that some shell, crontab or YAML reader could mistake for something else."""

WORDS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12) | st.sampled_from(
    NASTY
)


def by_bash(command: str) -> list[str]:
    """The words that bash makes of a command."""
    done = subprocess.run(["bash", "-c", f'printf "%s\\0" {command}'], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def by_cron(command: str, *, backslashes: bool) -> str:
    """What cron hands to the shell: up to an unescaped %, without the backslash before %, and in some before a backslash."""
    said, escaped = "", False
    for character in command:
        if escaped and (character == "%" or (backslashes and character == "\\")):
            said = said[:-1] + character
            escaped = False
            continue
        if character == "%" and not escaped:
            break
        escaped = character == "\\" and not escaped
        said += character
    return said


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=12))
def test_words_survive_shells_and_crontabs(words):
    assert by_bash(shell(words)) == words
    line = crontab(words)
    for backslashes in (False, True):  # programs differ in this
        assert by_bash(by_cron(line, backslashes=backslashes)) == words


def test_all_nasty_words_survive_at_once():
    test_words_survive_shells_and_crontabs.hypothesis.inner_test(NASTY)


JSON = st.recursive(
    WORDS | st.integers() | st.booleans() | st.none() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example({"0": ["\n", ["0"]]})
@example({"0": ["\n", {"a": "\n", "b": 1}]})
@given(st.dictionaries(WORDS, JSON, min_size=1, max_size=4))
@pytest.mark.slow
def test_any_data_survives_yaml(data):
    assert yaml.safe_load(yaml_document(data)) == data


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@example("a\n\n\n")
@example("  a\n b\n")
@example("a\u2028b\n")
@given(st.one_of(WORDS, st.text(), st.text("a \n#:-\t\x85\u2028", max_size=12)))
def test_any_text_survives_as_a_value_at_any_depth(text):
    written = f"a:\n    b: {yaml_text(text, 4)}\n    c: 1\n"
    assert yaml.safe_load(written) == {"a": {"b": text, "c": 1}}


def test_strings_that_yaml_readers_see_differently_are_in_quotes():
    """YAML 1.1 and 1.2 disagree on these, and so do PyYAML and Kubernetes."""
    for word in ("y", "n", "Yes", "off", "1e3", "0o17", "012", "1_0", "2026-11-22", "1:30", "=", "<<", "", "~", "4Gi"):
        assert yaml_text(word) == f'"{word}"'


def test_a_comment_can_not_become_data():
    lines = comment("one\ntwo: three\n  --- four\n\nfive " * 9, 2).splitlines()
    assert len(lines) > 1 and all(line.strip().startswith("#") for line in lines)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.slow
def test_a_spec_with_a_nasty_name_and_path_arrives(name, tmp_path, monkeypatch):
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    file = f"{name.replace('/', '_')}.yaml"
    if not (name.isprintable() and str(folder).isprintable()):
        return  # refused, in test_refused.py
    spec = write_spec(folder, name=file)
    Path(spec).write_text(Path(spec).read_text().replace("name: nightly", yaml_document({"name": name}).strip()))
    for kind in ("rayjob", "cronjob"):
        manifest = data_of(spec, kind)
        sent = yaml.safe_load(templates(manifest)[0]["metadata"]["annotations"]["draftmill-spec.yaml"])
        assert sent["name"] == name
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", manifest["metadata"]["name"])
    monkeypatch.chdir(folder)
    (folder / "draftmill").touch()
    monkeypatch.setattr("sys.executable", f"{folder}/python")
    script = text_of(spec, "slurm")
    driver = next(line for line in script.splitlines() if " run " in line and "--ray-address" in line)
    words = shlex.split(driver.strip().removesuffix("&"))
    assert words[:3] == [f"{folder}/draftmill", "run", spec]
    entry = text_of(spec, "cron").splitlines()[-1].split(" ", 5)[5]
    for backslashes in (False, True):
        assert spec in by_bash(by_cron(entry, backslashes=backslashes).partition("exec ")[2].partition(" >> ")[0])


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=90), st.sampled_from([36, 47, 53]))
def test_names_are_what_kubernetes_slurm_and_cron_allow(name, longest):
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", slug(name, longest))
    assert len(slug(name, longest)) <= longest


def test_long_names_that_differ_at_their_ends_stay_different():
    assert slug("a" * 60 + "b", 36) != slug("a" * 60 + "c", 36)
    assert slug("日本", 36) != slug("中国", 36)
    assert slug("stdlib-infill", 36) == "stdlib-infill"
    assert os.path.basename(slug("a/b", 36)) == "a-b"
