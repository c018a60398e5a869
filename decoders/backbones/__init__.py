"""One forward evaluation of a model: networks, attention over the slot cache, checkpoints."""
