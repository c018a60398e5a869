"""The results of finished units: passes over the rows, sums, and input order."""
