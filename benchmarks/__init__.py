"""Benchmarks, each against other software or against a theoretical limit."""
