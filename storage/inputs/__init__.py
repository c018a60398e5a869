"""Input files as rows."""
