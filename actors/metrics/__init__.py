"""Metrics of results: their settings, one file per family of metrics, and what builds them. Importable without torch."""
