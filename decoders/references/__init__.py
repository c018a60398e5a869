"""Reference loops of every decoder and exact toy models, for tests, recipes and benchmarks only."""
