"""Finished units: passes, sums, metrics measured later, exports, the checks of `verify`, and the runs in a folder."""
