"""Copies of a finished run in other forms: JSON lines, CSV, one Parquet file, OpenAI batch answers, files of a chosen size."""
