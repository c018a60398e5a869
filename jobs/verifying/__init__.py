"""Checks a run against its manifest and its plan: every file, every row, and whether samples decode to the same text alone."""
