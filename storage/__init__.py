"""Where rows come from and results go. Knows nothing of models."""
