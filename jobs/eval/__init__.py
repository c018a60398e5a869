"""Evaluation with lm-evaluation-harness: its requests as jobs, their results as its answers."""
