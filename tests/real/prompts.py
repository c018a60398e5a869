"""What is asked of the real model: several languages, code, arithmetic, one word, and prompts of a thousand tokens."""

import argparse
import inspect
import json
import random
import textwrap
from pathlib import Path

QUESTIONS = json.loads((Path(__file__).parents[1] / "data" / "questions.json").read_text())

_SOURCES = (
    (textwrap.dedent, "What does this function do?"),
    (inspect.getsourcefile, "Explain this code line by line."),
    (textwrap.shorten, "Find the bugs in this code, if there are any."),
    (json.dumps, "Summarise what the arguments mean."),
    (inspect.getsource, "Write a test for this function."),
    (random.Random.choices, "Rewrite this method with fewer lines."),
    (argparse.ArgumentParser.parse_args, "What are the edge cases of this method?"),
    (inspect.cleandoc, "Add a docstring in German."),
    (textwrap.TextWrapper._wrap_chunks, "How does this algorithm work?"),
    (argparse.HelpFormatter._format_usage, "What is the longest branch of this method for?"),
    (inspect.getmodule, "Could this function be faster?"),
    (random.Random.sample, "Explain when the set is used and when the list."),
    (json.JSONEncoder.iterencode, "Which names are closures here?"),
    (inspect.signature, "What does this return?"),
)


def prompts() -> list[str]:
    """Sixty-four prompts of a user; the last ones quote sources of the standard library, up to about 1,500 tokens."""
    long = [f"{question}\n\n```python\n{inspect.getsource(inspect.unwrap(source))}```" for source, question in _SOURCES]
    return [*QUESTIONS, *long]
