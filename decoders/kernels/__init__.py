"""Triton kernels for GPUs, each beside its reference in torch. Knows nothing of samples, decoders and models."""
