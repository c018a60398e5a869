"""How tokens are made. Knows nothing of Ray, files or jobs."""
