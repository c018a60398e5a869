"""Workers as Ray actors: pools, groups of GPUs that share a model, and notices of machines that leave."""
