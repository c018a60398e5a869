"""The plain loop of every decoder and exact toy models, for tests, recipes and benchmarks; the product never imports them."""
