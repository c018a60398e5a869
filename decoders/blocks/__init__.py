"""Decoders of block-diffusion models: denoising block by block, S2D2."""
