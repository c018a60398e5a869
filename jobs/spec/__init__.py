"""A job's YAML file: its keys, and what is wrong with it."""
