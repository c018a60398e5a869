"""Bytes under names: a local folder, memory, S3, with the same guarantees."""
