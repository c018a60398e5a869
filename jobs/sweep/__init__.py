"""Sweeps: many jobs that differ in a few settings, which share plans and loaded models."""
