"""The papers in small: each paper's claims, tested with sweeps over the builtin models."""
