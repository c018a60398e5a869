"""Decoders of causal models: speculative decoding, SpecDiff, Jacobi, scoring."""
