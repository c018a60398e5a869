"""What finished units hold: passes, sums, order."""
