"""Runs programs that a model wrote, apart from the rest of the machine: docs/guarantees.md says how far that goes."""
