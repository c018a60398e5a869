"""What is asked of the real model: several languages, code, arithmetic, one word, and prompts of a thousand tokens."""

import argparse
import inspect
import json
import random
import textwrap

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue in two sentences.",
    "List five animals that live in the desert.",
    "What is 17 + 25?",
    "Summarise the plot of Romeo and Juliet.",
    "Hi",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Who wrote The Old Man and the Sea?",
    "Translate 'good morning' into Spanish, French and German.",
    "Tell me a joke about a cat and a computer.",
    "Name the planets of the solar system in order.",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite email that declines an invitation.",
    "Is 91 a prime number? Explain.",
    "What happened in 1969?",
    "Count from 1 to 20.",
    "Repeat the word 'echo' ten times.",
    "Write the alphabet backwards.",
    "Was ist die Hauptstadt von Deutschland?",
    "Erkläre mir, wie ein Fahrrad funktioniert. Größe und Gewicht sind egal.",
    "Quelle est la recette de la ratatouille ?",
    "Écris un court poème sur l'été à la mer.",
    "¿Cuántos días tiene un año bisiesto?",
    "Cuéntame una historia muy corta sobre un niño y su perro.",
    "Qual è la montagna più alta d'Italia?",
    "Qual é a capital do Brasil?",
    "Wat is het verschil tussen een fiets en een auto?",
    "日本の首都はどこですか。",
    "请用一句话介绍北京。",
    "Какая столица России?",
    "Ποια είναι η πρωτεύουσα της Ελλάδας;",
    "ما هي عاصمة مصر؟",
    "भारत की राजधानी क्या है?",
    "Türkiye'nin en büyük şehri hangisidir?",
    "Reply with emoji only: 🐍 + 🚀 = ?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a SQL query that counts the orders of each customer.",
    "Fix this code:\n```python\ndef add(a, b)\n    return a - b\n```",
    "What does this print?\n```python\nprint([i * i for i in range(5)])\n```",
    "Write a bash one-liner that counts the lines of all .py files.",
    "Write a JavaScript function that reverses a string.",
    "Write HTML for a table with two rows and three columns.",
    "Complete the pattern: 2, 4, 8, 16, ",
    'Answer in JSON with the keys "name" and "age": Anna is 31 years old.',
    "A\nB\nC\nD\n\nWhich letter comes next?",
    "   What   about   many   spaces   ?   ",
    "Why?",
    "Once upon a time, there was a small dragon who was afraid of fire. Continue the story.",
)

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
