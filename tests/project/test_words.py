"""Messages, help texts and descriptions use the words of CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("| do not write |")[2]
UNWANTED = [word for left in re.findall(r"^\| ([^|-]+) \| ", TABLE, re.MULTILINE) for word in left.split(", ")]


def messages(source: str) -> list[str]:
    """The texts of several words in a module that are not docstrings; an f-string is one text, its values are {}."""
    tree, inside = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
    texts = []
    for node in ast.walk(tree):
        if id(node) not in inside and isinstance(node, ast.JoinedStr):
            texts.append("".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values))
        elif id(node) not in inside and isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return [text for text in texts if " " in text.strip()]


def unwanted(text: str) -> list[str]:
    """The words of a message that CONTRIBUTING.md replaces, and words that stand twice."""
    found = [word for word in UNWANTED if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    return found + [twice[0] for twice in re.finditer(r"\b([a-z]+) \1\b", text)]


def test_no_message_uses_a_word_that_contributing_replaces():
    folders = [ROOT / name for name in ("jobs", "actors", "decoders", "storage", "infra")]
    found = {path: messages(path.read_text()) for folder in folders for path in folder.rglob("*.py")}
    assert sum(map(len, found.values())) > 2000
    bad = [f"{path}: {text}: {words}" for path, texts in found.items() for text in texts if (words := unwanted(text))]
    assert not bad, "\n".join(bad)


def test_an_unwanted_word_in_a_message_is_found():
    source = (
        'def f(n):\n    """A docstring may: so many."""\n    raise ValueError(f"{n} rows are left " f"out: is is")\n'
    )
    assert messages(source) == ["{} rows are left out: is is"]
    assert unwanted(messages(source)[0]) == ["left out", "is is"]
    assert len(UNWANTED) > 20
