"""Decoders of any-subset models: ASSD and its baselines."""
