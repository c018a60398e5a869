"""Drafts that need no model: an index of the texts that a worker reads and writes."""
