"""Computes the metrics of finished rows, in processes or on a cluster."""
