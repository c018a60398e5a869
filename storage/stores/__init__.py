"""Stores of named bytes with the same guarantees: a local folder, memory, S3."""
