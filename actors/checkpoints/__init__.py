"""Finds checkpoints: builtin ones, folders, S3, hubs, GGUF files, adapters merged into their model; a hash of each."""
