"""Decoders of masked-diffusion models: step by step, SSD, ancestral sampling."""
