"""Reads and measures all rows of a job's inputs, in processes or on a cluster, for the plan."""
