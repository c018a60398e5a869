"""Reads inputs, stores files and commits results. Knows nothing of models."""
