"""The job spec: the keys of a job's YAML file, and the messages about errors in it."""
