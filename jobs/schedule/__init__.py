"""Assigns units to workers and handles failures. Pure: no Ray, clock, disk or threads."""
