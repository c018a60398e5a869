"""The decoding algorithms and the models that they run. Knows nothing of Ray, files or jobs."""
