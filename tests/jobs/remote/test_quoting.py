"""Names with spaces, quotes, %, $ and YAML's special characters arrive as they are, in every kind of manifest."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftmill.jobs.remote.manifest import comment, crontab, shell, slug, yaml_document, yaml_text
from tests.jobs.remote.made import data_of, templates, text_of, write_spec

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
