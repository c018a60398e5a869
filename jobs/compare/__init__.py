"""Comparing finished runs, and reports on them: pairs of samples, statistics, plots."""
